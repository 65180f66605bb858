"""A printable account of how each parameter's per-example norm is computed."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from dpjax import methods, tracing
from dpjax.calling import Convention
from dpjax.methods import Method
from dpjax.planning import Rule


class Row(NamedTuple):
    """One parameter.

    Attributes:
      parameter: its path.
      shape: its shape.
      operation: the operations in which it meets data, with the number of uses.
      rule: how its squared norm is computed.
      flops: floating point operations of that norm, for one example.
      bytes: what that norm writes and reads beside activations and cotangents, for one
        example.
    """

    parameter: str
    shape: tuple[int, ...]
    operation: str
    rule: Rule
    flops: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class Explanation:
    """How a function's per-example gradient norms are computed; `print` it.

    Attributes:
      rows: one for each parameter leaf, in the order of the pytree.
      method: what `method="auto"` of `dpjax.clipped_grad` goes by.
    """

    rows: tuple[Row, ...]
    method: Method

    @property
    def fallbacks(self) -> tuple[str, ...]:
        """Paths of the parameters whose per-example gradients are formed."""
        return tuple(r.parameter for r in self.rows if r.rule is Rule.FALLBACK)

    def __str__(self) -> str:
        header = ("parameter", "shape", "meets data in", "norm by", "FLOPs", "bytes")
        body = [
            (
                row.parameter,
                "x".join(map(str, row.shape)) or "scalar",
                row.operation,
                row.rule.value,
                _with_unit(row.flops),
                _with_unit(row.bytes),
            )
            for row in self.rows
        ]
        widths = [max(map(len, column)) for column in zip(header, *body, strict=True)]
        lines = [
            "  ".join(
                cell.rjust(width) if i >= 4 else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in (header, *body)
        ]
        lines.insert(1, "  ".join("-" * width for width in widths))
        summary = (
            "FLOPs and bytes of the norm, for one example. "
            f'method="auto" is "{self.method}".'
        )
        if self.fallbacks:
            summary += (
                " No norm rule covers " + ", ".join(self.fallbacks) + ": exact, but "
                "their per-example gradients are formed."
            )
        return "\n".join([*lines, summary])


def explain(
    fun: Callable[..., Any],
    *args: Any,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    batch_argnums: int | Sequence[int] = 1,
    keep_batch_dim: bool = True,
    prng_argnum: int | None = None,
    memory_budget_bytes: int | None = None,
    strict: bool = False,
    **kwargs: Any,
) -> Explanation:
    """Says, for every parameter, where it meets data and how its norm is computed.

    Example:
      >>> import jax.numpy as jnp
      >>> loss = lambda p, x: jnp.sum(jnp.tanh(x @ p["w"] + p["b"][None]))
      >>> params = {"w": jnp.ones((3, 2)), "b": jnp.ones(2)}
      >>> print(explain(loss, params, jnp.ones((8, 3))))
      parameter  shape  meets data in  norm by      FLOPs  bytes
      ---------  -----  -------------  -----------  -----  -----
      ['b']      2      add            elementwise      4     16
      ['w']      3x2    dot_general    gram            10      8
      FLOPs and bytes of the norm, for one example. method="auto" is "bookkeeping".

    Args:
      fun: as for `dpjax.clipped_grad`, as are the keyword arguments.
      *args: the arguments that `fun` is called with: parameters and a batch.
      argnums: see `dpjax.clipped_grad`.
      has_aux: see `dpjax.clipped_grad`.
      batch_argnums: see `dpjax.clipped_grad`.
      keep_batch_dim: see `dpjax.clipped_grad`.
      prng_argnum: see `dpjax.clipped_grad`.
      memory_budget_bytes: see `dpjax.clipped_grad`.
      strict: raise ValueError, naming the parameters, if any needs per-example
        gradients formed because no norm rule covers its use.
      **kwargs: `fun`'s keyword arguments, mapped over axis 0.
    """
    convention = Convention(
        fun, argnums, has_aux, batch_argnums, keep_batch_dim, prng_argnum
    )
    call = convention.bind(args, kwargs)
    settled = methods.settle(
        call,
        "auto",
        must_form=False,
        is_one_group=True,
        num_examples=call.batch_size,
        memory_budget_bytes=memory_budget_bytes,
        strict=strict,
    )
    traced = settled.traced or tracing.trace(call)
    rows = {
        leaf: Row(
            call.paths[leaf],
            call.leaves[leaf].shape,
            tracing.operations(traced.function, component) or "nothing",
            component.rule,
            component.flops,
            component.bytes,
        )
        for component in traced.components
        for leaf in component.leaves
    }
    return Explanation(tuple(rows[i] for i in range(len(rows))), settled.method)


def _with_unit(count: int) -> str:
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= 10 * size:
            return f"{count / size:.0f}{unit}"
        if count >= size:
            return f"{count / size:.1f}{unit}"
    return str(count)
