"""A numerical check that a loss treats the rows of a batch one by one."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import _compat
from dpjax.calling import Call, Convention

# What rounding leaves of a leaf whose gradient cancels (the bias of an attention key),
# in eps of the whole gradient. Measured on a four-layer transformer: up to 0.4.
_ROUNDING_UNITS = 2
_MOST_LISTED = 5


def require_separable(
    fun: Callable[..., Any],
    *args: Any,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    batch_argnums: int | Sequence[int] = 1,
    num_rows: int = 4,
    **unsupported: Any,
) -> None:
    """Raises an error if the loss of a batch is no mean or sum over its rows.

    `dpjax.clipped_grad` shows `fun` one example at a time. A loss that mixes examples
    (batch normalisation in training mode, a contrastive loss, a load-balancing loss of
    a mixture of experts, a mean over all tokens of rows of different lengths) thereby
    silently becomes another loss. Call this once, before training, to find out. It
    compares, for the first `num_rows` rows x_1..x_n and each parameter leaf,

        grad fun(params, [x_1..x_n])    with    sum_i grad fun(params, [x_i])

    or with that sum divided by n. Where they differ by more than rounding, for both,
    `fun` is refused. Rounding: sqrt(eps) of the leaf's gradient norms plus 2 eps of the
    whole gradient's, eps being that of the coarsest floating point type in which `fun`
    computes anything (3e-4 in all for float32, a tenth for bfloat16: a model that can
    compute in float32 is checked better there).

    What it cannot see: mixing that has no effect on these rows at these parameters (an
    expert's capacity that a few rows do not exhaust), a mixing term whose gradient is
    less than rounding, other modes of the model than the one that `fun` runs, and
    mixing in the aux. `fun` must give the same result each time: a key given in another
    argument draws other dropout masks for a batch than for its rows, which is reported
    as mixing, so turn dropout off.

    Example:
      >>> import jax.numpy as jnp
      >>> w, x = jnp.eye(2), jnp.array([[1.0, 2.0], [3.0, 5.0]])
      >>> require_separable(lambda w, x: jnp.mean((x @ w) ** 2), w, x)
      >>> require_separable(lambda w, x: jnp.var(x @ w), w, x)
      Traceback (most recent call last):
      ...
      ValueError: fun mixes examples: on 2 rows the gradient of the parameter (30 %) ...

    Args:
      fun: returns a scalar loss of any number of rows, or `(loss, aux)` with `has_aux`.
        Arrays keep their batch axis (the `keep_batch_dim=True` of `clipped_grad`).
      *args: `fun`'s arguments: parameters and a batch, not traced.
      argnums: see `dpjax.clipped_grad`.
      has_aux: see `dpjax.clipped_grad`.
      batch_argnums: see `dpjax.clipped_grad`.
      num_rows: at least 2; how many rows are compared. More can see more mixing.
      **unsupported: `prng_argnum` and keyword arguments of `fun` are refused.

    Raises:
      ValueError: naming the parameters whose gradients differ, and by which share of
        their norms; or for a batch that cannot be compared.
    """
    if unsupported:
        raise ValueError(
            f"require_separable got {', '.join(unsupported)}, but compares neither "
            "random keys nor keyword arguments, of which fun sees single rows without "
            "a batch axis: give it a deterministic fun of positional arguments"
        )
    if num_rows < 2:
        raise ValueError(f"num_rows={num_rows} must be >= 2: one row cannot mix")
    call = Convention(fun, argnums, has_aux, batch_argnums).bind(args, {})
    examples = [x[:num_rows] for x in call.examples]
    _check_rows(args, call.batch_size, examples)

    def loss(leaves: list[jax.Array], example: list[jax.Array]) -> jax.Array:
        return call.one_example(leaves, example)[0]

    gradient = jax.jit(jax.grad(loss))
    # On accelerators the default products are coarser than their dtype.
    with jax.default_matmul_precision("highest"):
        batch = [x[:, 0] for x in examples]
        eps = _coarsest_eps(jax.make_jaxpr(gradient)(call.leaves, batch).jaxpr)
        whole = _in_double(gradient(call.leaves, batch))
        rows = [
            _in_double(gradient(call.leaves, [x[i] for x in examples]))
            for i in range(min(num_rows, call.batch_size))
        ]
    _check_finite(call, whole, "the batch")
    for row in rows:
        _check_finite(call, row, "a single row, which is all that clipped_grad shows")

    differing = {
        "mean": _differing(whole, rows, 1 / len(rows), eps),
        "sum": _differing(whole, rows, 1.0, eps),
    }
    if not all(differing.values()):
        return
    nearest, shares = min(
        differing.items(), key=lambda item: math.fsum(item[1].values())
    )
    listed = sorted(shares, key=lambda i: -shares[i])[:_MOST_LISTED]
    named = ", ".join(f"{call.paths[i]} ({100 * shares[i]:.2g} %)" for i in listed)
    unlisted = len(shares) - len(listed)
    others = f" and {unlisted} more" if unlisted else ""
    raise ValueError(
        f"fun mixes examples: on {len(rows)} rows the gradient of {named}{others} is "
        f"not the {nearest} of the gradients on single rows, which clipped_grad would "
        "use: normalise within examples (GroupNorm, LayerNorm), and make the loss a "
        "mean over rows of what each row gives alone"
    )


def _check_rows(
    args: Sequence[Any], batch_size: int, examples: Sequence[jax.Array]
) -> None:
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(args)):
        raise ValueError(
            "require_separable got traced arguments, but compares numbers: call it "
            "outside of jit, vmap and grad"
        )
    if batch_size < 2:
        raise ValueError(
            f"the batch has {batch_size} rows, but must have at least 2 to show "
            "whether fun mixes them"
        )
    if all(bool(jnp.all(x == x[:1])) for x in examples):
        raise ValueError(
            "the first rows of the batch are equal, which can hide that fun mixes "
            "them: give a batch of different examples"
        )


def _coarsest_eps(jaxpr: Any) -> float:
    dtypes = {
        atom.aval.dtype
        for equation in _compat.all_equations(jaxpr)
        for atom in [*equation.invars, *equation.outvars]
        if jnp.issubdtype(getattr(atom.aval, "dtype", int), jnp.inexact)
    }
    return max((float(jnp.finfo(dtype).eps) for dtype in dtypes), default=0.0)


def _in_double(gradient: Sequence[jax.Array]) -> list[np.ndarray]:
    return [
        np.asarray(x).astype(np.complex128 if jnp.iscomplexobj(x) else np.float64)
        for x in gradient
    ]


def _check_finite(call: Call, gradient: Sequence[np.ndarray], where: str) -> None:
    bad = [
        path
        for path, leaf in zip(call.paths, gradient, strict=True)
        if not np.all(np.isfinite(leaf))
    ]
    if bad:
        raise ValueError(
            f"the gradient of {bad[0]} is not finite on {where}: use finite rows and "
            "parameters, and a fun that can do without other rows"
        )


def _differing(
    whole: Sequence[np.ndarray],
    rows: Sequence[Sequence[np.ndarray]],
    weight: float,
    eps: float,
) -> dict[int, float]:
    """Leaves whose gradient is no weighted sum over rows, with shares up to 1."""
    errors, scales = [], []
    for total, *parts in zip(whole, *rows, strict=True):
        errors.append(_norm(total - weight * sum(parts)))
        scales.append(_norm(total) + weight * sum(map(_norm, parts)))
    floor = _ROUNDING_UNITS * eps * math.hypot(*scales)
    return {
        i: error / scale
        for i, (error, scale) in enumerate(zip(errors, scales, strict=True))
        if error > math.sqrt(eps) * scale + floor
    }


def _norm(array: np.ndarray) -> float:
    return float(np.linalg.norm(array.ravel()))
