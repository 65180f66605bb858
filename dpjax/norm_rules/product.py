"""What a product-type norm rule says about one use of a parameter."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dpjax.outer_products import OuterProducts


class Signature(NamedTuple):
    """Which axes of a parameter leaf the factors of its gradient run over.

    Two uses of one leaf concatenate if their signatures are equal, or equal with left
    and right exchanged (`W` here and its transpose there).

    Attributes:
      form: the kind of product; uses of different forms never concatenate.
      group: leaf axes that index independent products.
      left: leaf axes of the factor made from activations.
      right: leaf axes of the factor made from cotangents.
    """

    form: Any
    group: tuple[int, ...]
    left: tuple[int, ...]
    right: tuple[int, ...]

    def exchanged(self) -> "Signature":
        """The same product with the roles of the two factors exchanged."""
        return self._replace(left=self.right, right=self.left)


@dataclasses.dataclass(frozen=True)
class ProductUse:
    """One operand of one tap, whose gradient is a sum of outer products.

    Attributes:
      signature: see `Signature`.
      groups: number of independent products, n.
      length: number of places summed over, t.
      left_width: width of the left factor, k.
      right_width: width of the right factor, p.
      gram_flops: cost of the factors' grams for one example.
      factors: (operands, cotangent) of one example -> its outer products.
      gradient: the same -> the operand's gradient, where there is a better way than the
        equation's own vjp.
    """

    signature: Signature
    groups: int
    length: int
    left_width: int
    right_width: int
    gram_flops: int
    factors: Callable[[Sequence[Any], Any], OuterProducts]
    gradient: Callable[[Sequence[Any], Any], jax.Array] | None = None


def is_real(*atoms: Any) -> bool:
    """Whether all values are real floating point (the product rules conjugate none)."""
    return all(jnp.issubdtype(atom.aval.dtype, jnp.floating) for atom in atoms)


def in_leaf_order(axes: Sequence[int], leaf_axes: Sequence[int]) -> list[int]:
    """Operand axes, sorted by the place that they have in the parameter leaf."""
    return sorted(axes, key=lambda axis: leaf_axes[axis])


def to_leaf(axes: Sequence[int], leaf_axes: Sequence[int]) -> tuple[int, ...]:
    """The leaf's own numbers for operand axes."""
    return tuple(leaf_axes[axis] for axis in axes)
