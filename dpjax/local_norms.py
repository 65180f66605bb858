"""Norms that need one tap only, computed there on the way back.

Where a box of a parameter meets data once, or once in each step of a loop over stacked
parameters, nothing but that tap's activations and cotangents makes up its gradient. Its
squared norm can be computed in the backward pass as soon as they are there, and they
need not be kept: what the backward pass frees, or makes again under `remat`, stays
freed. Shared parameters, whose uses must be brought together, are left to
`dpjax.bookkeeping`.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dpjax import _compat, norm_rules, outer_products, placements
from dpjax.blocks import LocalNorm
from dpjax.clip_factors import squared_sum
from dpjax.outer_products import SquaredNorm
from dpjax.placements import Part, Parts
from dpjax.planning import Component, Rule, Use
from dpjax.precision import wide_dtype
from dpjax.tapped_function import TappedFunction
from dpjax.taps import Operand, Tap

_UseNorm = Callable[[Sequence[Any], Sequence[Any]], SquaredNorm]


@dataclasses.dataclass(frozen=True)
class LocalNorms:
    """What is computed where.

    Attributes:
      at_taps: by tap, its two numbers: a squared norm and a bound on its rounding.
      leaves: the parameter leaves that these cover.
      rest: the components that they do not cover.
      dtype: of the numbers.
    """

    at_taps: Mapping[int, LocalNorm]
    leaves: frozenset[int]
    rest: list[Component]
    dtype: Any

    def zeros(self) -> jax.Array | None:
        """Zeros like the two numbers; None if there are none."""
        return jnp.zeros(2, self.dtype) if self.at_taps else None


def find(function: TappedFunction, components: Sequence[Component]) -> LocalNorms:
    """Finds the components whose norms can be computed tap by tap."""
    parts = placements.find(function)
    by_tap: dict[int, list[_UseNorm]] = {}
    leaves: set[int] = set()
    rest = []
    for component in components:
        norms = _component_norms(function, component, parts)
        if norms is None:
            rest.append(component)
            continue
        leaves.update(component.leaves)
        for use, norm in zip(component.uses, norms, strict=True):
            by_tap.setdefault(use.tap, []).append(norm)
    # A tap in which two parameters meet is local if both are.
    outputs = [out for i in by_tap for out in function.taps[i].outputs()]
    dtype = wide_dtype(*(out.dtype for out in outputs))
    at_taps = {i: _numbers(norms, dtype) for i, norms in by_tap.items()}
    return LocalNorms(at_taps, frozenset(leaves), rest, dtype)


def _numbers(norms: Sequence[_UseNorm], dtype: Any) -> LocalNorm:
    def numbers(operands: Sequence[Any], cotangents: Sequence[Any]) -> jax.Array:
        found = [norm(operands, cotangents) for norm in norms]
        return sum(
            (jnp.stack(norm).astype(dtype) for norm in found), jnp.zeros(2, dtype)
        )

    return numbers


def _component_norms(
    function: TappedFunction, component: Component, parts: Mapping[_compat.Var, Parts]
) -> list[_UseNorm] | None:
    """For each use its part of the squared norm, if these are independent."""
    if not component.uses or component.rule is Rule.FALLBACK:
        return None
    met: list[Part] = []
    norms = []
    for use in component.uses:
        tap = function.taps[use.tap]
        found = parts.get(use.variable)
        if not found or len(tap.parameter_positions) != 1:
            return None
        if any(part.overlaps(other) for part in found for other in _of_leaf(met, part)):
            return None
        met.extend(found)
        norm = _use_norm(tap, use, found, component.rule)
        if norm is None:
            return None
        norms.append(norm)
    return norms


def _of_leaf(parts: Sequence[Part], part: Part) -> list[Part]:
    return [other for other in parts if other.leaf == part.leaf]


def _use_norm(tap: Tap, use: Use, parts: Parts, rule: Rule) -> _UseNorm | None:
    atoms = (*tap.equation.invars, *tap.equation.outvars)
    is_complex = any(jnp.issubdtype(a.aval.dtype, jnp.complexfloating) for a in atoms)
    if is_complex or not all(tap.operands[use.position].scanned):
        return None
    scales = {abs(part.scale) for part in parts}
    size = sum(math.prod(part.sizes) for part in parts)
    if len(scales) != 1 or size != use.variable.aval.size or _overlap(parts):
        return None
    repeated = {part.repeated for part in parts}
    if len(repeated) != 1:
        return None
    num_own = len(tap.loops)
    summed = tuple(axis - num_own for axis in repeated.pop())
    if any(axis < 0 for axis in summed):
        return None
    once = dataclasses.replace(
        tap,
        loops=(),
        operands={i: Operand(o.variable, ()) for i, o in tap.operands.items()},
    )
    if rule is Rule.ELEMENTWISE:
        norm = _elementwise_norm(once, summed) if norm_rules.is_linear(tap) else None
    else:
        norm = None if summed else _product_norm(once, use.position, rule)
    return None if norm is None else _scaled(norm, scales.pop())


def _overlap(parts: Parts) -> bool:
    return any(
        part.overlaps(other)
        for i, part in enumerate(parts)
        for other in _of_leaf(parts[:i], part)
    )


def _scaled(norm: _UseNorm, scale: float) -> _UseNorm:
    """The squared norm of a scaled gradient, from that of the gradient."""
    if scale == 1:
        return norm

    def scaled(operands: Sequence[Any], cotangents: Sequence[Any]) -> SquaredNorm:
        # Not squared, since the square may underflow.
        return norm(operands, [scale * array for array in cotangents])

    return scaled


def _elementwise_norm(tap: Tap, summed: Sequence[int]) -> _UseNorm:
    def norm(operands: Sequence[Any], cotangents: Sequence[Any]) -> SquaredNorm:
        (gradient,) = norm_rules.generic.gradients(tap, operands, cotangents)
        (terms,) = norm_rules.generic.gradients(
            tap, *(list(map(_absolute, values)) for values in (operands, cotangents))
        )
        value = squared_sum(jnp.sum(gradient, axis=tuple(summed)))
        reach = jnp.sum(jnp.abs(terms), axis=tuple(summed))
        return SquaredNorm(value, outer_products.rounding_of_sum(reach))

    return norm


def _absolute(value: Any) -> Any:
    is_real = jnp.issubdtype(jnp.result_type(value), jnp.floating)
    return jnp.abs(value) if is_real else value


def _product_norm(tap: Tap, position: int, rule: Rule) -> _UseNorm | None:
    axes = range(tap.equation.invars[position].aval.ndim)
    product = norm_rules.match_product(tap, position, axes)
    if product is None:
        return None
    use = product

    def norm(operands: Sequence[Any], cotangents: Sequence[Any]) -> SquaredNorm:
        products = use.factors(operands, cotangents[0])
        if rule is Rule.GRAM:
            return outer_products.squared_norm([products])
        if use.gradient is not None:
            gradient = use.gradient(products)
        else:
            (gradient,) = norm_rules.generic.gradients(tap, operands, cotangents)
        return SquaredNorm(squared_sum(gradient), outer_products.rounding([products]))

    return norm
