"""Which way each parameter's norm is computed, decided before anything runs.

Parameters that meet data independently of each other are planned apart. The plan groups
the leaves into *components* (leaves that reach the same tap operands on their way to
the data, such as the two factors of `A @ B`), and chooses for each component between

- gram: the squared norm from the factors of the gradient, and the weighted sum of
  gradients by the tap's ordinary transpose over the batch;
- instantiated: the per-example gradient of this component alone, squared for the norm,
  then reused for the weighted sum.

Both are exact. Gram needs uses that are all outer products and a way from leaf to tap
on which entries are only placed (`dpjax.placements`): uses of the same box of a leaf
concatenate, disjoint boxes add up.
"""

import dataclasses
import enum
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from dpjax import _compat, norm_rules, placements
from dpjax.norm_rules import ProductUse
from dpjax.outer_products import Cut, Dense, OuterProducts
from dpjax.placements import Part, Parts
from dpjax.tapped_function import TappedFunction
from dpjax.taps import Tap

# Arithmetic that takes as long as moving one byte: about 10 on CPUs (100 GFLOP/s at
# 10 GB/s) and on GPUs (60 TFLOP/s at 5 TB/s) alike.
_FLOPS_PER_BYTE = 10


class Rule(enum.Enum):
    """How a component's squared norm is computed."""

    GRAM = "gram"
    INSTANTIATED = "instantiated"
    ELEMENTWISE = "elementwise"
    FALLBACK = "per-example gradient"
    UNUSED = "unused"


class Use(NamedTuple):
    """One parameter operand of one tap."""

    tap: int
    position: int
    variable: Any


class Piece(NamedTuple):
    """What one use contributes to the gradient of a box of a leaf.

    Attributes:
      use: index into the component's uses.
      product: the use as outer products.
      cuts: the box in the factors' groups, left and right; None for all of them.
      scale: what the outer products are multiplied by.
      exchanged: whether left and right change places, to fit the box's other pieces.
    """

    use: int
    product: ProductUse
    cuts: tuple[Cut, Cut, Cut] | None
    scale: float
    exchanged: bool

    def factors(self, operands: Sequence[Any], cotangent: Any) -> OuterProducts:
        """The outer products, for one example."""
        left, right = self.product.factors(operands, cotangent)
        if self.cuts is not None:
            groups, left_widths, right_widths = self.cuts
            left, right = left.cut(groups, left_widths), right.cut(groups, right_widths)
        if self.scale != 1:
            assert isinstance(right, Dense)
            right = Dense(right.array_NxTxK * self.scale)
        return (
            OuterProducts(right, left) if self.exchanged else OuterProducts(left, right)
        )

    def sizes(self) -> tuple[int, int, int]:
        """Groups, left width and right width."""
        if self.cuts is None:
            product = self.product
            return product.groups, product.left_width, product.right_width
        groups, left, right = (
            math.prod(cut.stop - cut.start for cut in cuts.slices) for cuts in self.cuts
        )
        return groups, left, right

    def gram_flops(self) -> int:
        """Cost of the factors' grams for one example."""
        if self.cuts is None:
            return self.product.gram_flops
        groups, left, right = self.sizes()
        return 2 * groups * self.product.length**2 * (left + right)

    def product_flops(self) -> int:
        """Cost of the sum of outer products."""
        return 2 * self.product.length * math.prod(self.sizes())


Boxes = tuple[tuple[Piece, ...], ...]


@dataclasses.dataclass(frozen=True)
class Component:
    """Leaves whose gradients are computed together.

    Attributes:
      leaves: indices of parameter leaves.
      variables: the parameter-side values that meet data, functions of those leaves.
      uses: where they meet it.
      rule: the way chosen.
      boxes: if the rule is gram, for each leaf its boxes, and the pieces of each.
      flops, bytes: cost of the norm for one example, for the way chosen.
    """

    leaves: tuple[int, ...]
    variables: tuple[_compat.Var, ...]
    uses: tuple[Use, ...]
    rule: Rule
    boxes: tuple[Boxes, ...] = ()
    flops: int = 0
    bytes: int = 0


def plan(function: TappedFunction, budget: int | None = None) -> list[Component]:
    """Plans every parameter leaf: components that cover each leaf exactly once.

    Args:
      function: the tapped function.
      budget: bytes that one component's norm may take for one example, if there is a
        way that needs no more; None for the fastest way.
    """
    uses = [
        Use(i, position, tap.operands[position].variable)
        for i, tap in enumerate(function.taps)
        for position in tap.parameter_positions
    ]
    reached = {use.variable: function.parameter_side([use.variable])[0] for use in uses}
    parts = placements.find(function)
    return [
        _plan_component(
            function,
            leaves,
            tuple(use for use in uses if set(reached[use.variable]) <= set(leaves)),
            parts,
            budget,
        )
        for leaves in _connected(len(function.leaves), list(reached.values()))
    ]


def held_bytes(function: TappedFunction, components: Sequence[Component]) -> int:
    """What book-keeping keeps for one example until its weight is known.

    Beside what the ordinary backward pass keeps: cotangents, and gradients that were
    formed.
    """
    taps = {
        use.tap: function.taps[use.tap]
        for component in components
        if component.rule is Rule.GRAM
        for use in component.uses
    }
    cotangents = sum(
        math.prod(tap.loops) * _size_of(out) * out.dtype.itemsize
        for tap in taps.values()
        for out in tap.outputs()
    )
    formed = (Rule.INSTANTIATED, Rule.ELEMENTWISE, Rule.FALLBACK)
    leaves = [
        function.leaves[i].aval
        for c in components
        if c.rule in formed
        for i in c.leaves
    ]
    return cotangents + sum(_size_of(leaf) * leaf.dtype.itemsize for leaf in leaves)


def _connected(count: int, links: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Groups 0..count-1 so that indices linked directly or indirectly are together."""
    group = {i: {i} for i in range(count)}
    for link in links:
        merged = set().union(*(group[i] for i in link))
        group.update(dict.fromkeys(merged, merged))
    found = {tuple(sorted(members)) for members in group.values()}
    return sorted(found)


def _plan_component(
    function: TappedFunction,
    leaves: tuple[int, ...],
    uses: tuple[Use, ...],
    parts: Mapping[_compat.Var, Parts],
    budget: int | None,
) -> Component:
    variables = tuple(dict.fromkeys(use.variable for use in uses))
    if not uses:
        return Component(leaves, (), (), Rule.UNUSED)
    size = sum(_size(function.leaves[leaf]) for leaf in leaves)
    instantiated = Component(leaves, variables, uses, Rule.INSTANTIATED)
    boxes = _match_products(function, leaves, uses, parts)
    taps = [function.taps[use.tap] for use in uses]
    if boxes is None:
        if all(map(norm_rules.is_elementwise, taps)):
            cost = sum(
                math.prod(tap.loops) * _size_of(out)
                for tap in taps
                for out in tap.outputs()
            )
            return dataclasses.replace(
                instantiated, rule=Rule.ELEMENTWISE, flops=2 * cost, bytes=8 * cost
            )
        return dataclasses.replace(
            instantiated, rule=Rule.FALLBACK, bytes=4 * size, flops=2 * size
        )

    product_flops = sum(piece.product_flops() for box in _flat(boxes) for piece in box)
    gram_flops = sum(
        len(box) * sum(piece.gram_flops() for piece in box) for box in _flat(boxes)
    )
    gram_bytes = sum(
        8 * box[0].sizes()[0] * sum(piece.product.length for piece in box) ** 2
        for box in _flat(boxes)
    )
    # The instantiated gradient is written, read for the norm, read for the sum.
    gradient_bytes = 3 * 4 * size
    gram_time = gram_flops + product_flops + _FLOPS_PER_BYTE * gram_bytes
    instantiated_time = product_flops + _FLOPS_PER_BYTE * gradient_bytes
    is_gram = gram_time <= instantiated_time
    if budget is not None and max(gram_bytes, 4 * size) > budget:
        is_gram = gram_bytes <= 4 * size
    if not is_gram:
        return dataclasses.replace(
            instantiated, flops=product_flops + 2 * size, bytes=gradient_bytes
        )
    return dataclasses.replace(
        instantiated, rule=Rule.GRAM, boxes=boxes, flops=gram_flops, bytes=gram_bytes
    )


def _flat(boxes: tuple[Boxes, ...]) -> Iterator[tuple[Piece, ...]]:
    return itertools.chain.from_iterable(boxes)


class _Signature(NamedTuple):
    """Which axes of a box the factors of its gradient run over.

    Pieces of one box concatenate if their signatures are equal, or equal with left and
    right exchanged (`W` here and its transpose there).
    """

    form: Any
    view: Any
    group: tuple[int, ...]
    left: tuple[int, ...]
    right: tuple[int, ...]

    def exchanged(self) -> "_Signature":
        return self._replace(left=self.right, right=self.left)


def _match_products(
    function: TappedFunction,
    leaves: Sequence[int],
    uses: Sequence[Use],
    parts: Mapping[_compat.Var, Parts],
) -> tuple[Boxes, ...] | None:
    """All uses as outer products into boxes of the leaves, or None."""
    by_leaf: dict[int, dict[Any, list[tuple[_Signature, Piece]]]] = {}
    boxes: dict[int, list[Part]] = {leaf: [] for leaf in leaves}
    for i, use in enumerate(uses):
        if use.variable not in parts:
            return None
        for part in parts[use.variable]:
            matched = _match_part(function.taps[use.tap], i, use, part)
            if matched is None:
                return None
            key = part.corner, part.box
            known = by_leaf.setdefault(part.leaf, {})
            if key not in known:
                if any(part.overlaps(other) for other in boxes[part.leaf]):
                    return None
                boxes[part.leaf].append(part)
            known.setdefault(key, []).append(matched)
    found = []
    for leaf in leaves:
        joined = [_joined(matched) for matched in by_leaf.get(leaf, {}).values()]
        if None in joined:
            return None
        found.append(tuple(box for box in joined if box is not None))
    return tuple(found)


def _match_part(
    tap: Tap, index: int, use: Use, part: Part
) -> tuple[_Signature, Piece] | None:
    """One use as outer products into one box, or None."""
    # Axes of size one that the box lacks come last, whatever their order.
    order = [
        len(part.axes) + len(part.box) + i if axis is None else axis
        for i, axis in enumerate(part.axes)
    ]
    product = norm_rules.match_product(tap, use.position, order)
    if product is None or part.repeated:
        return None
    shape = use.variable.aval.shape
    cut_at = [i for i, size in enumerate(shape) if part.sizes[i] != size]
    if not set(cut_at) <= set(product.cut_axes):
        return None
    axes = product.group_axes, product.left_axes, product.right_axes
    cuts = tuple(
        Cut(
            tuple(shape[i] for i in factor_axes),
            tuple(
                slice(part.start[i], part.start[i] + part.sizes[i]) for i in factor_axes
            ),
        )
        for factor_axes in axes
    )
    group, left, right = (
        tuple(order[i] for i in factor_axes if part.sizes[i] != 1)
        for factor_axes in axes
    )
    signature = _Signature(product.form, part.view, group, left, right)
    groups_cut, left_cut, right_cut = cuts
    whole = not cut_at
    return signature, Piece(
        index,
        product,
        None if whole else (groups_cut, left_cut, right_cut),
        part.scale,
        False,
    )


def _joined(
    matched: Sequence[tuple[_Signature, Piece]],
) -> tuple[Piece, ...] | None:
    """The pieces of one box, turned so that they concatenate, or None."""
    first, _ = matched[0]
    pieces = []
    for signature, piece in matched:
        if signature == first:
            pieces.append(piece)
        elif signature.exchanged() == first:
            pieces.append(piece._replace(exchanged=True))
        else:
            return None
    return tuple(pieces)


def _size(variable: Any) -> int:
    return _size_of(variable.aval)


def _size_of(aval: Any) -> int:
    return math.prod(aval.shape)
