"""Convolutions of any rank, with strides, padding, dilations and feature groups."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dpjax.norm_rules import product
from dpjax.outer_products import Dense, OuterProducts, Patches, Window
from dpjax.taps import Tap


def match(tap: Tap, position: int, order: Sequence[int]) -> product.ProductUse | None:
    """Reads a convolution as outer products of patches and cotangents, for its kernel.

    The batch axis of the convolution (size one when `fun` sees a batch of one) is one
    more spatial axis, along which the kernel has size one.
    """
    image, kernel = tap.equation.invars
    if position != 1 or tap.data_positions != (0,):
        return None
    parameters = tap.equation.params
    if parameters["batch_group_count"] != 1 or not product.is_real(image, kernel):
        return None
    numbers = parameters["dimension_numbers"]
    groups = parameters["feature_group_count"]
    strides, dilations = parameters["window_strides"], parameters["rhs_dilation"]
    image_axes = [numbers.lhs_spec[0], *numbers.lhs_spec[2:], numbers.lhs_spec[1]]
    kernel_axes = [*numbers.rhs_spec[2:], numbers.rhs_spec[1], numbers.rhs_spec[0]]
    output_axes = [numbers.out_spec[0], *numbers.out_spec[2:], numbers.out_spec[1]]
    (output,) = tap.outputs()
    if 0 in output.shape:
        return None
    *output_shape, features = (output.shape[i] for i in output_axes)
    *sizes, channels, _ = (kernel.aval.shape[i] for i in kernel_axes)
    windows = tuple(
        map(Window, (1, *sizes), (1, *dilations), output_shape, (1, *strides))
    )
    padding = [(0, 0, 0)]
    for (low, high), dilation in zip(
        parameters["padding"], parameters["lhs_dilation"], strict=True
    ):
        padding.append((low, high, dilation - 1))
    padding.append((0, 0, 0))
    length = math.prod(output_shape)
    canonical = tuple(order[axis] for axis in kernel_axes)
    right_width = features // groups

    def factors(operands: Sequence[Any], cotangent: jax.Array) -> OuterProducts:
        padded = lax.pad(
            jnp.transpose(operands[0], image_axes),
            jnp.zeros((), operands[0].dtype),
            padding,
        )
        grouped = padded.reshape(*padded.shape[:-1], groups, channels)
        cotangent = jnp.transpose(cotangent, output_axes)
        cotangent = cotangent.reshape(length, groups, right_width)
        return OuterProducts(
            Patches(jnp.moveaxis(grouped, -2, 0), windows),
            Dense(jnp.swapaxes(cotangent, 0, 1)),
        )

    def gradient(products: OuterProducts) -> jax.Array:
        patches, right = products
        assert isinstance(patches, Patches)
        assert isinstance(right, Dense)
        products_NxKxCxP = patches.outer_products(right.array_NxTxK)
        groups_last = jnp.moveaxis(products_NxKxCxP, 0, -2)
        kernel_last = groups_last.reshape(*sizes, channels, features)
        inverse = sorted(range(len(kernel_axes)), key=kernel_axes.__getitem__)
        return jnp.transpose(kernel_last, inverse).astype(kernel.aval.dtype)

    pixels = _padded_pixels(image.aval.shape, image_axes, padding)
    return product.ProductUse(
        ("convolution", groups, tuple(sizes), canonical),
        (),
        tuple(kernel_axes[:-1]),
        tuple(kernel_axes[-1:]),
        groups,
        length,
        math.prod(sizes) * channels,
        right_width,
        groups
        * (
            2 * pixels**2 * channels
            + length**2 * sum(sizes)
            + 2 * length**2 * right_width
        ),
        factors,
        tuple(kernel_axes[-2:]) if groups == 1 else (),
        gradient,
    )


def _padded_pixels(
    shape: Sequence[int],
    axes: Sequence[int],
    padding: Sequence[tuple[int, int, int]],
) -> int:
    """Number of input positions after padding and dilation."""
    sizes = [
        low + high + size + max(size - 1, 0) * interior
        for size, (low, high, interior) in zip(
            (shape[i] for i in axes), padding, strict=True
        )
    ]
    return math.prod(sizes[:-1])
