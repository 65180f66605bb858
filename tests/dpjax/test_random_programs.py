"""Random small programs: every method against float64 per-example gradients.

A program is a list of steps that each map a state h of shape (1, T, D) to another, with
weights drawn from a small pool, so that sharing, slicing and transposing happen by
themselves. A step may be a program of its own inside a loop, a branch or a remat, and
so on inward. Set DPJAX_RANDOM_PROGRAMS to a number for that many new programs; without
it the same few are run every time.
"""

import functools
import os
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np

from dpjax import clipped_grad

METHODS = ("bookkeeping", "reweight", "vmap")
B, T, D = 4, 3, 4
NUM_PROGRAMS = int(os.environ.get("DPJAX_RANDOM_PROGRAMS", "0"))
EXACT = 2e-5
# bfloat16 keeps 8 bits; casts meet different sums in different methods.
ROUNDED = 5e-2


def _normal(seed, *shape, scale=1.0):
    values = np.random.default_rng(seed).standard_normal(shape)
    return (scale * values).astype(np.float32)


def _pool():
    """Three of each kind of parameter, which the steps pick by index."""
    return {
        "matrix": [_normal(i, D, D, scale=0.6) for i in range(3)],
        "wide": [_normal(10 + i, D, 2 * D, scale=0.6) for i in range(3)],
        "heads": [_normal(20 + i, 2, D // 2, D // 2) for i in range(3)],
        "kernel": [_normal(30 + i, 2, D, D, scale=0.4) for i in range(3)],
        "grouped": [_normal(40 + i, 3, D // 2, D, scale=0.5) for i in range(3)],
        "row": [_normal(50 + i, D) for i in range(3)],
        "position": [_normal(60 + i, T, D) for i in range(3)],
        "scalar": [_normal(70 + i) + np.float32(1) for i in range(3)],
        "mixing": [_normal(90 + i, T, T, scale=0.6) for i in range(3)],
        "by_position": [_normal(100 + i, T, D, D, scale=0.6) for i in range(3)],
        # Weights of two layers each, to be scanned over.
        "layers": {
            "matrix": _normal(110, 2, D, D, scale=0.6),
            "row": _normal(111, 2, D),
            "kernel": _normal(112, 2, 2, D, D, scale=0.4),
        },
    }


# Steps: (parameters, index into the pool, choice among variants, state) -> state.


def _dense(p, i, variant, h):
    w = p["matrix"][i]
    return h @ (w.T if variant % 2 else w)


def _dense_from_the_left(p, i, variant, h):
    return jnp.einsum("ed,btd->bte", p["matrix"][i], h)


def _bias(p, i, variant, h):
    return h + (p["row"][i][None, None] if variant % 2 else p["position"][i][None])


def _scale(p, i, variant, h):
    factors = (p["row"][i][None, None], p["position"][i][None], p["scalar"][i])
    return h * factors[variant % 3]


def _heads(p, i, variant, h):
    split = h.reshape(1, T, 2, D // 2)
    return jnp.einsum("bthd,hde->bthe", split, p["heads"][i]).reshape(h.shape)


def _conv(p, i, variant, h):
    return jax.lax.conv_general_dilated(
        h,
        p["kernel"][i],
        (1,),
        "SAME",
        rhs_dilation=(1 + variant % 2,),
        dimension_numbers=("NWC", "WIO", "NWC"),
    )


def _grouped_conv(p, i, variant, h):
    return jax.lax.conv_general_dilated(
        h,
        p["grouped"][i],
        (1,),
        "SAME",
        dimension_numbers=("NWC", "WIO", "NWC"),
        feature_group_count=2,
    )


def _sliced_weight(p, i, variant, h):
    return h @ p["wide"][i][:, variant : variant + D]


def _rows_of_a_weight(p, i, variant, h):
    """The first rows of a matrix as the last ones of another."""
    w = jnp.concatenate([p["matrix"][(i + 1) % 3][1:], p["matrix"][i][:1]])
    return h @ w


def _product_of_weights(p, i, variant, h):
    return h @ (p["matrix"][i] @ p["matrix"][variant % 3])


def _concatenation_of_weights(p, i, variant, h):
    """Two leaves side by side in one product, of which a part is kept."""
    w = jnp.concatenate([p["matrix"][i], p["matrix"][(i + 1) % 3].T], axis=1)
    return (h @ w)[..., variant : variant + D]


def _strided_slice_of_a_weight(p, i, variant, h):
    return h @ p["wide"][i][:, variant % 2 :: 2][::-1]


def _slice_at_an_index_from_the_data(p, i, variant, h):
    start = (h[0, 0, 0] > 0).astype(jnp.int32) * (1 + variant)
    return h @ jax.lax.dynamic_slice(p["wide"][i], (0 * start, start), (D, D))


def _einsum(p, i, variant, h):
    formula, kind = (
        ("tk,btd->bkd", "mixing"),
        ("btd,kt->bkd", "mixing"),
        ("btd,tde->bte", "by_position"),
        ("btd,ked->bke", "by_position"),
    )[variant]
    operands = (p[kind][i], h) if formula.startswith("tk") else (h, p[kind][i])
    return jnp.einsum(formula, *operands)


def _prompt(p, i, variant, h):
    """Rows of a parameter before those of the data, seen by attention."""
    keys = jnp.concatenate([p["position"][i][None, : 1 + variant % 2], h], axis=1)
    return jax.nn.softmax(jnp.einsum("btd,bsd->bts", h, keys)) @ keys


def _tied_table(p, i, variant, h):
    """A lookup and a soft lookup in one table."""
    table = p["matrix"][i]
    ids = jnp.argmax(h[..., : D - variant % 2], axis=-1)
    return table[ids] + jax.nn.softmax(h @ table.T) @ table


def _tanh(p, i, variant, h):
    return jnp.tanh(h)


def _attention(p, i, variant, h):
    scores = jax.nn.softmax(jnp.einsum("btd,bsd->bts", h @ p["matrix"][i], h))
    return scores @ h


def _scan(p, i, variant, h):
    """A recurrent net over the T rows of the state."""

    def step(carry_1xD, row_1xD):
        carry_1xD = jnp.tanh(row_1xD + carry_1xD @ p["matrix"][i])
        return carry_1xD, carry_1xD

    start = p["row"][i][None] if variant % 2 else jnp.zeros_like(h[:, 0])
    _, rows = jax.lax.scan(step, start, h.swapaxes(0, 1), reverse=variant > 1)
    return rows.swapaxes(0, 1)


def _scan_over_weights(p, i, variant, h):
    stacked = jnp.stack([p["matrix"][i], p["matrix"][variant % 3]])
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, stacked)[0]


def _cond(p, i, variant, h):
    return jax.lax.cond(
        jnp.sum(h) > 0,
        lambda h: h @ p["matrix"][i],
        lambda h: h * p["row"][i][None, None],
        h,
    )


def _where(p, i, variant, h):
    return jnp.where(h > 0, h, p["position"][i][None])


def _remat(p, i, variant, h):
    return jax.checkpoint(lambda h: jnp.tanh(h @ p["matrix"][i]))(h)


def _jit(p, i, variant, h):
    return jax.jit(lambda w, h: jnp.sin(h @ w))(p["matrix"][i], h)


def _cast(p, i, variant, h):
    if variant % 2:
        return h @ p["matrix"][i].astype(jnp.bfloat16).astype(h.dtype)
    half = h.astype(jnp.bfloat16) @ p["matrix"][i].astype(jnp.bfloat16)
    return half.astype(h.dtype)


def _norm(p, i, variant, h):
    scale = jax.lax.rsqrt(jnp.mean(h**2, axis=-1, keepdims=True) + 0.1)
    return h * scale * p["row"][i][None, None]


def _weight_norm(p, i, variant, h):
    w = p["matrix"][i]
    return h @ (w / jnp.sqrt(jnp.sum(w**2, axis=0, keepdims=True)))


def _gather(p, i, variant, h):
    """The data chooses which rows of a weight to add."""
    ids = jnp.clip(jnp.round(3 * h[..., 0]), -1, D).astype(jnp.int32)
    return h + p["matrix"][i][jax.lax.stop_gradient(ids)]


STEPS = (
    _dense,
    _dense_from_the_left,
    _bias,
    _scale,
    _heads,
    _conv,
    _grouped_conv,
    _sliced_weight,
    _rows_of_a_weight,
    _product_of_weights,
    _concatenation_of_weights,
    _strided_slice_of_a_weight,
    _slice_at_an_index_from_the_data,
    _einsum,
    _prompt,
    _tied_table,
    _tanh,
    _attention,
    _scan,
    _scan_over_weights,
    _cond,
    _where,
    _remat,
    _jit,
    _cast,
    _norm,
    _weight_norm,
    _gather,
)

# Forms around a program: (parameters, variant, state -> state, state) -> state. The
# program takes its parameters, so that a form may give it others.


def _repeated(p, variant, run, h):
    """Weights that the body closes over: the same at every step."""

    def body(h, scale):
        return jnp.tanh(run(p, h) * scale), None

    scales = jnp.linspace(0.7, 1.3, 2, dtype=h.dtype)
    return jax.lax.scan(body, h, scales, reverse=variant % 2 == 1)[0]


def _over_layers(p, variant, run, h):
    """Weights that are scanned over, beside others that the body closes over."""

    def body(h, layer):
        own = {kind: [weight] * 3 for kind, weight in layer.items()}
        return jnp.tanh(run(p | own, h)), None

    return jax.lax.scan(body, h, p["layers"], unroll=1 + variant % 2)[0]


def _recurrent(p, variant, run, h):
    """The carry is added to each row; what comes out is stacked."""

    def body(carry_1xD, row_1xD):
        rows = jnp.broadcast_to(carry_1xD + row_1xD, (T, D))[None]
        carry_1xD = jnp.tanh(run(p, rows)).mean(axis=1)
        return carry_1xD, carry_1xD

    start = jnp.zeros_like(h[:, 0]) if variant % 2 else p["row"][0][None]
    return jax.lax.scan(body, start, h.swapaxes(0, 1))[1].swapaxes(0, 1)


def _rematerialised(p, variant, run, h):
    return jax.checkpoint(run)(p, h)


def _compiled(p, variant, run, h):
    return jax.jit(run)(p, h)


def _branch(p, variant, run, h):
    return jax.lax.cond(jnp.sum(h) > 0, lambda h: run(p, h), jnp.tanh, h)


def _counted(p, variant, run, h):
    return jax.lax.fori_loop(0, 2, lambda _, h: jnp.tanh(run(p, h)), h)


FORMS = (
    _repeated,
    _over_layers,
    _recurrent,
    _rematerialised,
    _compiled,
    _branch,
    _counted,
)

_plain = st.tuples(
    st.sampled_from(STEPS), st.integers(0, 2), st.integers(0, 3), st.booleans()
)
_step = st.recursive(
    _plain,
    lambda inner: st.tuples(
        st.sampled_from(FORMS),
        st.lists(inner, min_size=1, max_size=2),
        st.integers(0, 3),
        st.booleans(),
    ),
    max_leaves=4,
)
programs = st.lists(_step, min_size=1, max_size=3)


def _run(program, params, h):
    for step, index_or_program, variant, residual in program:
        if step in FORMS:
            run = functools.partial(_run, index_or_program)
            new = step(params, variant, run, h)
        else:
            new = step(params, index_or_program, variant, h)
        h = h + new if residual else new
    return h


def _has_casts(program):
    return any(
        _has_casts(inner) if step in FORMS else step is _cast
        for step, inner, *_ in program
    )


def _loss(program, params, x, y):
    h = _run(program, params, x)
    penalty = sum(jnp.sum(w**2) for w in params["matrix"][:1])
    return 0.5 * jnp.sum((jnp.tanh(h) - y) ** 2) + 0.01 * penalty


# Compiling is most of the time of these tests, and the numbers do not depend on it.
_COMPILER_OPTIONS: dict[str, Any] = {"xla_backend_optimization_level": 0}
if jax.__version_info__ < (0, 11):  # Gone from later releases; halves the time.
    _COMPILER_OPTIONS["xla_cpu_use_fusion_emitters"] = False
_quick_jit = functools.partial(jax.jit, compiler_options=_COMPILER_OPTIONS)


def _check(fun, params, tolerance, float64_reference, assert_clipped_sum):
    """Compares all methods, compiled at once, with the reference.

    Some programs are so sensitive that float32 gradients by JAX itself, which the
    method "vmap" takes, are off by more than the tolerance; others may then be too.
    """
    sizes = np.linspace(0.3, 1.5, B, dtype=np.float32).reshape(B, 1, 1)
    batch = (_normal(80, B, T, D) * sizes, _normal(81, B, T, D))
    reference = float64_reference(fun, params, batch)
    grad_fns = {
        method: clipped_grad(
            fun,
            l2_clip_norm=reference.clip_norm,
            batch_argnums=(1, 2),
            return_grad_norms=True,
            method=method,
        )
        for method in METHODS
    }
    results = _quick_jit(lambda *args: {m: f(*args) for m, f in grad_fns.items()})(
        params, *batch
    )
    by_jax = results["vmap"][1].grad_norms
    off = np.max(np.abs(by_jax - reference.norms_B) / (reference.norms_B + 1e-30))
    tolerance = max(tolerance, min(4 * off, 1e-3))
    for method, (clipped_sum, aux) in results.items():
        hypothesis.note(method)
        np.testing.assert_allclose(aux.grad_norms, reference.norms_B, rtol=tolerance)
        assert_clipped_sum(clipped_sum, reference, tolerance)


# Shrinking compiles hundreds of programs: left to searches that somebody waits for.
_PHASES = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
if NUM_PROGRAMS:
    _PHASES.append(hypothesis.Phase.shrink)


@hypothesis.settings(
    max_examples=NUM_PROGRAMS or 10,
    derandomize=not NUM_PROGRAMS,
    database=None,
    phases=_PHASES,
    suppress_health_check=list(hypothesis.HealthCheck),
)
@hypothesis.given(program=programs)
def test_random_programs(program, float64_reference, assert_clipped_sum):
    fun = functools.partial(_loss, program)
    tolerance = ROUNDED if _has_casts(program) else EXACT
    _check(fun, _pool(), tolerance, float64_reference, assert_clipped_sum)


# Ways of a leaf to a product: (variant, array) -> array, for arrays of any shape.


def _axis(variant, w):
    return variant % w.ndim


def _reversed_axes(variant, w):
    return w.T


def _swapped_axes(variant, w):
    return jnp.swapaxes(w, 0, _axis(variant, w))


def _without_first(variant, w):
    axis = _axis(variant, w)
    return jax.lax.slice_in_dim(w, min(1, w.shape[axis] - 1), None, axis=axis)


def _every_second(variant, w):
    return jax.lax.slice_in_dim(w, 0, None, 2, axis=_axis(variant, w))


def _flipped(variant, w):
    return jnp.flip(w, _axis(variant, w))


def _one_axis_more(variant, w):
    axis = _axis(variant, w)
    size = w.shape[axis]
    parts = 2 if size % 2 == 0 else 1
    return w.reshape(*w.shape[:axis], parts, size // parts, *w.shape[axis + 1 :])


def _last_axes_joined(variant, w):
    return w.reshape(*w.shape[:-2], -1)


def _one_entry(variant, w):
    axis = _axis(variant, w)
    return w if w.ndim < 3 else jax.lax.index_in_dim(w, 0, axis, keepdims=False)


def _padded(variant, w):
    widths = [(0, 0)] * w.ndim
    widths[_axis(variant, w)] = (variant // 2, 1)
    return jnp.pad(w, widths)


def _beside_its_mirror(variant, w):
    return jnp.concatenate([w, jnp.flip(w, 0)], axis=_axis(variant, w))


def _halves_exchanged(variant, w):
    return jnp.roll(w, variant, axis=_axis(variant, w))


def _scaled(variant, w):
    return w * (-1.0, 0.5, 2.0, -3.0)[variant]


def _negated(variant, w):
    return -w


def _masked(variant, w):
    axis = _axis(variant, w)
    mask = (jnp.arange(w.shape[axis]) % 2 == variant % 2).astype(w.dtype)
    return w * jnp.expand_dims(mask, [i for i in range(w.ndim) if i != axis])


def _accumulated(variant, w):
    return jnp.cumsum(w, axis=_axis(variant, w))


TURNS = (
    _reversed_axes,
    _swapped_axes,
    _without_first,
    _every_second,
    _flipped,
    _one_axis_more,
    _last_axes_joined,
    _one_entry,
    _padded,
    _beside_its_mirror,
    _halves_exchanged,
    _scaled,
    _negated,
    _masked,
    _accumulated,
)


# Uses of what came out of the way: (array, state) -> state.


def _features(h, width):
    """As many numbers of each row as a weight has rows."""
    return jnp.sin(h @ jnp.asarray(_normal(width, D, width, scale=0.5), h.dtype))


def _rejoined(y):
    """Rows of any width, as rows of D."""
    width = y.shape[-1]
    back = _normal(width, width, D, scale=width**-0.5)
    return jnp.tanh(y) @ jnp.asarray(back, y.dtype)


def _as_matrix(w):
    return w.reshape(w.shape[0], -1)


def _multiply(w, h):
    w = _as_matrix(w)
    return _rejoined(_features(h, w.shape[0]) @ w)


def _multiply_by_transpose(w, h):
    return _multiply(_as_matrix(w).T, h)


def _as_stack(w):
    return w.reshape(*w.shape[:2], -1) if w.ndim > 2 else w.reshape(w.shape[0], 1, -1)


def _multiply_in_groups(w, h):
    w = _as_stack(w)
    x = _features(h, w.shape[0] * w.shape[1]).reshape(1, T, *w.shape[:2])
    return _rejoined(jnp.einsum("btgd,gde->btge", x, w).reshape(1, T, -1))


def _look_up(w, h):
    w = _as_matrix(w)
    ids = jnp.argmax(_features(h, w.shape[0]), axis=-1)
    return _rejoined(w[ids])


def _multiply_at_every_step(w, h):
    w = _as_matrix(w)

    def body(carry, _):
        return _rejoined(_features(carry, w.shape[0]) @ w), None

    return jax.lax.scan(body, h, None, length=2)[0]


def _scan_over_first_axis(w, h):
    def body(carry, layer):
        return _rejoined(_features(carry, layer.shape[0]) @ layer), None

    return jax.lax.scan(body, h, _as_stack(w))[0]


def _add(w, h):
    return h + _as_matrix(w)[0].mean() * jnp.cos(h)


WAYS_OF_USE = (
    _multiply,
    _multiply_by_transpose,
    _multiply_in_groups,
    _look_up,
    _multiply_at_every_step,
    _scan_over_first_axis,
    _add,
)

_way = st.lists(
    st.tuples(st.sampled_from(TURNS), st.integers(0, 3)), min_size=0, max_size=4
)
_uses = st.lists(
    st.tuples(_way, st.booleans(), st.sampled_from(WAYS_OF_USE)), min_size=1, max_size=3
)


def _loss_of_uses(uses, params, x, y):
    h = x
    for way, is_second, use in uses:
        w = params["second" if is_second else "first"]
        for turn, variant in way:
            w = turn(variant, w)
        h = h + use(w, h)
    return 0.5 * jnp.sum((jnp.tanh(h) - y) ** 2)


@hypothesis.settings(
    max_examples=NUM_PROGRAMS or 12,
    derandomize=not NUM_PROGRAMS,
    database=None,
    phases=_PHASES,
    suppress_health_check=list(hypothesis.HealthCheck),
)
@hypothesis.given(uses=_uses)
def test_random_ways_to_a_product(uses, float64_reference, assert_clipped_sum):
    """One leaf or two, cut, turned and joined on their ways to several uses."""
    params = {"first": _normal(0, 6, 8), "second": _normal(1, 2, 4, 6)}
    fun = functools.partial(_loss_of_uses, uses)
    _check(fun, params, EXACT, float64_reference, assert_clipped_sum)
