"""Products: dense layers, einsums, attention projections, one-hot lookups."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dpjax.norm_rules import product
from dpjax.outer_products import Dense, OuterProducts
from dpjax.taps import Tap


def match(tap: Tap, position: int, order: Sequence[int]) -> product.ProductUse | None:
    """Reads a `dot_general` as outer products, for the operand at `position`.

    The output's axes are the batch axes, the left operand's free axes, the right
    operand's free axes. The parameter's batch axes become groups, its contracted axes
    the left factor's width, its free axes the right factor's width; the other
    operand's free axes are the places where the parameter was used.
    """
    parameter, other = (tap.equation.invars[i] for i in (position, 1 - position))
    if tap.data_positions != (1 - position,) or not product.is_real(parameter, other):
        return None
    (contracting, batch) = tap.equation.params["dimension_numbers"]
    batch_pairs = _paired(batch, position, order)
    contracting_pairs = _paired(contracting, position, order)
    group = [mine for mine, _ in batch_pairs]
    left = [mine for mine, _ in contracting_pairs]
    free = [i for i in range(parameter.aval.ndim) if i not in (*group, *left)]
    right = product.ordered(free, order)
    other_used = [*batch[1 - position], *contracting[1 - position]]
    other_free = [i for i in range(other.aval.ndim) if i not in other_used]

    size = parameter.aval.shape
    groups, left_width, right_width = (
        math.prod(size[i] for i in axes) for axes in (group, left, right)
    )
    length = math.prod(other.aval.shape[i] for i in other_free)

    # Where the axes of group, places and right are in the output.
    first_free = len(group)
    mine_first = position == 0
    mine_at = first_free + (0 if mine_first else len(other_free))
    other_at = first_free + (len(free) if mine_first else 0)
    batch_order = [list(batch[position]).index(axis) for axis in group]
    cotangent_axes = [
        *batch_order,
        *range(other_at, other_at + len(other_free)),
        *(mine_at + free.index(axis) for axis in right),
    ]
    activation_axes = [
        *(theirs for _, theirs in batch_pairs),
        *other_free,
        *(theirs for _, theirs in contracting_pairs),
    ]

    def factors(operands: Sequence[Any], cotangent: jax.Array) -> OuterProducts:
        activation = jnp.transpose(operands[1 - position], activation_axes)
        cotangent = jnp.transpose(cotangent, cotangent_axes)
        return OuterProducts(
            Dense(activation.reshape(groups, length, left_width)),
            Dense(cotangent.reshape(groups, length, right_width)),
        )

    return product.ProductUse(
        "product",
        tuple(group),
        tuple(left),
        right,
        groups,
        length,
        left_width,
        right_width,
        2 * groups * length**2 * (left_width + right_width),
        factors,
        (*group, *left, *right),
    )


def _paired(
    axes: Sequence[Sequence[int]], position: int, order: Sequence[int]
) -> list[tuple[int, int]]:
    """(parameter axis, other operand's axis) pairs, in the leaf's order."""
    pairs = zip(axes[position], axes[1 - position], strict=True)
    return sorted(pairs, key=lambda pair: order[pair[0]])
