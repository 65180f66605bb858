"""Norms and weighted sums of per-example gradients from one backward pass.

*Book-keeping* (Bu et al. 2023, arXiv 2210.00038): per-example cotangents are linear in
the weight of an example's loss, so the sum of weighted per-example gradients is each
tap's ordinary transpose applied to weighted cotangents. Neither a second backward pass
nor a per-example gradient is needed.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dpjax import norm_rules, outer_products
from dpjax.clip_factors import squared_sum
from dpjax.outer_products import OuterProducts, SquaredNorm
from dpjax.planning import Component, Rule, Use
from dpjax.taps import TappedFunction, TapValues, Values

Vmap = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Records:
    """Everything that one forward and one backward pass left behind, for a batch.

    Attributes:
      function: the tapped function.
      values: its unbatched values.
      outputs: its outputs, with a leading batch axis.
      taps: what met at each tap, with a leading batch axis.
      vmap: `jax.vmap`, perhaps with a mesh axis for the batch.
    """

    function: TappedFunction
    values: Values
    outputs: Sequence[Any]
    taps: Sequence[TapValues]
    vmap: Vmap

    def operands(self, use: Use, activations: Sequence[Any]) -> list[Any]:
        """One example's operands of the tap at which a parameter is used."""
        tap = self.function.taps[use.tap]
        return self.function.operands(tap, self.values, activations)


@dataclasses.dataclass(frozen=True)
class ComponentNorms:
    """Per-example squared norms of one component.

    Attributes:
      squared: for each leaf, values and rounding bounds of shape [B].
      gradients: for each leaf, per-example gradients [B, ...], if instantiated.
    """

    squared: Sequence[SquaredNorm]
    gradients: Sequence[jax.Array] | None


def record(
    function: TappedFunction,
    leaves: Sequence[Any],
    examples: Sequence[Any],
    vmap: Vmap,
) -> Records:
    """Runs the tapped function on a batch, forward and backward.

    Args:
      function: the tapped function.
      leaves: parameter leaves.
      examples: its other inputs, each with a leading batch axis.
      vmap: `jax.vmap`, perhaps with a mesh axis for the batch.
    """
    values = function.unbatched_values(leaves)
    outputs, taps = vmap(functools.partial(function.run, values))(list(examples))
    return Records(function, values, outputs, taps, vmap)


def component_norms(records: Records, component: Component) -> ComponentNorms:
    """Per-example squared gradient norms of a component's leaves."""
    if component.rule is Rule.UNUSED:
        batch_size = records.outputs[0].shape[0]
        nothing = jnp.zeros(batch_size, jnp.float32)
        shapes = [records.function.leaves[i].aval for i in component.leaves]
        zeros = [jnp.zeros((batch_size, *s.shape), s.dtype) for s in shapes]
        return ComponentNorms([SquaredNorm(nothing, nothing) for _ in shapes], zeros)
    taps = [records.taps[use.tap] for use in component.uses]
    if component.rule is Rule.GRAM:
        return ComponentNorms(
            [records.vmap(functools.partial(_gram_norm, records, component))(taps)],
            None,
        )
    gradients = records.vmap(_leaf_gradients(records, component))(taps)
    values = [records.vmap(squared_sum)(gradient) for gradient in gradients]
    return ComponentNorms(
        [SquaredNorm(value, jnp.zeros_like(value)) for value in values], gradients
    )


def _gram_norm(
    records: Records, component: Component, taps: Sequence[TapValues]
) -> SquaredNorm:
    uses = []
    for use, product, exchanged, met in zip(
        component.uses, component.products, component.exchanged, taps, strict=True
    ):
        operands = records.operands(use, met.activations)
        left, right = product.factors(operands, met.cotangents[0])
        uses.append(OuterProducts(right, left) if exchanged else (left, right))
    return outer_products.squared_norm([OuterProducts(*use) for use in uses])


def _leaf_gradients(
    records: Records, component: Component
) -> Callable[[Sequence[TapValues]], list[jax.Array]]:
    """One example's gradients of a component's leaves, as a function of its taps."""
    pullback = _parameter_pullback(records, component)

    def gradients(taps: Sequence[TapValues]) -> list[jax.Array]:
        totals: dict[Any, jax.Array] = {}
        for use, met in zip(component.uses, taps, strict=True):
            gradient = _operand_gradient(records, use, met)
            previous = totals.get(use.variable)
            totals[use.variable] = gradient if previous is None else previous + gradient
        return pullback([totals[variable] for variable in component.variables])

    return gradients


def _operand_gradient(records: Records, use: Use, met: TapValues) -> jax.Array:
    tap = records.function.taps[use.tap]
    operands = records.operands(use, met.activations)
    ndim = use.variable.aval.ndim
    product = norm_rules.match_product(tap, use.position, tuple(range(ndim)))
    if product is not None and product.gradient is not None:
        return product.gradient(operands, met.cotangents[0])
    gradients = norm_rules.generic.gradients(tap, operands, met.cotangents)
    return gradients[tap.parameter_positions.index(use.position)]


def _parameter_pullback(
    records: Records, component: Component
) -> Callable[[list[jax.Array]], list[jax.Array]]:
    """From gradients of a component's tap operands to gradients of its leaves."""
    function = records.function
    forward = function.parameter_function(component.variables, records.values)
    leaves = [records.values[function.leaves[i]] for i in component.leaves]
    _, pullback = jax.vjp(forward, leaves)
    return lambda cotangents: pullback(cotangents)[0]


def weighted_sum(
    records: Records,
    component: Component,
    norms: ComponentNorms,
    weights: Sequence[jax.Array],
) -> list[jax.Array]:
    """Sum over the batch of weight times per-example gradient, for each leaf.

    An example of weight zero contributes nothing, whatever NaN or infinity it holds.

    Args:
      records: of the batch.
      component: whose leaves to sum.
      norms: from `component_norms`.
      weights: for each leaf of the component, weights of shape [B].
    """
    if norms.gradients is not None:
        return [
            _weighted_sum_of(gradient, weight)
            for gradient, weight in zip(norms.gradients, weights, strict=True)
        ]
    weight = weights[0]
    totals: dict[Any, jax.Array] = {}
    for use in component.uses:
        total = _transposed_tap(records, use, weight)
        previous = totals.get(use.variable)
        totals[use.variable] = total if previous is None else previous + total
    pullback = _parameter_pullback(records, component)
    return pullback([totals[variable] for variable in component.variables])


def _weighted_sum_of(array_B: jax.Array, weight_B: jax.Array) -> jax.Array:
    return jnp.sum(_weighted(array_B, weight_B), axis=0)


def _weighted(array_B: jax.Array, weight_B: jax.Array) -> jax.Array:
    weight = weight_B.reshape(-1, *[1] * (array_B.ndim - 1)).astype(array_B.dtype)
    return jnp.where(weight != 0, weight * array_B, jnp.zeros((), array_B.dtype))


def _without(array_B: jax.Array, weight_B: jax.Array) -> jax.Array:
    """The array with examples of weight zero replaced by zeros."""
    weight = weight_B.reshape(-1, *[1] * (array_B.ndim - 1))
    return jnp.where(weight != 0, array_B, jnp.zeros((), array_B.dtype))


def _transposed_tap(records: Records, use: Use, weight_B: jax.Array) -> jax.Array:
    """Gradient of a product tap's parameter operand, summed over weighted examples."""
    tap = records.function.taps[use.tap]
    met = records.taps[use.tap]
    activations = [_without(array, weight_B) for array in met.activations]

    def batched(parameter: jax.Array) -> jax.Array:
        def one(activations: list[Any]) -> jax.Array:
            operands = records.operands(use, activations)
            operands[use.position] = parameter
            return tap.apply(operands)[0]

        return records.vmap(one)(activations)

    _, transpose = jax.vjp(batched, records.values[use.variable])
    (gradient,) = transpose(_weighted(met.cotangents[0], weight_B))
    return gradient


def example_gradient(
    records: Records, components: Sequence[Component], index: jax.Array
) -> list[jax.Array]:
    """One example's gradient, formed from what it left at the taps, leaf by leaf."""
    found: dict[int, jax.Array] = {}
    for component in components:
        taps = [records.taps[use.tap] for use in component.uses]
        one = jax.tree.map(lambda array: array[index], taps)
        gradients = _leaf_gradients(records, component)(one)
        found.update(zip(component.leaves, gradients, strict=True))
    return [found[i] for i in range(len(found))]
