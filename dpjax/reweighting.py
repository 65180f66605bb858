"""Reweight: the gradient of a weighted sum of losses, by a second backward pass.

Lee & Kifer 2021, algorithm ReweightGP: with weights s_i held constant, the gradient of
sum_i s_i loss_i is sum_i s_i g_i. Both backward passes go back through the same forward
pass, so that what is summed is what was measured, up to the rounding of one pass. What
needs one tap only is measured on the way back (`dpjax.local_norms`), so no cotangents
are kept.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax

from dpjax import bookkeeping, local_norms
from dpjax.bookkeeping import Norms
from dpjax.local_norms import LocalNorms
from dpjax.planning import Component, Rule
from dpjax.recording import Records
from dpjax.tapped_function import TappedFunction


class Plan(NamedTuple):
    """Which norms are measured where, and which gradients are formed.

    Attributes:
      local: the norms that need one tap only.
      chosen: the leaves whose gradients the second backward pass yields. Those of the
        others are formed for their norms; they are summed as they are, since formed
        again they could round otherwise.
    """

    local: LocalNorms
    chosen: list[int]


def plan(function: TappedFunction, components: Sequence[Component]) -> Plan:
    """Plans a batch's two backward passes."""
    local = local_norms.find(function, components)
    formed = {
        leaf
        for component in local.rest
        if component.rule not in (Rule.GRAM, Rule.UNUSED)
        for leaf in component.leaves
    }
    return Plan(local, [i for i in range(len(function.leaves)) if i not in formed])


def weighted_sum(
    plan: Plan, records: Records, norms: Norms, weights_B: jax.Array
) -> list[jax.Array]:
    """Sum of weighted per-example gradients, for each parameter leaf.

    All examples must have finite gradients, those of weight zero, too: the second pass
    multiplies them by their weights.

    Args:
      plan: the plan.
      records: of the batch.
      norms: of the leaves whose norms are not local.
      weights_B: one weight for each example.
    """
    weights = [weights_B] * len(records.function.leaves)
    sums = bookkeeping.weighted_sum(records, [], norms, weights)
    totals = records.weighted_gradients(weights_B)
    for leaf, total in zip(plan.chosen, totals, strict=True):
        sums[leaf] = total
    return sums
