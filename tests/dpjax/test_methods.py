"""Methods: what "auto" settles on, and what each method costs in memory."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

from dpjax import clipped_grad, explain, methods
from dpjax.calling import Convention
from dpjax.planning import Rule

BATCH = 4
X_BxD = jnp.linspace(-1, 1, BATCH * 3).reshape(BATCH, 3)
PARAMS = {"w": jnp.eye(3), "b": jnp.ones(3)}


def _layer(params, x_BxD):
    return jnp.tanh(x_BxD @ params["w"] + params["b"][None])


def _plain(params, x_BxD):
    return jnp.sum(_layer(params, x_BxD).astype(jnp.float32))


def _with_remat(params, x_BxD):
    return jnp.sum(jax.checkpoint(_layer)(params, x_BxD).astype(jnp.float32))


@jax.custom_vjp
def _bent(x):
    return x


_bent.defvjp(lambda x: (x, None), lambda _, g: (jnp.sign(g),))


def _with_custom_vjp(params, x_BxD):
    return jnp.sum(_bent(jax.checkpoint(_layer)(params, x_BxD)))


def _settle(fun, params=PARAMS, x=X_BxD, method="auto", **options):
    call = Convention(fun).bind((params, x), {})
    defaults = {
        "must_form": False,
        "is_one_group": True,
        "num_examples": call.batch_size,
        "memory_budget_bytes": None,
        "strict": False,
    }
    return methods.settle(call, method, **(defaults | options))


def _as(dtype):
    return jax.tree.map(lambda x: x.astype(dtype), PARAMS)


@pytest.mark.parametrize(
    ("fun", "options", "expected"),
    [
        (_plain, {}, "bookkeeping"),
        (_with_remat, {}, "reweight"),
        (_with_custom_vjp, {}, "bookkeeping"),
        (_with_remat, {"params": _as(jnp.bfloat16)}, "bookkeeping"),
        (_with_remat, {"is_one_group": False}, "bookkeeping"),
        (_with_remat, {"must_form": True}, "vmap"),
        (_plain, {"memory_budget_bytes": 0}, "reweight"),
        (_plain, {"memory_budget_bytes": 10**9}, "bookkeeping"),
        (_plain, {"memory_budget_bytes": 0, "is_one_group": False}, "bookkeeping"),
        (_with_remat, {"memory_budget_bytes": 10**9}, "reweight"),
    ],
)
def test_auto(fun, options, expected):
    settled = _settle(fun, **options)
    assert settled.method == expected
    assert (settled.traced is None) == (expected == "vmap")


def test_auto_forms_complex_gradients():
    def fun(w, x_BxD):
        return jnp.sum(jnp.abs(x_BxD.astype(w.dtype) @ w))

    assert _settle(fun, jnp.ones(3, jnp.complex64)).method == "vmap"


@pytest.mark.parametrize("method", ["bookkeeping", "reweight", "vmap"])
@pytest.mark.parametrize("fun", [_plain, _with_remat])
def test_what_was_asked_for_is_done(fun, method):
    assert _settle(fun, method=method, memory_budget_bytes=None).method == method


def test_reweight_is_bookkeeping_where_weighted_losses_are_not_exact():
    assert _settle(_with_custom_vjp, method="reweight").method == "bookkeeping"
    narrow = _settle(_plain, _as(jnp.bfloat16), method="reweight")
    assert narrow.method == "bookkeeping"


@pytest.mark.parametrize("fun", [_with_remat, _with_custom_vjp])
def test_remat_is_kept_for_reweight_alone(fun):
    settled = _settle(fun)
    assert settled.traced.function.has_remat == (settled.method == "reweight")


def test_pre_clipping_transform_settles_on_vmap():
    grad_fn = clipped_grad(
        _plain, l2_clip_norm=1.0, pre_clipping_transform=lambda g: g, method="auto"
    )
    text = str(jax.make_jaxpr(grad_fn)(PARAMS, X_BxD))
    same = clipped_grad(_plain, l2_clip_norm=1.0, method="vmap")
    assert _primitives(text) == _primitives(str(jax.make_jaxpr(same)(PARAMS, X_BxD)))
    other = clipped_grad(_plain, l2_clip_norm=1.0)
    assert _primitives(text) != _primitives(str(jax.make_jaxpr(other)(PARAMS, X_BxD)))


def _primitives(jaxpr_text):
    return re.findall(r" = (\w+)", jaxpr_text)


def test_the_budget_is_for_the_examples_that_are_processed_at_once():
    # Of one example, book-keeping holds the cotangents and the gradient of the bias.
    held = [
        budget
        for budget in range(0, 400, 4)
        if _settle(_plain, memory_budget_bytes=budget, num_examples=1).method
        == "bookkeeping"
    ]
    least = held[0]
    assert 0 < least < 100
    assert held == list(range(least, 400, 4))
    for num_examples in (2, 8):
        for budget, expected in (
            (num_examples * least, "bookkeeping"),
            (num_examples * least - 1, "reweight"),
        ):
            settled = _settle(
                _plain, memory_budget_bytes=budget, num_examples=num_examples
            )
            assert settled.method == expected


@pytest.mark.parametrize(
    ("length", "width", "budget", "expected"),
    [
        # A gram takes 8 x 8^2 bytes, the gradient 4 x 8^2.
        (8, 8, None, Rule.GRAM),
        (8, 8, 512, Rule.GRAM),
        (8, 8, 511, Rule.INSTANTIATED),
        (8, 8, 0, Rule.INSTANTIATED),
        # A gram takes 8 x 40^2 bytes, the gradient 4 x 64^2, which is more.
        (40, 64, None, Rule.INSTANTIATED),
        (40, 64, 4 * 64**2, Rule.INSTANTIATED),
        (40, 64, 4 * 64**2 - 1, Rule.GRAM),
        (40, 64, 0, Rule.GRAM),
    ],
)
def test_budgets_change_how_a_norm_is_computed(length, width, budget, expected):
    def fun(w, x_BxTxD):
        return jnp.sum(jnp.tanh(x_BxTxD @ w))

    params, x_BxTxD = jnp.ones((width, width)), jnp.ones((1, length, width))
    (row,) = explain(fun, params, x_BxTxD, memory_budget_bytes=budget).rows
    assert row.rule is expected


def test_negative_budgets_are_refused():
    with pytest.raises(ValueError, match="memory_budget_bytes=-1 must be >= 0"):
        clipped_grad(_plain, l2_clip_norm=1.0, memory_budget_bytes=-1)


@pytest.mark.parametrize(
    ("fun", "budget", "expected"),
    [
        (_plain, None, "bookkeeping"),
        (_plain, 0, "reweight"),
        (_with_remat, None, "reweight"),
        (_with_custom_vjp, None, "bookkeeping"),
    ],
)
def test_explain_says_the_method(fun, budget, expected):
    explanation = explain(fun, PARAMS, X_BxD, memory_budget_bytes=budget)
    assert explanation.method == expected
    assert f'method="auto" is "{expected}".' in str(explanation)


LAYERS, WIDTH, LENGTH, EXAMPLES = 8, 16, 64, 8
STACKED = {
    "in": jax.ShapeDtypeStruct((LAYERS, WIDTH, 4 * WIDTH), jnp.float32),
    "out": jax.ShapeDtypeStruct((LAYERS, 4 * WIDTH, WIDTH), jnp.float32),
}
INPUTS = jax.ShapeDtypeStruct((EXAMPLES, LENGTH, WIDTH), jnp.float32)


def _stack(params, x_BxTxD):
    """Scanned layers under `remat`."""

    @jax.checkpoint
    def layer(x_BxTxD, weights):
        hidden_BxTxF = jnp.tanh(x_BxTxD @ weights["in"])
        return x_BxTxD + jnp.tanh(hidden_BxTxF @ weights["out"]), None

    x_BxTxD, _ = jax.lax.scan(layer, x_BxTxD, params)
    return jnp.sum(x_BxTxD**2)


@functools.cache
def _temporary_bytes(method, microbatch_size=None):
    """Temporary memory of a gradient by one method, or of the ordinary gradient."""
    fun = jax.grad(_stack)
    if method is not None:
        fun = clipped_grad(
            _stack, l2_clip_norm=1.0, method=method, microbatch_size=microbatch_size
        )
    compiled = jax.jit(fun).lower(STACKED, INPUTS).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_reweight_keeps_the_memory_of_remat():
    ordinary = _temporary_bytes(None)
    assert _temporary_bytes("reweight") <= 1.3 * ordinary
    assert _temporary_bytes("bookkeeping") > 2 * ordinary


@pytest.mark.parametrize("method", ["bookkeeping", "reweight", "vmap"])
def test_microbatches_take_less_memory(method):
    whole = _temporary_bytes(method)
    assert _temporary_bytes(method, microbatch_size=2) < 0.6 * whole
