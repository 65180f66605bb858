"""Where the entries of parameter-side values come from.

On its way to the data a parameter leaf is transposed, cast, cut into Q, K and V,
concatenated with others, reshaped. As long as every entry of a leaf is only *placed*
(at most once, scaled by a known number at most), norms and inner products of gradients
can be read off the gradient of the value that meets data, part by part.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import primitives as p

from dpjax import _compat
from dpjax.sides import Side
from dpjax.tapped_function import TappedFunction


class Part(NamedTuple):
    """A box of a value, and the box of a leaf whose entries it holds.

    Attributes:
      leaf: which leaf.
      corner: first index of the leaf's box along each of the leaf's axes.
      box: its sizes.
      view: how the box was reshaped, None if not; parts of one box concatenate only if
        they have the same view.
      axes: for each axis of the value, the axis of the (reshaped) box, or None for an
        axis that the box lacks: of size one, or along which it is repeated.
      start: first index along each axis of the value.
      sizes: sizes along each axis of the value.
      scale: the number that the entries are multiplied by.
    """

    leaf: int
    corner: tuple[int, ...]
    box: tuple[int, ...]
    view: Any
    axes: tuple[int | None, ...]
    start: tuple[int, ...]
    sizes: tuple[int, ...]
    scale: float

    @property
    def repeated(self) -> tuple[int, ...]:
        """The axes of the value along which the box is repeated."""
        return tuple(
            i
            for i, (axis, size) in enumerate(zip(self.axes, self.sizes, strict=True))
            if axis is None and size != 1
        )

    def overlaps(self, other: "Part") -> bool:
        """Whether two boxes of one leaf have entries in common."""
        return all(
            mine < theirs + their_size and theirs < mine + size
            for mine, size, theirs, their_size in zip(
                self.corner, self.box, other.corner, other.box, strict=True
            )
        )


Parts = tuple[Part, ...]


def find(function: TappedFunction) -> dict[_compat.Var, Parts]:
    """The parts of values that meet data, of those that are made by placing entries."""
    roots = _roots(function)
    found: dict[_compat.Var, Parts] = {}
    for i, root in enumerate(roots):
        shape, origin = root.aval.shape, (0,) * root.aval.ndim
        axes = tuple(range(root.aval.ndim))
        found[root] = (Part(i, origin, shape, None, axes, origin, shape, 1.0),)
    for equation in function.unbatched_equations:
        if any(variable in found for variable in equation.outvars):
            continue
        follow = _FOLLOW.get(equation.primitive)
        kinds = [function.side(atom) for atom in equation.invars]
        if follow is None or Side.PARAMETER not in kinds:
            continue
        operands = [
            None if kind == Side.CONSTANT else found.get(atom)
            for kind, atom in zip(kinds, equation.invars, strict=True)
        ]
        known = [
            kind == Side.CONSTANT or operand is not None
            for kind, operand in zip(kinds, operands, strict=True)
        ]
        if not all(known):
            continue
        results = follow(equation, operands)
        if results is not None:
            found.update(zip(equation.outvars, results, strict=True))
    met = _met(function) & found.keys()
    return {v: found[v] for v in met if _is_whole(function, v, found[v])}


def _met(function: TappedFunction) -> set[Any]:
    """The values that meet data."""
    return {
        tap.operands[i].variable
        for tap in function.taps
        for i in tap.parameter_positions
    }


def _is_whole(function: TappedFunction, variable: Any, parts: Parts) -> bool:
    """Whether a value's parts speak of every leaf that reaches it.

    Else one was cut off on the way; no norm is to rest on that.
    """
    reached, _ = function.parameter_side([variable])
    return set(reached) == {part.leaf for part in parts}


def _roots(function: TappedFunction) -> list[Any]:
    """For each leaf, the value to count from: the leaf, reshaped if all uses are."""
    uses: dict[_compat.Var, list[Any]] = {}
    for equation in function.unbatched_equations:
        for atom in equation.invars:
            if isinstance(atom, _compat.Var):
                uses.setdefault(atom, []).append(equation)
    met = _met(function)
    roots = []
    for leaf in function.leaves:
        root: Any = leaf
        while root not in met and len(uses.get(root, ())) == 1:
            (equation,) = uses[root]
            if not _is_one_to_one(equation):
                break
            (root,) = equation.outvars
        roots.append(root)
    return roots


def _is_one_to_one(equation: _compat.Equation) -> bool:
    if equation.primitive in (p.convert_element_type_p, p.copy_p):
        return _stays_real(equation)
    if equation.primitive is p.broadcast_in_dim_p:
        return _size(equation.invars[0]) == _size(equation.outvars[0])
    return equation.primitive in (p.reshape_p, p.squeeze_p, p.transpose_p)


def _stays_real(equation: _compat.Equation) -> bool:
    dtypes = [atom.aval.dtype for atom in (*equation.invars, *equation.outvars)]
    return all(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes)


def _size(atom: _compat.Atom) -> int:
    return math.prod(atom.aval.shape)


_Operands = Sequence[Parts | None]
_Results = Sequence[Parts] | None


def _same(equation: _compat.Equation, operands: _Operands) -> _Results:
    (parts,) = operands
    return [parts] if parts is not None and _stays_real(equation) else None


def _transposed(equation: _compat.Equation, operands: _Operands) -> _Results:
    permutation = equation.params["permutation"]
    return [tuple(_with_axes(part, permutation) for part in operands[0] or ())]


def _with_axes(part: Part, kept: Sequence[int | None]) -> Part:
    """The part of a value whose axes are those of another, or new ones of size one."""

    def pick(values: tuple[Any, ...], new: Any) -> tuple[Any, ...]:
        return tuple(new if i is None else values[i] for i in kept)

    return part._replace(
        axes=pick(part.axes, None),
        start=pick(part.start, 0),
        sizes=pick(part.sizes, 1),
    )


def _reshaped(equation: _compat.Equation, operands: _Operands) -> _Results:
    (source,), (result,) = equation.invars[:1], equation.outvars
    parts = operands[0] or ()
    if any(operand is not None for operand in operands[1:]):
        return None
    if _size(source) != _size(result):
        return None
    kept = _kept_axes(source.aval.shape, result.aval.shape)
    if kept is not None:
        return [tuple(_with_axes(part, kept) for part in parts)]
    return _viewed(equation, parts, ("reshape", result.aval.shape))


def _broadcast(equation: _compat.Equation, operands: _Operands) -> _Results:
    source, shape = equation.invars[0].aval, equation.outvars[0].aval.shape
    if math.prod(source.shape) == math.prod(shape):
        return _reshaped(equation, operands)
    dimensions = equation.params["broadcast_dimensions"]
    behind = dict(zip(dimensions, range(source.ndim), strict=True))
    kept = [
        behind[j] if j in behind and source.shape[behind[j]] == size else None
        for j, size in enumerate(shape)
    ]
    repeated = [_with_axes(part, kept) for part in operands[0] or ()]
    sizes = [1 if i is not None else size for i, size in zip(kept, shape, strict=True)]
    return [
        tuple(
            part._replace(
                sizes=tuple(a * b for a, b in zip(part.sizes, sizes, strict=True))
            )
            for part in repeated
        )
    ]


def _kept_axes(
    before: Sequence[int], after: Sequence[int]
) -> tuple[int | None, ...] | None:
    """For each axis after, the axis before, if only axes of size one came or went."""
    long_before = [i for i, size in enumerate(before) if size != 1]
    if [before[i] for i in long_before] != [size for size in after if size != 1]:
        return None
    rest = iter(long_before)
    return tuple(None if size == 1 else next(rest) for size in after)


def _viewed(equation: _compat.Equation, parts: Parts, how: Any) -> _Results:
    """A value that holds one part and nothing else, under new axes."""
    (result,) = equation.outvars
    if len(parts) != 1 or parts[0].sizes != equation.invars[0].aval.shape:
        return None
    (part,) = parts
    if part.repeated:
        return None
    shape = result.aval.shape
    return [
        (
            part._replace(
                view=(part.view, part.axes, how),
                axes=tuple(range(len(shape))),
                start=(0,) * len(shape),
                sizes=shape,
            ),
        )
    ]


def _reversed(equation: _compat.Equation, operands: _Operands) -> _Results:
    how = ("rev", equation.params["dimensions"])
    return _viewed(equation, operands[0] or (), how)


def _sliced(equation: _compat.Equation, operands: _Operands) -> _Results:
    parameters = equation.params
    if any(stride != 1 for stride in parameters["strides"] or ()):
        return None
    starts, limits = parameters["start_indices"], parameters["limit_indices"]
    parts = _cut_all(operands[0] or (), starts, limits)
    return None if parts is None else [parts]


def _dynamically_sliced(equation: _compat.Equation, operands: _Operands) -> _Results:
    starts = equation.invars[1:]
    if not all(isinstance(start, _compat.Literal) for start in starts):
        return None
    sizes = equation.params["slice_sizes"]
    shape = equation.invars[0].aval.shape
    begins = [
        int(np.clip(int(start.val), 0, whole - size))
        for start, whole, size in zip(starts, shape, sizes, strict=True)
    ]
    ends = [begin + size for begin, size in zip(begins, sizes, strict=True)]
    parts = _cut_all(operands[0] or (), begins, ends)
    return None if parts is None else [parts]


def _cut_all(
    parts: Parts, starts: Sequence[int], limits: Sequence[int]
) -> Parts | None:
    """What is left of parts between indices of the value, counted from there."""
    left = []
    for part in parts:
        low = [max(s, a) for s, a in zip(part.start, starts, strict=True)]
        high = [
            min(s + n, b)
            for s, n, b in zip(part.start, part.sizes, limits, strict=True)
        ]
        if any(a >= b for a, b in zip(low, high, strict=True)):
            continue
        corner, box = list(part.corner), list(part.box)
        for i, axis in enumerate(part.axes):
            size = high[i] - low[i]
            if size == part.sizes[i]:
                continue
            if axis is None or part.view is not None:
                return None
            corner[axis] += low[i] - part.start[i]
            box[axis] = size
        left.append(
            part._replace(
                corner=tuple(corner),
                box=tuple(box),
                start=tuple(a - s for a, s in zip(low, starts, strict=True)),
                sizes=tuple(b - a for a, b in zip(low, high, strict=True)),
            )
        )
    return tuple(left)


def _split(equation: _compat.Equation, operands: _Operands) -> _Results:
    axis, sizes = equation.params["axis"], equation.params["sizes"]
    shape = list(equation.invars[0].aval.shape)
    results, begin = [], 0
    for size in sizes:
        starts, limits = [0] * len(shape), list(shape)
        starts[axis], limits[axis] = begin, begin + size
        parts = _cut_all(operands[0] or (), starts, limits)
        if parts is None:
            return None
        results.append(parts)
        begin += size
    return results


def _concatenated(equation: _compat.Equation, operands: _Operands) -> _Results:
    axis, begin = equation.params["dimension"], 0
    parts: list[Part] = []
    for atom, operand in zip(equation.invars, operands, strict=True):
        offset = [0] * atom.aval.ndim
        offset[axis] = begin
        parts.extend(_moved(part, offset) for part in operand or ())
        begin += atom.aval.shape[axis]
    return [tuple(parts)]


def _padded(equation: _compat.Equation, operands: _Operands) -> _Results:
    config = equation.params["padding_config"]
    is_cut = any(min(low, high) < 0 or interior for low, high, interior in config)
    if operands[0] is None or operands[1] is not None or is_cut:
        return None
    return [tuple(_moved(part, [low for low, _, _ in config]) for part in operands[0])]


def _moved(part: Part, offset: Sequence[int]) -> Part:
    return part._replace(
        start=tuple(a + b for a, b in zip(part.start, offset, strict=True))
    )


def _summed(equation: _compat.Equation, operands: _Operands) -> _Results:
    """The sum of a value and a constant: a frozen weight and what is trained."""
    (result,) = equation.outvars
    found = [
        (parts, atom)
        for parts, atom in zip(operands, equation.invars, strict=True)
        if parts is not None
    ]
    if len(found) != 1 or not _stays_real(equation):
        return None
    parts, atom = found[0]
    if atom.aval.shape != result.aval.shape:
        return None
    is_subtracted = equation.primitive is p.sub_p and atom is equation.invars[1]
    return [_scaled_by(parts, -1.0 if is_subtracted else 1.0)]


def _scaled(equation: _compat.Equation, operands: _Operands) -> _Results:
    """The product with, or quotient by, a number known when tracing."""
    (result,) = equation.outvars
    if not _stays_real(equation):
        return None
    position = 0 if operands[0] is not None else 1
    parts, other = operands[position], equation.invars[1 - position]
    is_quotient = equation.primitive is p.div_p
    if not isinstance(other, _compat.Literal) or (is_quotient and position == 1):
        return None
    if parts is None or equation.invars[position].aval.shape != result.aval.shape:
        return None
    number = float(other.val)
    if not math.isfinite(number) or number == 0:
        return None
    return [_scaled_by(parts, 1 / number if is_quotient else number)]


def _negated(equation: _compat.Equation, operands: _Operands) -> _Results:
    return [_scaled_by(operands[0] or (), -1.0)]


def _scaled_by(parts: Parts, number: float) -> Parts:
    return tuple(part._replace(scale=part.scale * number) for part in parts)


_FOLLOW: Mapping[Any, Callable[[_compat.Equation, _Operands], _Results]] = {
    p.add_p: _summed,
    p.broadcast_in_dim_p: _broadcast,
    p.concatenate_p: _concatenated,
    p.convert_element_type_p: _same,
    p.copy_p: _same,
    p.div_p: _scaled,
    p.dynamic_slice_p: _dynamically_sliced,
    p.mul_p: _scaled,
    p.neg_p: _negated,
    p.pad_p: _padded,
    p.reshape_p: _reshaped,
    p.rev_p: _reversed,
    p.slice_p: _sliced,
    jax.lax.split_p: _split,
    p.squeeze_p: _reshaped,
    p.sub_p: _summed,
    p.transpose_p: _transposed,
}
