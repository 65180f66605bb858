"""Lookups of whole rows: embeddings."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dpjax.norm_rules import product
from dpjax.outer_products import Dense, OneHot, OuterProducts
from dpjax.taps import Tap


def match(tap: Tap, position: int, order: Sequence[int]) -> product.ProductUse | None:
    """Reads a `gather` of whole slices along one axis as one-hot outer products."""
    table, indices = tap.equation.invars
    if position != 0 or tap.data_positions != (1,) or not product.is_real(table):
        return None
    parameters = tap.equation.params
    numbers = parameters["dimension_numbers"]
    if len(numbers.collapsed_slice_dims) != 1 or numbers.operand_batching_dims:
        return None
    (axis,) = numbers.collapsed_slice_dims
    rest = [i for i in range(table.aval.ndim) if i != axis]
    whole = all(parameters["slice_sizes"][i] == table.aval.shape[i] for i in rest)
    if tuple(numbers.start_index_map) != (axis,) or not whole:
        return None

    rows = table.aval.shape[axis]
    length = math.prod(indices.aval.shape[:-1])
    right = product.ordered(rest, order)
    width = math.prod(table.aval.shape[i] for i in right)
    (output,) = tap.outputs()
    places = [i for i in range(output.ndim) if i not in numbers.offset_dims]
    cotangent_axes = [
        *places,
        *(numbers.offset_dims[rest.index(i)] for i in right),
    ]
    # The derivative of any other lookup drops what is out of range, also where the
    # lookup itself (`table[ids]`, which promises that nothing is) reads clamped rows.
    is_clamped = parameters["mode"] == lax.GatherScatterMode.CLIP

    def factors(operands: Sequence[Any], cotangent: jax.Array) -> OuterProducts:
        ids_T = operands[1].reshape(length)
        if ids_T.dtype.itemsize < 4:  # The number of rows may not fit.
            ids_T = ids_T.astype(jnp.int32)
        if is_clamped:
            ids_T = jnp.clip(ids_T, 0, rows - 1)
        cotangent = jnp.transpose(cotangent, cotangent_axes)
        return OuterProducts(
            OneHot(ids_T[None], rows), Dense(cotangent.reshape(1, length, width))
        )

    return product.ProductUse(
        "product",
        (),
        (axis,),
        right,
        1,
        length,
        rows,
        width,
        2 * length**2 * width,
        factors,
        (axis, *rest),
    )
