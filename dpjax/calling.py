"""The calling convention: from a user's function and arguments to flat arrays.

Which arguments are parameters, which hold the batch, and what one example sees.
"""

import dataclasses
import numbers
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from dpjax import _compat, batch_statistics

PyTree: TypeAlias = Any


@dataclasses.dataclass(frozen=True)
class Convention:
    """How a loss function is called; see `dpjax.clipped_grad` for the meanings."""

    fun: Callable[..., Any]
    argnums: int | Sequence[int] = 0
    has_aux: bool = False
    batch_argnums: int | Sequence[int] = 1
    keep_batch_dim: bool = True
    prng_argnum: int | None = None

    def __post_init__(self) -> None:
        argnums, batch_argnums = self._argnums, self._batch_argnums
        if not argnums:
            raise ValueError("argnums=() must name at least one argument")
        if not batch_argnums:
            raise ValueError("batch_argnums=() must name at least one argument")
        if min(argnums + batch_argnums) < 0:
            raise ValueError(
                f"argnums={self.argnums} and batch_argnums={self.batch_argnums} must "
                "be >= 0: count positional arguments from the left"
            )
        if set(argnums) & set(batch_argnums):
            raise ValueError(
                f"argnums={self.argnums} and batch_argnums={self.batch_argnums} "
                "overlap: an argument holds either parameters or examples"
            )

    @property
    def _argnums(self) -> tuple[int, ...]:
        return _as_tuple(self.argnums)

    @property
    def _batch_argnums(self) -> tuple[int, ...]:
        return _as_tuple(self.batch_argnums)

    def parameters(self, args: Sequence[Any]) -> PyTree:
        """The pytree that gradients are taken for (a tuple if argnums is one)."""
        if isinstance(self.argnums, int):
            return args[self.argnums]
        return tuple(args[i] for i in self.argnums)

    def bind(self, args: Sequence[Any], kwargs: dict[str, Any]) -> "Call":
        """Flattens one call's arguments; raises one-line errors for wrong ones."""
        needed = max(*self._argnums, *self._batch_argnums, self.prng_argnum or 0)
        if len(args) <= needed:
            raise ValueError(
                f"got {len(args)} positional arguments, but argnums={self.argnums}, "
                f"batch_argnums={self.batch_argnums} and "
                f"prng_argnum={self.prng_argnum} need {needed + 1}"
            )
        batch_statistics.require_none(self.parameters(args), "the parameter ")
        leaves, parameter_tree = jax.tree.flatten(self.parameters(args))
        paths = _paths(self.parameters(args))
        batched = {f"argument {i}": args[i] for i in self._batch_argnums}
        batched.update(kwargs)
        batch_size = _batch_size(batched)

        mapped: dict[int | str, Any] = {i: args[i] for i in self._batch_argnums}
        if self.keep_batch_dim:
            mapped = jax.tree.map(lambda x: jnp.expand_dims(x, 1), mapped)
        if self.prng_argnum is not None:
            mapped[self.prng_argnum] = jax.tree.map(
                lambda key: jax.random.split(key, batch_size), args[self.prng_argnum]
            )
        mapped = {"args": mapped, "kwargs": dict(kwargs)}
        examples, example_tree = jax.tree.flatten(mapped)
        _check_devices([*leaves, *examples])

        def one_example(leaves: Sequence[Any], example: Sequence[Any]) -> Any:
            given = list(args)
            parameters = jax.tree.unflatten(parameter_tree, leaves)
            if isinstance(self.argnums, int):
                parameters = (parameters,)
            for i, value in zip(self._argnums, parameters, strict=True):
                given[i] = value
            seen = jax.tree.unflatten(example_tree, example)
            for i, value in seen["args"].items():
                given[i] = value
            result = self.fun(*given, **seen["kwargs"])
            loss, aux = _checked_pair(result) if self.has_aux else (result, None)
            batch_statistics.require_none(aux, "aux")
            return _checked_loss(loss), aux

        return Call(
            [_checked_leaf(*item) for item in zip(leaves, paths, strict=True)],
            paths,
            parameter_tree,
            [jnp.asarray(x) for x in examples],
            batch_size,
            one_example,
        )


@dataclasses.dataclass(frozen=True)
class Call:
    """One call, flattened.

    Attributes:
      leaves: the parameter leaves.
      paths: a readable path for each of them.
      parameter_tree: their tree.
      examples: arrays with a leading batch axis that together make up the batch.
      batch_size: length of that axis.
      one_example: (leaves, one example's arrays) -> (scalar loss, aux).
    """

    leaves: list[jax.Array]
    paths: list[str]
    parameter_tree: Any
    examples: list[jax.Array]
    batch_size: int
    one_example: Callable[[Sequence[Any], Sequence[Any]], tuple[jax.Array, PyTree]]

    def specs(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the leaves and of one example's arrays."""
        batched = [jax.typeof(x) for x in self.examples]
        return [
            jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type)
            for x in map(jax.typeof, self.leaves)
        ] + [
            jax.ShapeDtypeStruct(x.shape[1:], x.dtype, weak_type=_is_weak(x))
            for x in batched
        ]


def _is_weak(aval: Any) -> bool:
    return getattr(aval, "weak_type", False)


def _as_tuple(argnums: int | Sequence[int]) -> tuple[int, ...]:
    return (argnums,) if isinstance(argnums, int) else tuple(argnums)


def _paths(tree: PyTree) -> list[str]:
    return [
        jax.tree_util.keystr(path) or "the parameter"
        for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]
    ]


def _batch_size(batched: dict[str, PyTree]) -> int:
    sizes: dict[int, str] = {}
    for name, tree in batched.items():
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
            where = f"{name}{jax.tree_util.keystr(path)}"
            shape = jnp.shape(leaf)
            if not shape:
                raise ValueError(f"{where} is a scalar: it must have a batch axis 0")
            sizes.setdefault(shape[0], where)
    if not sizes:
        raise ValueError(
            f"the batch ({', '.join(batched)}) holds no arrays: it must have at least "
            "one, with examples along axis 0"
        )
    if len(sizes) > 1:
        found = ", ".join(f"{size} in {where}" for size, where in sizes.items())
        raise ValueError(
            f"the batch's arrays must agree in length along axis 0: {found}"
        )
    return next(iter(sizes))


def _check_devices(arrays: Sequence[Any]) -> None:
    """Refuses `jax.shard_map`'s sums over devices of what belongs to one example."""
    axes = frozenset().union(*map(_compat.varying_axes, arrays))
    if axes:
        raise ValueError(
            f"arguments differ over the shard_map axes {sorted(map(str, axes))}, over "
            "which derivatives would be summed before clipping: give jax.shard_map "
            "check_vma=False, or shard the batch with jax.jit instead"
        )


def _checked_leaf(leaf: Any, path: str) -> jax.Array:
    array = jnp.asarray(leaf)
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        raise TypeError(
            f"{path} has dtype {array.dtype}, which has no gradient: pass it in an "
            "argument that argnums leaves out, or make it floating point"
        )
    return array


def _checked_pair(result: Any) -> tuple[Any, PyTree]:
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise TypeError(
            f"fun returned a {type(result).__name__}, but with has_aux=True it must "
            "return a pair (loss, aux)"
        )
    return result[0], result[1]


def _checked_loss(loss: Any) -> jax.Array:
    if not hasattr(loss, "shape") and not isinstance(loss, numbers.Number):
        raise TypeError(
            f"fun returned a {type(loss).__name__}, but it must return a scalar loss: "
            "set has_aux=True if it returns (loss, aux)"
        )
    array = jnp.asarray(loss)
    if array.shape:
        raise TypeError(
            f"fun returned a loss of shape {array.shape}, but it must be a scalar for "
            "one example: reduce it, and set has_aux=True if fun also returns aux"
        )
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(
            f"fun returned a loss of dtype {array.dtype}, but it must be floating point"
        )
    return array
