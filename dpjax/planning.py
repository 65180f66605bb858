"""Which way each parameter's norm is computed, decided before anything runs.

Parameters that meet data independently of each other are planned apart. The plan groups
the leaves into *components* (leaves that reach the same tap operands on their way to
the data, such as the two factors of `A @ B`), and chooses for each component between

- gram: the squared norm from the factors of the gradient, and the weighted sum of
  gradients by the tap's ordinary transpose over the batch;
- instantiated: the per-example gradient of this component alone, squared for the norm,
  then reused for the weighted sum.

Both are exact. Gram needs uses that are all outer products and a way from leaf to tap
that keeps norms (reshapes, transposes, slices, casts).
"""

import dataclasses
import enum
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend.core import primitives as p

from dpjax import _compat, norm_rules
from dpjax.norm_rules import ProductUse
from dpjax.taps import Side, TappedFunction

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


@dataclasses.dataclass(frozen=True)
class Component:
    """Leaves whose gradients are computed together.

    Attributes:
      leaves: indices of parameter leaves.
      variables: the parameter-side values that meet data, functions of those leaves.
      uses: where they meet it.
      rule: the way chosen.
      products: one product use for each of `uses`, if the rule is gram; `exchanged`
        says which of them have left and right exchanged.
      flops, bytes: cost of the norm for one example, for the way chosen.
    """

    leaves: tuple[int, ...]
    variables: tuple[_compat.Var, ...]
    uses: tuple[Use, ...]
    rule: Rule
    products: tuple[ProductUse, ...] = ()
    exchanged: tuple[bool, ...] = ()
    flops: int = 0
    bytes: int = 0


class _Path(NamedTuple):
    """The way from one leaf to a parameter-side value, if it keeps gradient norms.

    `axes` holds the leaf axis behind each axis of the value, or None where axes were
    joined, split or cut.
    """

    leaf: int
    axes: tuple[int, ...] | None


def plan(function: TappedFunction) -> list[Component]:
    """Plans every parameter leaf: components that cover each leaf exactly once."""
    uses = [
        Use(i, position, tap.equation.invars[position])
        for i, tap in enumerate(function.taps)
        for position in tap.parameter_positions
    ]
    reached = {use.variable: function.parameter_side([use.variable])[0] for use in uses}
    paths = _norm_keeping_paths(function)
    return [
        _plan_component(
            function,
            leaves,
            tuple(use for use in uses if set(reached[use.variable]) <= set(leaves)),
            paths,
        )
        for leaves in _connected(len(function.leaves), list(reached.values()))
    ]


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
    paths: dict[_compat.Var, _Path],
) -> Component:
    variables = tuple(dict.fromkeys(use.variable for use in uses))
    if not uses:
        return Component(leaves, (), (), Rule.UNUSED)
    size = sum(_size(function.leaves[leaf]) for leaf in leaves)
    instantiated = Component(leaves, variables, uses, Rule.INSTANTIATED)
    matched = _match_products(function, uses, paths, len(variables) == 1)
    taps = [function.taps[use.tap] for use in uses]
    if matched is None:
        if all(map(norm_rules.is_elementwise, taps)):
            cost = sum(_size(out) for tap in taps for out in tap.outputs())
            return dataclasses.replace(
                instantiated, rule=Rule.ELEMENTWISE, flops=2 * cost, bytes=8 * cost
            )
        return dataclasses.replace(
            instantiated, rule=Rule.FALLBACK, bytes=4 * size, flops=2 * size
        )

    products, exchanged = matched
    product_flops = sum(
        2 * use.groups * use.length * use.left_width * use.right_width
        for use in products
    )
    length = sum(use.length for use in products)
    gram_flops = sum(use.gram_flops for use in products) * len(products)
    gram_bytes = 8 * products[0].groups * length**2
    # The instantiated gradient is written, read for the norm, read for the sum.
    gradient_bytes = 3 * 4 * size
    gram_time = gram_flops + product_flops + _FLOPS_PER_BYTE * gram_bytes
    instantiated_time = product_flops + _FLOPS_PER_BYTE * gradient_bytes
    if gram_time > instantiated_time:
        return dataclasses.replace(
            instantiated, flops=product_flops + 2 * size, bytes=gradient_bytes
        )
    return Component(
        leaves,
        variables,
        uses,
        Rule.GRAM,
        products,
        exchanged,
        flops=gram_flops,
        bytes=gram_bytes,
    )


def _match_products(
    function: TappedFunction,
    uses: Sequence[Use],
    paths: dict[_compat.Var, _Path],
    is_one_value: bool,
) -> tuple[tuple[ProductUse, ...], tuple[bool, ...]] | None:
    """All uses as outer products into one leaf with one signature, or None."""
    products = []
    for use in uses:
        path = paths.get(use.variable)
        if path is None or (path.axes is None and not is_one_value):
            return None
        ndim = use.variable.aval.ndim
        axes = tuple(range(ndim)) if is_one_value else path.axes
        assert axes is not None
        matched = norm_rules.match_product(function.taps[use.tap], use.position, axes)
        if matched is None:
            return None
        products.append(matched)
    first = products[0].signature
    exchanged = []
    for matched in products:
        if matched.signature == first:
            exchanged.append(False)
        elif matched.signature.exchanged() == first:
            exchanged.append(True)
        else:
            return None
    return tuple(products), tuple(exchanged)


def _norm_keeping_paths(function: TappedFunction) -> dict[_compat.Var, _Path]:
    paths = {
        leaf: _Path(i, tuple(range(leaf.aval.ndim)))
        for i, leaf in enumerate(function.leaves)
    }
    for equation in function.unbatched_equations:
        parameters = [a for a in equation.invars if function.side(a) == Side.PARAMETER]
        if len(parameters) != 1 or len(equation.outvars) != 1:
            continue
        (source,) = parameters
        if source is not equation.invars[0] or source not in paths:
            continue
        axes = _axes_after(equation, paths[source].axes)
        if axes is not _CHANGES_NORM:
            paths[equation.outvars[0]] = _Path(paths[source].leaf, axes)
    return paths


_CHANGES_NORM: Any = object()
_CUTS = frozenset({p.rev_p, p.slice_p, p.dynamic_slice_p, p.neg_p})


def _axes_after(equation: _compat.Equation, axes: tuple[int, ...] | None) -> Any:
    """Leaf axes behind an equation's result, given those behind its first operand.

    None where they are lost although norms are kept, `_CHANGES_NORM` where the
    transpose of the equation does not keep norms.
    """
    source, result = equation.invars[0].aval, equation.outvars[0].aval
    if equation.primitive is p.transpose_p:
        permutation = equation.params["permutation"]
        return None if axes is None else tuple(axes[i] for i in permutation)
    if equation.primitive in (p.convert_element_type_p, p.copy_p):
        real = jnp.issubdtype(source.dtype, jnp.floating)
        return (
            axes
            if real and jnp.issubdtype(result.dtype, jnp.floating)
            else (_CHANGES_NORM)
        )
    if equation.primitive in (p.reshape_p, p.squeeze_p, p.broadcast_in_dim_p):
        return None if _size_of(source) == _size_of(result) else _CHANGES_NORM
    return None if equation.primitive in _CUTS else _CHANGES_NORM


def _size(variable: Any) -> int:
    return _size_of(getattr(variable, "aval", variable))


def _size_of(aval: Any) -> int:
    return math.prod(aval.shape)
