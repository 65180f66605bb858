"""Lookups of one row: `table[i]` for a scalar i."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dpjax.norm_rules import product
from dpjax.outer_products import Dense, OneHot, OuterProducts
from dpjax.taps import Tap


def match(tap: Tap, position: int, order: Sequence[int]) -> product.ProductUse | None:
    """Reads a `dynamic_slice` of one whole row as a one-hot outer product."""
    table = tap.equation.invars[0]
    if position != 0 or tap.parameter_positions != (0,) or not product.is_real(table):
        return None
    shape, sizes = table.aval.shape, tap.equation.params["slice_sizes"]
    cut = [i for i, (n, size) in enumerate(zip(shape, sizes, strict=True)) if n != size]
    if len(cut) != 1 or sizes[cut[0]] != 1:
        return None
    (axis,) = cut
    rows = shape[axis]
    right = product.ordered([i for i in range(len(shape)) if i != axis], order)
    width = math.prod(shape[i] for i in right)

    def factors(operands: Sequence[Any], cotangent: jax.Array) -> OuterProducts:
        # As the slice does: what is out of range is moved into it.
        row = jnp.clip(jnp.asarray(operands[1 + axis], jnp.int32), 0, rows - 1)
        cotangent = jnp.transpose(cotangent, (axis, *right))
        return OuterProducts(
            OneHot(row.reshape(1, 1), rows), Dense(cotangent.reshape(1, 1, width))
        )

    return product.ProductUse(
        "product",
        (),
        (axis,),
        right,
        1,
        1,
        rows,
        width,
        2 * width,
        factors,
        (axis, *right),
    )
