"""What a product-type norm rule says about one use of a parameter."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dpjax.outer_products import OuterProducts
from dpjax.taps import Tap


@dataclasses.dataclass(frozen=True)
class ProductUse:
    """One operand of one tap, whose gradient is a sum of outer products.

    Attributes:
      form: the kind of product; uses of different forms never concatenate.
      group_axes: operand axes that index independent products, in the factors' order.
      left_axes: operand axes of the factor made from activations.
      right_axes: operand axes of the factor made from cotangents.
      groups: number of independent products, n.
      length: number of places summed over, t.
      left_width: width of the left factor, k.
      right_width: width of the right factor, p.
      gram_flops: cost of the factors' grams for one example.
      factors: (operands, cotangent) of one example -> its outer products.
      cut_axes: operand axes along which a box of the factors can be taken.
      gradient: outer products -> the operand's gradient, where there is a better way
        than the equation's own vjp.
    """

    form: Any
    group_axes: tuple[int, ...]
    left_axes: tuple[int, ...]
    right_axes: tuple[int, ...]
    groups: int
    length: int
    left_width: int
    right_width: int
    gram_flops: int
    factors: Callable[[Sequence[Any], Any], OuterProducts]
    cut_axes: tuple[int, ...]
    gradient: Callable[[OuterProducts], jax.Array] | None = None


def to_operand(
    use: ProductUse, products_NxKxP: jax.Array, shape: Sequence[int]
) -> jax.Array:
    """A sum of outer products in the axes of the operand whose gradient it is.

    Args:
      use: whose factors' axes are the operand's.
      products_NxKxP: the sum.
      shape: the operand's.
    """
    axes = (*use.group_axes, *use.left_axes, *use.right_axes)
    by_axis = products_NxKxP.reshape([shape[axis] for axis in axes])
    return jnp.transpose(by_axis, sorted(range(len(axes)), key=axes.__getitem__))


def over_steps(use: ProductUse, tap: Tap, position: int) -> ProductUse:
    """The use in all steps of the loops around a tap, given that in one step.

    A parameter that all steps share is used at more places; one of which each step has
    its own entry is as many independent parameters, which is one more group axis.
    """
    scanned = tap.operands[position].scanned
    if not scanned:
        return use
    entries, places = (
        math.prod(
            n for n, is_own in zip(tap.loops, scanned, strict=True) if is_own == own
        )
        for own in (True, False)
    )
    num_own = sum(scanned)

    def moved(axes: Sequence[int]) -> tuple[int, ...]:
        return tuple(axis + num_own for axis in axes)

    def factors(operands: Sequence[Any], cotangent: jax.Array) -> OuterProducts:
        stacked: OuterProducts = tap.over_steps(use.factors, operands, cotangent)
        return OuterProducts(
            stacked.left.merged(scanned), stacked.right.merged(scanned)
        )

    gradient = None
    if use.gradient is not None:
        gradient = functools.partial(_gradient_by_entry, use.gradient, tap, scanned)
    return ProductUse(
        use.form,
        (*range(num_own), *moved(use.group_axes)),
        moved(use.left_axes),
        moved(use.right_axes),
        entries * use.groups,
        places * use.length,
        use.left_width,
        use.right_width,
        entries * places**2 * use.gram_flops,
        factors,
        moved(use.cut_axes),
        gradient,
    )


def _gradient_by_entry(
    gradient: Callable[[OuterProducts], jax.Array],
    tap: Tap,
    scanned: Sequence[bool],
    products: OuterProducts,
) -> jax.Array:
    entries = [n for n, is_own in zip(tap.loops, scanned, strict=True) if is_own]
    if not entries:
        return gradient(products)
    by_entry = jax.tree.map(
        lambda x: x.reshape(math.prod(entries), -1, *x.shape[1:]), products
    )
    stacked = jax.vmap(gradient)(by_entry)
    return stacked.reshape(*entries, *stacked.shape[1:])


def is_real(*atoms: Any) -> bool:
    """Whether all values are real floating point (the product rules conjugate none)."""
    return all(jnp.issubdtype(atom.aval.dtype, jnp.floating) for atom in atoms)


def ordered(axes: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Operand axes, sorted by the places that they have in the parameter leaf."""
    return tuple(sorted(axes, key=lambda axis: order[axis]))
