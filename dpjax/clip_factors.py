"""From per-example norms to the factors that clip: s = min(1, C / n)."""

import dataclasses
import math
import numbers
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from dpjax.precision import tiny, wide_dtype, widened

PyTree: TypeAlias = Any


@dataclasses.dataclass(frozen=True)
class Clipping:
    """How per-example gradients are clipped.

    ===================== ==================== ==================================
    case                  rescale_to_unit_norm what an example contributes
    ===================== ==================== ==================================
    clip norm 0           False                zero
    clip norm 0           True                 gradient / norm
    clip norm inf         False                the gradient, unchanged
    clip norm inf         True                 zero
    clip norm < 0, traced either               as for clip norm 0
    norm 0                either               zero
    ===================== ==================== ==================================

    Attributes:
      l2_clip_norm: one number, or a pytree prefix of the parameters with one number for
        each group of leaves that is clipped on its own (per-layer clipping).
      rescale_to_unit_norm: divide what was clipped by its clip norm.
    """

    l2_clip_norm: PyTree
    rescale_to_unit_norm: bool = False

    def __post_init__(self) -> None:
        if not jax.tree.leaves(self.l2_clip_norm):
            raise ValueError(
                f"l2_clip_norm={self.l2_clip_norm!r} holds no number: give one, or a "
                "pytree prefix of the parameters"
            )
        for bound in jax.tree.leaves(self.l2_clip_norm):
            if jnp.ndim(bound) != 0:
                raise ValueError(
                    f"l2_clip_norm holds an array of shape {jnp.shape(bound)}: give a "
                    "scalar, or one for each group of parameters"
                )
            if isinstance(bound, numbers.Real) and not float(bound) >= 0:
                raise ValueError(
                    f"l2_clip_norm={bound} must be >= 0: use 0 to drop all gradients, "
                    "math.inf to clip none"
                )

    @property
    def bounds(self) -> list[Any]:
        """The clip norm of each group."""
        return jax.tree.leaves(self.l2_clip_norm)

    def groups(self, parameters: PyTree) -> list[int]:
        """For each leaf of `parameters`, the index of its clip norm in `bounds`."""
        structure = jax.tree.structure(self.l2_clip_norm)
        if jax.tree_util.all_leaves([self.l2_clip_norm]):
            return [0] * len(jax.tree.leaves(parameters))
        numbered = jax.tree.unflatten(structure, range(len(self.bounds)))
        try:
            spread = jax.tree.map(
                lambda group, below: jax.tree.map(lambda _: group, below),
                numbered,
                parameters,
            )
        except ValueError as error:
            raise ValueError(
                f"l2_clip_norm={structure} must be a number or a pytree prefix of the "
                f"parameters, {jax.tree.structure(parameters)}: {error}"
            ) from None
        return jax.tree.leaves(spread)

    def factors(self, norms: Sequence[jax.Array]) -> list[jax.Array]:
        """Factors for each group's norms; 0 where a norm is not finite."""
        return [
            _factor(norm, bound, self.rescale_to_unit_norm)
            for norm, bound in zip(norms, self.bounds, strict=True)
        ]

    def clip(self, gradient: PyTree, *, nan_safe: bool) -> PyTree:
        """Clips one example's formed gradient.

        Args:
          gradient: a pytree like the parameters.
          nan_safe: replace NaN and infinite entries by zero before clipping. Without
            it they stay, and no bound holds.
        """
        leaves, structure = jax.tree.flatten(gradient)
        groups = self.groups(gradient)
        if nan_safe:
            leaves = [
                jnp.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0) for x in leaves
            ]
        factors = self.factors(
            [
                _upper_norm([x for x, g in zip(leaves, groups, strict=True) if g == k])
                for k in range(len(self.bounds))
            ]
        )
        # Rounded only after the product: a rounded factor could exceed its bound.
        clipped = [_scaled(x, factors[g]) for x, g in zip(leaves, groups, strict=True)]
        return jax.tree.unflatten(structure, clipped)

    def norm_bound(self) -> Any:
        """The largest L2 norm that one example contributes, over all groups."""
        bounds = [1.0] * len(self.bounds) if self.rescale_to_unit_norm else self.bounds
        if len(bounds) == 1:
            return bounds[0]
        squares = sum(bound**2 for bound in bounds)
        if isinstance(squares, numbers.Real):
            return math.sqrt(squares)
        return jnp.sqrt(squares)


def _factor(norm: jax.Array, bound: Any, rescale_to_unit_norm: bool) -> jax.Array:
    bound = jnp.asarray(bound, norm.dtype)
    bound = jnp.where(bound > 0, bound, 0)  # NaN too
    counts = (norm > 0) & jnp.isfinite(norm)
    norm = jnp.where(counts, norm, 1)
    kept = jnp.minimum(bound, norm)
    if rescale_to_unit_norm:
        kept = jnp.where(bound > 0, kept / jnp.where(bound > 0, bound, 1), 1)
    # The division comes last and never makes a NaN: XLA then computes factors once,
    # not again inside every product that they weight.
    return jnp.where(counts, kept, 0) / norm


def global_norm(leaves: Sequence[jax.Array]) -> jax.Array:
    """L2 norm over all leaves, in float32, or in float64 where a leaf is float64."""
    squares = [squared_sum(leaf) for leaf in leaves]
    dtype = wide_dtype(*(square.dtype for square in squares))
    total = sum((s.astype(dtype) for s in squares), start=jnp.zeros((), dtype))
    return jnp.sqrt(total)


def _upper_norm(leaves: Sequence[jax.Array]) -> jax.Array:
    """`global_norm`, plus what the squares of numbers below 1e-19 may have lost."""
    norm = global_norm(leaves)
    lost = tiny(norm.dtype) * sum(leaf.size for leaf in leaves)
    return jnp.sqrt(jnp.square(norm) + lost)


def squared_sum(array: jax.Array) -> jax.Array:
    """Sum of squared magnitudes, in at least float32."""
    magnitudes = jnp.abs(array)
    return jnp.sum(jnp.square(widened(magnitudes)))


def _scaled(array: jax.Array, factor: jax.Array) -> jax.Array:
    dtype = wide_dtype(array.dtype)
    return (factor.astype(dtype) * array.astype(dtype)).astype(array.dtype)
