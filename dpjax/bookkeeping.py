"""Norms and weighted sums of per-example gradients from one backward pass.

*Book-keeping* (Bu et al. 2023, arXiv 2210.00038): per-example cotangents are linear in
the weight of an example's loss, so the sum of weighted per-example gradients is each
tap's ordinary transpose applied to weighted cotangents. Neither a second backward pass
nor a per-example gradient is needed.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dpjax import norm_rules, outer_products
from dpjax.clip_factors import squared_sum
from dpjax.outer_products import Dense, OuterProducts, SquaredNorm
from dpjax.planning import Component, Piece, Rule, Use
from dpjax.precision import tiny, widened
from dpjax.recording import Records
from dpjax.taps import TapValues


@dataclasses.dataclass(frozen=True)
class Norms:
    """Per-example squared gradient norms.

    Attributes:
      squared: for each leaf, values and rounding bounds of shape [B].
      gradients: by leaf, per-example gradients [B, ...] where they were formed.
    """

    squared: list[SquaredNorm]
    gradients: dict[int, jax.Array]


def squared_norms(records: Records, components: Sequence[Component]) -> Norms:
    """Per-example squared gradient norms of every leaf, each by its planned rule."""
    formed = [c for c in components if c.rule not in (Rule.GRAM, Rule.UNUSED)]
    gradients: dict[int, jax.Array] = {}
    if formed:
        form = functools.partial(_form_gradients, records, formed)
        gradients = records.vmap(form)(list(records.taps))
    nothing = jnp.zeros(records.outputs[0].shape, jnp.float32)
    squared = [SquaredNorm(nothing, nothing) for _ in records.function.leaves]
    for leaf, gradient in gradients.items():
        value = records.vmap(squared_sum)(gradient)
        # At most the smallest normal number is lost of each square.
        lost = tiny(value.dtype) * math.prod(gradient.shape[1:])
        squared[leaf] = SquaredNorm(value, jnp.full_like(value, lost))
    for component in components:
        if component.rule is Rule.GRAM:
            taps = [records.met(use) for use in component.uses]
            norm = functools.partial(_gram_norm, records, component)
            for leaf, squared_norm in zip(
                component.leaves, records.vmap(norm)(taps), strict=True
            ):
                squared[leaf] = squared_norm
    return Norms(squared, gradients)


def weighted_sum(
    records: Records,
    components: Sequence[Component],
    norms: Norms,
    weights: Sequence[jax.Array],
) -> list[jax.Array]:
    """Sum over the batch of weight times per-example gradient, for each leaf.

    An example of weight zero contributes nothing, whatever NaN or infinity it holds.

    Args:
      records: of the batch.
      components: the plan.
      norms: from `squared_norms`.
      weights: for each leaf, weights of shape [B].
    """
    variables = records.function.leaves
    sums = [jnp.zeros_like(records.values[variable]) for variable in variables]
    for leaf, total in _sum_formed(norms, weights).items():
        sums[leaf] = total
    for component in components:
        if component.rule is Rule.GRAM:
            for weight_B in {
                id(weights[i]): weights[i] for i in component.leaves
            }.values():
                totals = _transposed_sum(records, component, weight_B)
                for leaf, total in zip(component.leaves, totals, strict=True):
                    if weights[leaf] is weight_B:
                        sums[leaf] = total
    return sums


def _sum_formed(norms: Norms, weights: Sequence[jax.Array]) -> dict[int, jax.Array]:
    """Weighted sums of the gradients that were formed, by leaf."""
    gradients = norms.gradients
    if not gradients:
        return {}

    def total(leaf: int, gradient: jax.Array) -> jax.Array:
        wide, weight_B = widened(gradient), weights[leaf]
        total = jnp.tensordot(
            weight_B.astype(wide.dtype), wide, 1, precision=jax.lax.Precision.HIGHEST
        )
        return total.astype(gradient.dtype)

    def plain() -> dict[int, jax.Array]:
        return {leaf: total(leaf, g) for leaf, g in gradients.items()}

    def masked() -> dict[int, jax.Array]:
        return {
            leaf: total(leaf, _kept(g, weights[leaf])) for leaf, g in gradients.items()
        }

    # Masking what is left out takes as long again: only if it is not finite.
    finite = [jnp.all(jnp.isfinite(norms.squared[leaf].value)) for leaf in gradients]
    return jax.lax.cond(functools.reduce(jnp.logical_and, finite), plain, masked)


def example_gradient(
    records: Records,
    components: Sequence[Component],
    formed: Mapping[int, jax.Array],
    index: jax.Array,
) -> list[jax.Array]:
    """One example's gradient, leaf by leaf.

    Args:
      records: of the batch.
      components: the plan.
      formed: from `Norms`; the rest is formed from what the example left at the taps.
        So are fallbacks: formed for a batch at once, an example's gradient may be NaN
        where another's is (batched convolutions multiply it by zero).
      index: which example.
    """
    again = (Rule.GRAM, Rule.FALLBACK)
    left = [component for component in components if component.rule in again]
    used = {use.tap for component in left for use in component.uses}
    taps = [
        jax.tree.map(lambda array: array[index], met) if i in used else None
        for i, met in enumerate(records.taps)
    ]
    gradients = {leaf: gradient[index] for leaf, gradient in formed.items()}
    gradients.update(_form_gradients(records, left, taps))
    leaves = [records.values[variable] for variable in records.function.leaves]
    return [
        gradients[i] if i in gradients else jnp.zeros_like(leaf)
        for i, leaf in enumerate(leaves)
    ]


def _gram_norm(
    records: Records, component: Component, taps: Sequence[TapValues]
) -> list[SquaredNorm]:
    """For each leaf of a component, one example's squared norm."""

    def factors(piece: Piece) -> OuterProducts:
        met = taps[piece.use]
        operands = records.operands(component.uses[piece.use], met.activations)
        return piece.factors(operands, met.cotangents[0])

    # Of a leaf that is cut off on its way to the data no box is left.
    nothing = SquaredNorm(jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32))
    found = []
    for boxes in component.boxes:
        norms = [outer_products.squared_norm(list(map(factors, box))) for box in boxes]
        found.append(functools.reduce(_add_norms, norms) if norms else nothing)
    return found


def _add_norms(first: SquaredNorm, second: SquaredNorm) -> SquaredNorm:
    return SquaredNorm(first.value + second.value, first.rounding + second.rounding)


def _form_gradients(
    records: Records,
    components: Sequence[Component],
    taps: Sequence[TapValues | None],
) -> dict[int, jax.Array]:
    """One example's gradients of all leaves of some components, by leaf."""
    by_tap: dict[int, list[jax.Array]] = {}

    def operand_gradient(use: Use) -> jax.Array:
        tap = records.function.taps[use.tap]
        met = taps[use.tap]
        assert met is not None
        operands = records.operands(use, met.activations)
        axes = tuple(range(use.variable.aval.ndim))
        product = norm_rules.match_product(tap, use.position, axes)
        if product is not None and product.gradient is not None:
            return product.gradient(product.factors(operands, met.cotangents[0]))
        if use.tap not in by_tap:
            by_tap[use.tap] = norm_rules.generic.gradients(
                tap, operands, met.cotangents
            )
        return by_tap[use.tap][tap.parameter_positions.index(use.position)]

    found: dict[int, jax.Array] = {}
    for component in components:
        totals = _sum_by_variable(component, operand_gradient)
        gradients = _pull_back(records, component, totals)
        found.update(zip(component.leaves, gradients, strict=True))
    return found


def _sum_by_variable(
    component: Component, gradient: Callable[[Use], jax.Array]
) -> list[jax.Array]:
    """Adds up the gradients of uses of the same value."""
    totals: dict[Any, jax.Array] = {}
    for use in component.uses:
        one = gradient(use)
        previous = totals.get(use.variable)
        totals[use.variable] = one if previous is None else previous + one
    return [totals[variable] for variable in component.variables]


def _pull_back(
    records: Records, component: Component, gradients: list[jax.Array]
) -> list[jax.Array]:
    """From gradients of a component's tap operands to gradients of its leaves."""
    function = records.function
    forward = function.parameter_function(component.variables, records.values)
    leaves = [records.values[function.leaves[i]] for i in component.leaves]
    _, pullback = jax.vjp(forward, leaves)
    return pullback(gradients)[0]


def _transposed_sum(
    records: Records, component: Component, weight_B: jax.Array
) -> list[jax.Array]:
    """Weighted gradient sums of leaves used in products, without forming gradients."""
    totals = _sum_by_variable(
        component, lambda use: _transposed_tap(records, use, weight_B)
    )
    function = records.function
    leaves = [records.values[function.leaves[i]] for i in component.leaves]
    # Casts on the way would round the sum once more.
    forward = function.parameter_function(
        component.variables, records.values, wide=True
    )
    values, pullback = jax.vjp(forward, list(map(widened, leaves)))
    (gradients,) = pullback(
        [total.astype(value.dtype) for total, value in zip(totals, values, strict=True)]
    )
    return [g.astype(leaf.dtype) for g, leaf in zip(gradients, leaves, strict=True)]


def _transposed_tap(records: Records, use: Use, weight_B: jax.Array) -> jax.Array:
    """Gradient of a product tap's parameter operand, summed over weighted examples."""
    tap = records.function.taps[use.tap]
    met = records.met(use)
    shape = use.variable.aval.shape
    product = norm_rules.match_product(tap, use.position, range(len(shape)))
    assert product is not None
    activations = [_kept(array, weight_B) for array in met.activations]
    cotangent = _weighted(met.cotangents[0], weight_B)

    def factors(activations: list[Any], cotangent: jax.Array) -> OuterProducts:
        return product.factors(records.operands(use, activations), cotangent)

    left, right = records.vmap(factors)(activations, cotangent)
    if isinstance(left, Dense) and isinstance(right, Dense):
        total = outer_products.total_over_batch(left.array_NxTxK, right.array_NxTxK)
        return norm_rules.to_operand(product, total, shape)

    def batched(parameter: jax.Array) -> jax.Array:
        def one(activations: list[Any]) -> jax.Array:
            operands = records.operands(use, activations)
            operands[use.position] = parameter
            return tap.apply_wide(operands)[0]

        return records.vmap(one)(activations)

    transpose = jax.linear_transpose(batched, widened(records.values[use.variable]))
    (gradient,) = transpose(cotangent)
    return gradient


def _weighted(array_B: jax.Array, weight_B: jax.Array) -> jax.Array:
    """Weight times example; zero where the weight is, even if the example is NaN.

    In at least float32: rounded to less, what was clipped could exceed its bound.
    """
    array_B = widened(array_B)
    weight = weight_B.reshape(-1, *[1] * (array_B.ndim - 1)).astype(array_B.dtype)
    return jnp.where(weight != 0, weight * array_B, jnp.zeros((), array_B.dtype))


def _kept(array_B: jax.Array, weight_B: jax.Array) -> jax.Array:
    """The examples as they are; zero where the weight is."""
    weight = weight_B.reshape(-1, *[1] * (array_B.ndim - 1))
    return jnp.where(weight != 0, array_B, jnp.zeros((), array_B.dtype))
