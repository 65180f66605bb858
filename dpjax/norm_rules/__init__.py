"""How the gradient of a parameter operand is described, by primitive.

One file for each family. A product rule has a `match` function, which either explains
an equation as outer products (`product.ProductUse`) or declines; adding a rule means
adding a file and a line here. Whatever no rule explains goes by `generic`, exactly.
"""

from collections.abc import Callable, Sequence

from jax.extend.core import primitives

from dpjax.norm_rules import (
    conv,
    dot_general,
    dynamic_slice,
    elementwise,
    gather,
    generic,
    product,
)
from dpjax.norm_rules.product import ProductUse, to_operand
from dpjax.taps import Tap

_PRODUCT_RULES: dict[object, Callable[[Tap, int, Sequence[int]], ProductUse | None]] = {
    primitives.dot_general_p: dot_general.match,
    primitives.conv_general_dilated_p: conv.match,
    primitives.dynamic_slice_p: dynamic_slice.match,
    primitives.gather_p: gather.match,
}


def match_product(tap: Tap, position: int, order: Sequence[int]) -> ProductUse | None:
    """The product rule for one parameter operand of a tap, if there is one.

    Args:
      tap: the tap, perhaps in loops.
      position: which of its operands.
      order: for each axis of that operand, in front of all loops, its place among the
        axes of the parameter leaf.
    """
    rule = _PRODUCT_RULES.get(tap.equation.primitive)
    if rule is None:
        return None
    num_own = sum(tap.operands[position].scanned)
    use = rule(tap, position, order[num_own:])
    return None if use is None else product.over_steps(use, tap, position)


def is_elementwise(tap: Tap) -> bool:
    """Whether the tap's parameter gradients are no larger than its output."""
    return tap.equation.primitive in elementwise.PRIMITIVES


def is_linear(tap: Tap) -> bool:
    """Whether `generic.gradients` of absolute values bounds the terms of its sums."""
    return tap.equation.primitive in elementwise.LINEAR


__all__ = [
    "ProductUse",
    "generic",
    "is_elementwise",
    "is_linear",
    "match_product",
    "to_operand",
]
