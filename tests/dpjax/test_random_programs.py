"""Random small programs: every method against float64 per-example gradients.

A program is a list of steps that each map a state h of shape (1, T, D) to another, with
weights drawn from a small pool, so that sharing, slicing and transposing happen by
themselves. Set DPJAX_RANDOM_PROGRAMS to a number for that many new programs; without it
the same few are run every time.
"""

import functools
import os

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
    return h @ p["matrix"][i].astype(jnp.bfloat16).astype(h.dtype)


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

_step = st.tuples(
    st.sampled_from(STEPS), st.integers(0, 2), st.integers(0, 3), st.booleans()
)
programs = st.lists(_step, min_size=2, max_size=5)


def _loss(program, params, x, y):
    h = x
    for step, index, variant, residual in program:
        new = step(params, index, variant, h)
        h = h + new if residual else new
    penalty = sum(jnp.sum(w**2) for w in params["matrix"][:1])
    return 0.5 * jnp.sum((jnp.tanh(h) - y) ** 2) + 0.01 * penalty


_quick_jit = functools.partial(
    jax.jit, compiler_options={"xla_backend_optimization_level": 0}
)


# Shrinking compiles hundreds of programs: left to searches that somebody waits for.
_PHASES = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
if NUM_PROGRAMS:
    _PHASES.append(hypothesis.Phase.shrink)


@hypothesis.settings(
    max_examples=NUM_PROGRAMS or 15,
    derandomize=not NUM_PROGRAMS,
    database=None,
    phases=_PHASES,
    suppress_health_check=list(hypothesis.HealthCheck),
)
@hypothesis.given(program=programs)
def test_random_programs(program, float64_reference, assert_clipped_sum):
    params = _pool()
    sizes = np.linspace(0.3, 1.5, B, dtype=np.float32).reshape(B, 1, 1)
    batch = (_normal(80, B, T, D) * sizes, _normal(81, B, T, D))
    fun = functools.partial(_loss, program)
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
    is_cast = any(step is _cast for step, *_ in program)
    tolerance = ROUNDED if is_cast else EXACT
    for method, (clipped_sum, aux) in results.items():
        hypothesis.note(method)
        np.testing.assert_allclose(aux.grad_norms, reference.norms_B, rtol=tolerance)
        assert_clipped_sum(clipped_sum, reference, tolerance)
