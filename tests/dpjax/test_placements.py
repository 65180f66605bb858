"""Placements: which box of which leaf each entry of a value comes from."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import normal_form, placements
from dpjax.placements import Part
from dpjax.tapped_function import TappedFunction


def _parts(make, *shapes):
    """The parts of `make(*leaves)`, or None; each leaf is also used as it is.

    With a use of its own, a leaf is what its parts are counted from.
    """
    leaves = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    scalar = jax.ShapeDtypeStruct((), jnp.float32)

    def fun(*inputs):
        *leaves, anchor, x = inputs
        alone = [jnp.sum(jnp.sin(leaf + x)) for leaf in leaves]
        return [sum(alone, anchor) + jnp.sum(jnp.cos(make(*leaves) + x))]

    closed = normal_form.trace(fun, [*leaves, scalar, scalar], len(leaves))
    function = TappedFunction(closed, len(leaves))
    found = placements.find(function)
    (last,) = function.taps[-1].parameter_positions
    return found.get(function.taps[-1].operands[last].variable)


def _whole(shape, leaf=0, scale=1.0):
    origin, axes = (0,) * len(shape), tuple(range(len(shape)))
    return Part(leaf, origin, shape, None, axes, origin, shape, scale)


def test_a_leaf_is_one_part():
    assert _parts(lambda w: w * 1.0, (2, 3)) == (_whole((2, 3)),)


def test_slices_are_boxes():
    (part,) = _parts(lambda w: w[1:3, 2:], (4, 5))
    assert part == _whole((2, 3))._replace(corner=(1, 2))
    # A start beyond the end is moved back, as JAX does.
    (part,) = _parts(lambda w: jax.lax.dynamic_slice(w, (9, 1), (2, 3)), (4, 5))
    assert part == _whole((2, 3))._replace(corner=(2, 1))


@pytest.mark.parametrize("index", [0, 1, 2])
def test_splits_are_boxes(index):
    (part,) = _parts(lambda w: jnp.split(w, (1, 4), axis=1)[index], (2, 6))
    size, begin = (1, 3, 2)[index], (0, 1, 4)[index]
    assert part == _whole((2, size))._replace(corner=(0, begin))


def test_concatenations_hold_several_parts():
    first, constant, second = 2, 1, 3
    parts = _parts(
        lambda v, w: jnp.concatenate([v, jnp.ones((constant, 4)), w]),
        (first, 4),
        (second, 4),
    )
    assert parts == (
        _whole((first, 4)),
        _whole((second, 4), leaf=1)._replace(start=(first + constant, 0)),
    )


def test_transposes_turn_axes():
    (part,) = _parts(lambda w: w.transpose(2, 0, 1), (2, 3, 4))
    assert part == _whole((2, 3, 4))._replace(axes=(2, 0, 1), sizes=(4, 2, 3))


def test_axes_of_size_one_come_and_go():
    (part,) = _parts(lambda w: w[:, None, :, 0], (2, 3, 1))
    assert part.view is None
    assert (part.axes, part.sizes) == ((0, None, 1), (2, 1, 3))
    assert part.repeated == ()


def test_reshapes_are_views_of_one_part():
    (part,) = _parts(lambda w: w.reshape(3, 4), (2, 6))
    assert part.view is not None
    assert (part.corner, part.box) == ((0, 0), (2, 6))
    assert (part.axes, part.start, part.sizes) == ((0, 1), (0, 0), (3, 4))
    (other,) = _parts(lambda w: w.reshape(4, 3), (2, 6))
    assert other.view != part.view
    two = _parts(lambda w: jnp.concatenate([w, w]).reshape(4, 6), (2, 6))
    assert two is not None  # The shape is as before.
    assert _parts(lambda w: jnp.concatenate([w, w]).reshape(6, 4), (2, 6)) is None


def test_no_parts_where_a_leaf_is_cut_off():
    def padding(w):
        return jnp.pad(w, ((0, 4), (0, 0)))[2:]

    assert _parts(padding, (2, 3)) is None
    assert _parts(lambda w: padding(w).reshape(3, 4), (2, 3)) is None


def test_pads_move():
    (part,) = _parts(lambda w: jnp.pad(w, ((1, 2), (0, 3))), (2, 3))
    assert part == _whole((2, 3))._replace(start=(1, 0))
    interior = [(0, 0, 1), (0, 0, 0)]
    assert _parts(lambda w: jax.lax.pad(w, jnp.float32(0), interior), (2, 3)) is None
    cropped = [(-1, 0, 0), (0, 0, 0)]
    assert _parts(lambda w: jax.lax.pad(w, jnp.float32(0), cropped), (2, 3)) is None


@pytest.mark.parametrize(
    ("make", "scale"),
    [
        (lambda w: 3.0 * w, 3.0),
        (lambda w: w / 4.0, 0.25),
        (lambda w: -w, -1.0),
        (lambda w: -(2.0 * w) * 3.0, -6.0),
        (lambda w: w + jnp.ones(3), 1.0),
        (lambda w: jnp.ones(3) - w, -1.0),
        (lambda w: w - jnp.ones(3), 1.0),
    ],
)
def test_scales_are_known_numbers(make, scale):
    assert _parts(make, (3,)) == (_whole((3,), scale=scale),)


@pytest.mark.parametrize(
    "make",
    [
        lambda w: w * jnp.arange(3.0),
        lambda w: 1.0 / w,
        lambda w: w * 0.0,
        lambda w: w * w,
        lambda w: w + jnp.flip(w),
        lambda w: jnp.exp(w),
        lambda w: w[::2],
        lambda w: jnp.cumsum(w),
    ],
)
def test_what_is_no_placement_has_no_parts(make):
    assert _parts(make, (3,)) is None


def test_broadcasts_repeat():
    (part,) = _parts(lambda w: jnp.broadcast_to(w[:, None], (3, 4)), (3,))
    assert part.repeated == (1,)
    assert (part.axes, part.sizes) == ((0, None), (3, 4))
    (part,) = _parts(lambda w: jnp.broadcast_to(w, (3, 4)), (1, 4))
    assert part.repeated == (0,)
    assert part.box == (1, 4)


def test_a_number_is_repeated_along_all_axes():
    (part,) = _parts(lambda w: jnp.broadcast_to(w, (2, 3)), ())
    assert part.repeated == (0, 1)


@pytest.mark.parametrize(
    ("first", "second", "is_shared"),
    [
        (((0, 0), (2, 2)), ((1, 1), (2, 2)), True),
        (((0, 0), (2, 2)), ((2, 0), (2, 2)), False),
        (((0, 0), (2, 2)), ((0, 2), (2, 2)), False),
        (((0, 0), (4, 4)), ((1, 1), (1, 1)), True),
        (((0, 0), (2, 4)), ((1, 3), (3, 1)), True),
    ],
)
def test_boxes_overlap_if_they_share_an_entry(first, second, is_shared):
    parts = [
        _whole(box)._replace(corner=corner, box=box) for corner, box in (first, second)
    ]
    assert parts[0].overlaps(parts[1]) == is_shared
    assert parts[1].overlaps(parts[0]) == is_shared


def test_a_leaf_is_counted_after_the_reshape_that_all_its_uses_share():
    def fun(w_DHK, anchor, x_D):
        w_DxE = w_DHK.reshape(4, 6)
        return [anchor + jnp.sum(x_D @ w_DxE[:, :2]) + jnp.sum(x_D @ w_DxE[:, 2:])]

    specs = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((4, 2, 3), (), (4,))]
    function = TappedFunction(normal_form.trace(fun, specs, 1), 1)
    found = placements.find(function)
    products = [tap for tap in function.taps if tap.loops == ()]
    parts = [
        found[tap.operands[i].variable]
        for tap in products
        for i in tap.parameter_positions
    ]
    assert [(part.corner, part.box, part.view) for (part,) in parts] == [
        ((0, 0), (4, 2), None),
        ((0, 2), (4, 4), None),
    ]


LEAF_SHAPES = ((2, 3), (2, 2))


@st.composite
def _chains(draw):
    """A function of an array module and leaves that only places entries."""
    steps = []
    shape = (2, 3)

    def add(step):
        steps.append(step)

    for _ in range(draw(st.integers(1, 4))):
        kinds = ["scale", "transpose", "slice", "join", "pad", "reshape", "axis"]
        kind = draw(st.sampled_from([*kinds, "repeat", "constant", "leaf", "flip"]))
        axis = draw(st.integers(0, len(shape) - 1))
        size = shape[axis]
        if kind == "scale":
            number = draw(st.sampled_from([-1.0, 0.5, 3.0]))
            add(lambda xp, x, leaves, number=number: x * number)
        elif kind == "transpose":
            order = draw(st.permutations(range(len(shape))))
            add(lambda xp, x, leaves, order=order: xp.transpose(x, order))
            shape = tuple(shape[i] for i in order)
        elif kind == "slice":
            begin = draw(st.integers(0, size - 1))
            end = draw(st.integers(begin + 1, size))
            index = (slice(None),) * axis + (slice(begin, end),)
            add(lambda xp, x, leaves, index=index: x[index])
            shape = (*shape[:axis], end - begin, *shape[axis + 1 :])
        elif kind == "join":
            cut = draw(st.integers(0, size))

            def step(xp, x, leaves, axis=axis, cut=cut, shape=shape):
                index = (slice(None),) * axis
                tail, head = x[(*index, slice(cut, None))], x[(*index, slice(0, cut))]
                between = xp.ones((*shape[:axis], 1, *shape[axis + 1 :]), xp.float32)
                return xp.concatenate([tail, between, head], axis)

            add(step)
            shape = (*shape[:axis], size + 1, *shape[axis + 1 :])
        elif kind == "pad":
            low, high = draw(st.integers(0, 2)), draw(st.integers(0, 1))
            widths = [(0, 0)] * axis + [(low, high)]
            widths += [(0, 0)] * (len(shape) - len(widths))
            add(lambda xp, x, leaves, widths=widths: xp.pad(x, widths))
            shape = (*shape[:axis], size + low + high, *shape[axis + 1 :])
        elif kind == "reshape":
            count = int(np.prod(shape))
            rows = draw(
                st.sampled_from([i for i in range(1, count + 1) if count % i == 0])
            )
            shape = (rows, count // rows)
            add(lambda xp, x, leaves, shape=shape: xp.reshape(x, shape))
        elif kind == "axis":
            add(lambda xp, x, leaves, axis=axis: xp.expand_dims(x, axis))
            shape = (*shape[:axis], 1, *shape[axis:])
        elif kind == "repeat":
            times = draw(st.integers(2, 3))

            def step(xp, x, leaves, axis=axis, shape=shape, times=times):
                wide = (*shape[:axis], times, *shape[axis:])
                return xp.broadcast_to(xp.expand_dims(x, axis), wide)

            add(step)
            shape = (*shape[:axis], times, *shape[axis:])
        elif kind == "constant":
            add(lambda xp, x, leaves, shape=shape: xp.full(shape, 2.0, xp.float32) - x)
        elif kind == "flip":
            add(lambda xp, x, leaves, axis=axis: xp.flip(x, axis))
        elif kind == "leaf" and len(shape) == 2 and shape[0] == 2:
            add(lambda xp, x, leaves: xp.concatenate([x, leaves[1]], 1))
            shape = (2, shape[1] + 2)

    def chain(xp, *leaves):
        value = leaves[0]
        for step in steps:
            value = step(xp, value, leaves)
        return value

    return chain


def _pulled_back(chain, gradient):
    """The gradients of the leaves; the chain is affine, so differences give them."""
    zeros = [np.zeros(shape, np.float32) for shape in LEAF_SHAPES]
    base = chain(np, *zeros)
    pulled = [np.zeros(shape) for shape in LEAF_SHAPES]
    for leaf, shape in enumerate(LEAF_SHAPES):
        for index in np.ndindex(*shape):
            leaves = [zero.copy() for zero in zeros]
            leaves[leaf][index] = 1
            pulled[leaf][index] = np.sum(gradient * (chain(np, *leaves) - base))
    return pulled


def _piece(part, gradient):
    """A part's share of its box's gradient, with the value's other axes summed."""
    index = tuple(slice(s, s + n) for s, n in zip(part.start, part.sizes, strict=True))
    return part.scale * gradient[index].sum(axis=part.repeated, keepdims=True)


@hypothesis.settings(max_examples=150)
@hypothesis.given(_chains(), st.integers(0, 2**32 - 1))
def test_parts_give_the_norm_of_the_pulled_back_gradient(chain, seed):
    parts = _parts(lambda *leaves: chain(jnp, *leaves), *LEAF_SHAPES)
    hypothesis.assume(parts is not None)
    shape = chain(np, *(np.zeros(s, np.float32) for s in LEAF_SHAPES)).shape
    gradient = np.random.default_rng(seed).normal(size=shape)
    pulled = _pulled_back(chain, gradient)
    for leaf, expected in enumerate(pulled):
        mine = [part for part in parts if part.leaf == leaf]
        is_disjoint = not any(
            part.overlaps(other) for i, part in enumerate(mine) for other in mine[:i]
        )
        norm = sum(np.sum(_piece(part, gradient) ** 2) for part in mine)
        if is_disjoint:
            np.testing.assert_allclose(norm, np.sum(expected**2), rtol=1e-6)
        if any(part.view is not None for part in mine):
            continue
        # Entry by entry, overlapping or not.
        total = np.zeros(LEAF_SHAPES[leaf])
        for part in mine:
            order = [part.axes.index(i) for i in range(len(part.box)) if i in part.axes]
            piece = _piece(part, gradient)
            rest = [i for i in range(piece.ndim) if i not in order]
            piece = piece.transpose(*order, *rest).reshape(part.box)
            index = tuple(
                slice(c, c + n) for c, n in zip(part.corner, part.box, strict=True)
            )
            total[index] += piece
        np.testing.assert_allclose(total, expected, rtol=1e-6, atol=1e-6)
