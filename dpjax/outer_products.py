"""Norms of sums of outer products, without forming the sums.

A parameter that meets data in a product (a dense layer, a convolution, an embedding)
has a per-example gradient of the form

    G_nxkxp = sum_t L_nxtxk (x) R_nxtxp

with a *left* factor from the activations, a *right* factor from the cotangents, t the
places where the parameter was used in one example (tokens, pixels, time steps, layers
that share it) and n independent groups. Its squared norm needs no G:

    |G|^2 = sum_n <L_n L_n^T, R_n R_n^T>

(Goodfellow 2015, arXiv 1510.01799, for one use; Lee & Kifer 2021 and Li et al. 2022,
arXiv 2110.05679, for many). Uses of one parameter concatenate along t, which gives the
cross terms of shared parameters exactly. Everything here is for one example.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpjax.precision import tiny, widened

Array: TypeAlias = jax.Array

# Rounding of a gram-form squared norm, in units of eps * (sum_t |l_t||r_t|)^2. The
# entries of a gram round independently, so their sum errs by a few units at most; the
# tests measure it on tokens that cancel.
_ROUNDING_UNITS = 4.0


class SquaredNorm(NamedTuple):
    """A squared norm and a bound on its rounding error, scalars.

    Norms are computed in float32, or in float64 where the factors are float64.
    """

    value: Array
    rounding: Array


class Factor(Protocol):
    """One side of the outer products: `width` numbers at each of `length` places."""

    @property
    def length(self) -> int:
        """Number of places t."""

    @property
    def width(self) -> int:
        """Numbers per place."""

    def gram(self, other: "Factor") -> Array:
        """Inner products with another factor's places, float[n, t, s]."""

    def squared_row_norms(self) -> Array:
        """Squared norm at each place, float[n, t]."""

    def merged(self, scanned: Sequence[bool]) -> "Factor":
        """The factor of all steps of some loops, from one stacked over the steps.

        Args:
          scanned: for each leading axis of the arrays, whether it becomes groups; else
            it becomes places.
        """

    def cut(self, groups: "Cut", widths: "Cut") -> "Factor":
        """The factor's entries in a box of the parameter."""


class Cut(NamedTuple):
    """A box in an array's axes.

    Attributes:
      shape: the axes' sizes.
      slices: what the box holds of each.
    """

    shape: tuple[int, ...]
    slices: tuple[slice, ...]

    def is_whole(self) -> bool:
        """Whether nothing is cut off."""
        return all(
            (cut.start, cut.stop) == (0, size)
            for cut, size in zip(self.slices, self.shape, strict=True)
        )


def _merged(array: Array, scanned: Sequence[bool]) -> Array:
    """Loop axes merged into the first axis behind them, or into the one behind that."""
    own = [i for i, is_own in enumerate(scanned) if is_own]
    shared = [i for i, is_own in enumerate(scanned) if not is_own]
    count = len(scanned)
    array = jnp.transpose(array, (*own, count, *shared, *range(count + 1, array.ndim)))
    groups, places = (
        math.prod(array.shape[a:b])
        for a, b in ((0, len(own) + 1), (len(own) + 1, count + 2))
    )
    return array.reshape(groups, places, *array.shape[count + 2 :])


def _rounding_unit(dtype: Any) -> float:
    return _ROUNDING_UNITS * float(jnp.finfo(dtype).eps)


def _sum(arrays: Iterable[Array]) -> Array:
    return functools.reduce(jnp.add, arrays)


def _einsum(formula: str, *operands: Array) -> Array:
    return jnp.einsum(formula, *map(widened, operands), precision=lax.Precision.HIGHEST)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["array_NxTxK"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class Dense:
    """A factor held as an array of shape (groups, length, width)."""

    array_NxTxK: Array

    @property
    def groups(self) -> int:
        """Number of independent products n."""
        return self.array_NxTxK.shape[0]

    @property
    def length(self) -> int:
        """Number of places t."""
        return self.array_NxTxK.shape[1]

    @property
    def width(self) -> int:
        """Numbers per place."""
        return self.array_NxTxK.shape[2]

    def gram(self, other: Factor) -> Array:
        """Inner products with another factor's places, float[n, t, s]."""
        if isinstance(other, Dense):
            return _einsum("ntk,nsk->nts", self.array_NxTxK, other.array_NxTxK)
        return jnp.swapaxes(other.gram(self), 1, 2)

    def squared_row_norms(self) -> Array:
        """Squared norm at each place, float[n, t]."""
        return jnp.sum(jnp.square(widened(self.array_NxTxK)), axis=2)

    def merged(self, scanned: Sequence[bool]) -> "Dense":
        """See `Factor`."""
        return Dense(_merged(self.array_NxTxK, scanned))

    def cut(self, groups: Cut, widths: Cut) -> "Dense":
        """See `Factor`."""
        array = self.array_NxTxK
        array = array.reshape(*groups.shape, self.length, *widths.shape)
        array = array[(*groups.slices, slice(None), *widths.slices)]
        inside = len(groups.shape)
        count = math.prod(array.shape[:inside])
        return Dense(array.reshape(count, self.length, -1))


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["ids_NxT"], meta_fields=["width"]
)
@dataclasses.dataclass(frozen=True)
class OneHot:
    """Rows of an identity matrix: place t looks up row `ids_NxT[n, t]` of table n.

    An id outside [0, width) stands for a row of zeros: a lookup that was filled.
    """

    ids_NxT: Array
    width: int

    @property
    def length(self) -> int:
        """Number of places t."""
        return self.ids_NxT.shape[1]

    @property
    def _inside_NxT(self) -> Array:
        return (self.ids_NxT >= 0) & (self.ids_NxT < self.width)

    def gram(self, other: Factor) -> Array:
        """Inner products with another factor's places, float[n, t, s]."""
        if isinstance(other, OneHot):
            equal = self.ids_NxT[:, :, None] == other.ids_NxT[:, None, :]
            return (equal & self._inside_NxT[:, :, None]).astype(jnp.float32)
        if not isinstance(other, Dense):
            raise TypeError(f"no inner product of OneHot and {type(other).__name__}")
        columns = jnp.clip(self.ids_NxT, 0, self.width - 1)
        picked_NxSxT = jax.vmap(lambda array, ids: jnp.take(array, ids, axis=1))(
            other.array_NxTxK, columns
        )
        picked = jnp.where(self._inside_NxT[:, None], picked_NxSxT, 0)
        return jnp.swapaxes(widened(picked), 1, 2)

    def squared_row_norms(self) -> Array:
        """Squared norm at each place, float[n, t]."""
        return self._inside_NxT.astype(jnp.float32)

    def merged(self, scanned: Sequence[bool]) -> "OneHot":
        """See `Factor`."""
        return OneHot(_merged(self.ids_NxT, scanned), self.width)

    def cut(self, groups: Cut, widths: Cut) -> "OneHot":
        """See `Factor`."""
        (rows,) = widths.slices
        ids = self.ids_NxT.reshape(*groups.shape, self.length)[groups.slices]
        # Ids below the box stay outside of it; those above its end do too.
        return OneHot(ids.reshape(-1, self.length) - rows.start, rows.stop - rows.start)


class Window(NamedTuple):
    """A convolution's geometry along one spatial dim.

    Attributes:
      size: kernel positions.
      dilation: input positions between them.
      outputs: output positions.
      stride: input positions between those.
    """

    size: int
    dilation: int
    outputs: int
    stride: int

    def shifted(self, array: Array, axis: int, position: int) -> Array:
        """The entries along `axis` that one kernel position meets."""
        begin = position * self.dilation
        end = begin + (self.outputs - 1) * self.stride + 1
        return lax.slice_in_dim(array, begin, end, self.stride, axis)

    def shifts(self, array: Array, axis: int) -> list[Array]:
        """`shifted` for each kernel position."""
        return [self.shifted(array, axis, i) for i in range(self.size)]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["input_NxSxC"],
    meta_fields=["windows"],
)
@dataclasses.dataclass(frozen=True)
class Patches:
    """What a convolution's kernel sees at each output position, not materialised.

    The gram of patches is a sum over kernel offsets of shifted grams of the input, one
    spatial dim after the other: cost (input positions)^2 * channels, plus a sum of
    shifts, instead of T^2 * offsets * channels.

    Attributes:
      input_NxSxC: padded (and dilated) input; groups, spatial dims S..., channels. The
        first spatial dim is the convolution's batch.
      windows: the geometry along each spatial dim; the first has size 1 and stride 1.
    """

    input_NxSxC: Array
    windows: tuple[Window, ...]

    @property
    def length(self) -> int:
        """Number of places t: output positions."""
        return math.prod(window.outputs for window in self.windows)

    @property
    def width(self) -> int:
        """Numbers per place: kernel positions times channels."""
        offsets = math.prod(window.size for window in self.windows)
        return offsets * self.input_NxSxC.shape[-1]

    def gram(self, other: Factor) -> Array:
        """Inner products with another factor's places, float[n, t, s]."""
        if not isinstance(other, Patches):
            raise TypeError(f"no inner product of Patches and {type(other).__name__}")
        groups, *spatial, channels = self.input_NxSxC.shape
        other_spatial = other.input_NxSxC.shape[1:-1]
        total = _einsum(
            "nsc,nuc->nsu",
            self.input_NxSxC.reshape(groups, -1, channels),
            other.input_NxSxC.reshape(groups, -1, channels),
        ).reshape(groups, *spatial, *other_spatial)
        for i, (mine, theirs) in enumerate(
            zip(self.windows, other.windows, strict=True), 1
        ):
            pairs = zip(mine.shifts(total, i), range(theirs.size), strict=True)
            total = _sum(
                theirs.shifted(shift, i + len(spatial), position)
                for shift, position in pairs
            )
        return total.reshape(groups, self.length, other.length)

    def squared_row_norms(self) -> Array:
        """Squared norm at each place, float[n, t]."""
        total = jnp.sum(jnp.square(widened(self.input_NxSxC)), axis=-1)
        for i, window in enumerate(self.windows, 1):
            total = _sum(window.shifts(total, i))
        return total.reshape(total.shape[0], self.length)

    def merged(self, scanned: Sequence[bool]) -> "Patches":
        """See `Factor`."""
        array = _merged(self.input_NxSxC, scanned)
        first = self.windows[0]._replace(outputs=array.shape[1])
        return Patches(array, (first, *self.windows[1:]))

    def cut(self, groups: Cut, widths: Cut) -> "Patches":
        """See `Factor`; along channels only."""
        if not groups.is_whole():
            raise ValueError("groups of patches cannot be cut")
        return Patches(self.input_NxSxC[..., widths.slices[-1]], self.windows)

    def outer_products(self, right_NxTxP: Array) -> Array:
        """sum_t patch_t (x) right_t, of shape (n, kernel sizes..., channels, p).

        Patches are laid out along the last spatial dim only; the other kernel positions
        are one product each.
        """
        groups, channels = self.input_NxSxC.shape[0], self.input_NxSxC.shape[-1]
        *outer, last = self.windows
        rows = jnp.concatenate(
            last.shifts(self.input_NxSxC, len(self.windows)), axis=-1
        )
        width = last.size * channels

        def product(position: Array) -> Array:
            array = rows
            for i, window in enumerate(outer, 1):
                span = (window.outputs - 1) * window.stride + 1
                begin = position[i - 1] * window.dilation
                array = lax.dynamic_slice_in_dim(array, begin, span, i)
                array = lax.slice_in_dim(array, 0, span, window.stride, i)
            flat = array.reshape(groups, -1, width)
            return jnp.einsum("ntc,ntp->ncp", flat, right_NxTxP)

        sizes = [window.size for window in self.windows]
        positions = np.array([*np.ndindex(*sizes[:-1])], np.int32)
        count = math.prod(sizes[:-1])
        products = lax.map(product, jnp.asarray(positions.reshape(count, len(outer))))
        return jnp.moveaxis(products, 0, 1).reshape(groups, *sizes, channels, -1)


class OuterProducts(NamedTuple):
    """One use (or several, concatenated) of a parameter in products."""

    left: Factor
    right: Factor

    def is_single(self) -> bool:
        """Whether there is one dense product at one place: its norm is |l||r|."""
        return (
            isinstance(self.left, Dense)
            and isinstance(self.right, Dense)
            and self.left.length == self.left.groups == 1
        )


def concatenate(uses: Sequence[OuterProducts]) -> list[OuterProducts]:
    """Joins the uses whose factors are both dense along t; keeps the others."""
    dense: list[tuple[Array, Array]] = []
    others = []
    for use in uses:
        if isinstance(use.left, Dense) and isinstance(use.right, Dense):
            dense.append((use.left.array_NxTxK, use.right.array_NxTxK))
        else:
            others.append(use)
    if len(dense) < 2:
        return list(uses)
    left, right = (
        Dense(jnp.concatenate([widened(array) for array in arrays], axis=1))
        for arrays in zip(*dense, strict=True)
    )
    return [OuterProducts(left, right), *others]


def _single_norm(use: OuterProducts) -> SquaredNorm:
    assert isinstance(use.left, Dense)
    assert isinstance(use.right, Dense)
    left, right = (
        jnp.sum(jnp.square(widened(factor.array_NxTxK.ravel())))
        for factor in (use.left, use.right)
    )
    value = left * right
    underflow = use.left.width * right + use.right.width * left + 1.0
    rounding = _rounding_unit(value.dtype) * value + tiny(value.dtype) * underflow
    return SquaredNorm(value, rounding)


def total_over_batch(left_BxNxTxK: Array, right_BxNxTxP: Array) -> Array:
    """Sum over examples and places of outer products, of shape (n, k, p)."""
    return _einsum("bntk,bntp->nkp", left_BxNxTxK, right_BxNxTxP)


def squared_norm(uses: Sequence[OuterProducts]) -> SquaredNorm:
    """Squared norm of the sum of all uses' outer products, for one example.

    Args:
      uses: outer products into one parameter, all with the same groups and widths.

    Returns:
      The squared norm, and a bound on the rounding error of its gram form (`rounding`).
    """
    uses = concatenate(uses)
    if len(uses) == 1 and uses[0].is_single():
        return _single_norm(uses[0])
    bound = rounding(uses)
    dtype = bound.dtype
    value = jnp.zeros((), dtype)
    for i, first in enumerate(uses):
        for j, second in enumerate(uses[i:], i):
            left = first.left.gram(second.left).astype(dtype)
            right = first.right.gram(second.right).astype(dtype)
            value += (1.0 if i == j else 2.0) * jnp.sum(left * right)
    return SquaredNorm(value, bound)


def rounding(uses: Sequence[OuterProducts]) -> Array:
    """A bound on what rounding does to the squared norm of a sum of outer products.

    Proportional to eps * (sum_t |l_t||r_t|)^2, which exceeds |G|^2 by as much as the
    products cancel, plus what squares that underflow may have lost.
    """
    # One-hot factors are exact in any precision; the dense ones set it.
    dtype = uses[0].right.squared_row_norms().dtype
    rows = [
        [factor.squared_row_norms().astype(dtype) for factor in (use.left, use.right)]
        for use in uses
    ]
    reach = _sum(jnp.sum(jnp.sqrt(left * right), axis=1) for left, right in rows)
    left, right = (_sum(map(jnp.sum, side)) for side in zip(*rows, strict=True))
    # At most `tiny` is lost of each square, and of each product of grams.
    length = float(sum(use.left.length for use in uses))
    widths = uses[0].left.width, uses[0].right.width
    underflow = length * (widths[1] * left + widths[0] * right + length)
    bound = _rounding_unit(dtype) * jnp.sum(jnp.square(reach))
    return bound + tiny(dtype) * underflow


def rounding_of_sum(reach: Array) -> Array:
    """The same for a vector of sums, given the sums of their terms' absolute values."""
    squares = jnp.sum(jnp.square(reach))
    return _rounding_unit(reach.dtype) * squares + tiny(reach.dtype) * reach.size
