"""The tapped function: where parameters meet data, and what a run leaves behind."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import normal_form
from dpjax.tapped_function import TappedFunction

STEPS, WIDTH = 3, 2
X_TxD = np.linspace(-1, 1, STEPS * WIDTH, dtype=np.float32).reshape(STEPS, WIDTH)
W_DxD = np.array([[0.5, -0.2], [0.1, 0.7]], np.float32)
V_D = np.array([0.3, -0.4], np.float32)


def _tapped(fun, *leaves, x=X_TxD, keep_remat=False):
    """The tapped function of `fun(*leaves, x)`, which takes an anchor, too."""

    def with_anchor(*inputs):
        *leaves, anchor, x = inputs
        loss = fun(*leaves, x)
        return [loss + anchor.astype(loss.dtype)]

    specs = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
    specs.append(jax.ShapeDtypeStruct((), jnp.float32))
    specs.append(jax.ShapeDtypeStruct(x.shape, x.dtype))
    count = len(leaves)
    closed = normal_form.trace(with_anchor, specs, count, keep_remat=keep_remat)
    return TappedFunction(closed, count)


def _names(function):
    return [tap.equation.primitive.name for tap in function.taps]


def _run(function, leaves, x, perturbations=None):
    values = function.unbatched_values(leaves)
    zeros = function.zeros() if perturbations is None else perturbations
    inputs = [np.float32(0), x]
    (loss,), records = function.run(values, inputs, zeros, {}, None)
    return loss, records


def test_taps_are_where_parameters_meet_data():
    def fun(w_DxD, v_D, x_TxD):
        scale_D = jnp.exp(v_D)  # Parameters alone.
        x_TxD = jnp.sin(x_TxD)  # Data alone.
        return jnp.sum(jnp.tanh(x_TxD @ w_DxD) * scale_D[None])

    function = _tapped(fun, W_DxD, V_D)
    assert _names(function) == ["dot_general", "mul"]
    product, scale = function.taps
    assert product.operands[1].variable is function.leaves[0]
    assert function.parameter_side([scale.operands[1].variable])[0] == [1]


def test_what_does_not_reach_the_loss_is_no_tap():
    def fun(w_DxD, v_D, x_TxD):
        _ = jnp.sum(x_TxD * v_D[None])
        reached = jnp.sum(jax.lax.stop_gradient(x_TxD @ w_DxD))
        return jnp.sum(x_TxD @ w_DxD) + 0 * reached

    assert "mul" not in _names(_tapped(fun, W_DxD, V_D))


def test_what_carries_no_derivative_is_no_tap():
    def fun(w_DxD, v_D, x_TxD):
        is_large_TxD = x_TxD > v_D[None]
        return jnp.sum(jnp.where(is_large_TxD, x_TxD @ w_DxD, 0.0))

    assert _names(_tapped(fun, W_DxD, V_D)) == ["dot_general"]


def test_loops_stack_what_meets():
    def fun(w_DxD, x_TxD):
        def step(h_D, x_D):
            return jnp.tanh(h_D + x_D @ w_DxD), None

        return jnp.sum(jax.lax.scan(step, jnp.zeros(WIDTH), x_TxD)[0])

    function = _tapped(fun, W_DxD)
    (tap,) = function.taps
    assert tap.loops == (STEPS,)
    assert tap.operands[1].scanned == (False,)

    def loss(perturbations):
        return _run(function, [W_DxD], X_TxD, perturbations)

    cotangents, records = jax.grad(loss, has_aux=True)(function.zeros())
    (met,) = function.tap_values(records, cotangents)
    np.testing.assert_array_equal(met.activations[0], X_TxD)
    gradient = np.einsum("td,tp->dp", met.activations[0], met.cotangents[0])
    expected = jax.grad(fun)(W_DxD, X_TxD)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-6)


def test_each_step_has_its_own_entry_of_scanned_weights():
    def fun(w_TxDxD, x_D):
        return jnp.sum(jax.lax.scan(lambda h, w: (h @ w, None), x_D, w_TxDxD)[0])

    function = _tapped(fun, np.stack([W_DxD] * STEPS), x=X_TxD[0])
    (tap,) = function.taps
    assert (tap.loops, tap.operands[1].scanned) == ((STEPS,), (True,))


def test_the_loss_is_that_of_the_function():
    def fun(w_DxD, v_D, x_TxD):
        return jnp.sum(jnp.sin(x_TxD @ w_DxD + v_D[None]))

    loss, _ = _run(_tapped(fun, W_DxD, V_D), [W_DxD, V_D], X_TxD)
    np.testing.assert_allclose(loss, fun(W_DxD, V_D, X_TxD), rtol=1e-6)


def test_local_taps_leave_numbers_only():
    def fun(w_DxD, v_D, x_TxD):
        return jnp.sum(jnp.sin(x_TxD @ w_DxD) * v_D[None])

    function = _tapped(fun, W_DxD, V_D)
    assert _names(function) == ["dot_general", "mul"]

    def number(operands, cotangents):
        activation_TxD, _ = operands
        return jnp.sum(jnp.abs(activation_TxD.T @ cotangents[0]))[None]

    values = function.unbatched_values([W_DxD, V_D])

    def loss(perturbations, probe):
        inputs = [np.float32(0), X_TxD]
        (loss,), records = function.run(
            values, inputs, perturbations, {0: number}, probe
        )
        return loss, records

    zeros = function.zeros(local={0})
    assert len(zeros) == 1
    grad = jax.grad(loss, argnums=(0, 1), has_aux=True)
    (cotangents, found), records = grad(zeros, jnp.zeros(1))
    expected = jnp.sum(jnp.abs(jax.grad(fun)(W_DxD, V_D, X_TxD)))
    np.testing.assert_allclose(found, expected[None], rtol=1e-5)
    first, second = function.tap_values(records, cotangents, local={0})
    assert first is None
    assert second is not None


@jax.custom_vjp
def _bent(x):
    return x


_bent.defvjp(lambda x: (x, None), lambda _, g: (jnp.sign(g),))


@jax.custom_jvp
def _straight(x):
    return jnp.sin(x)


_straight.defjvps(lambda tangent, _, x: tangent)


@pytest.mark.parametrize(
    ("inner", "scales"),
    [
        (lambda x: jnp.sin(x), True),
        (_straight, True),
        (_bent, False),
        (jax.jit(_bent), False),
        (lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), False),
        (lambda x: jax.lax.reduce_precision(x, 8, 7), False),
        (lambda x: jax.lax.scan(lambda h, _: (_bent(h), None), x, None, 2)[0], False),
        (
            lambda x: jax.lax.dot(
                x, x.T, precision=jax.lax.DotAlgorithmPreset.BF16_BF16_F32
            ),
            False,
        ),
    ],
)
def test_scales_with_loss(inner, scales):
    function = _tapped(lambda w, x: jnp.sum(inner(x @ w)), W_DxD)
    assert function.scales_with_loss == scales


@pytest.mark.parametrize("keep_remat", [False, True])
@pytest.mark.parametrize("is_met_inside", [False, True])
def test_has_remat(keep_remat, is_met_inside):
    def fun(w_DxD, x_TxD):
        if is_met_inside:
            return jnp.sum(jax.checkpoint(lambda x: jnp.sin(x @ w_DxD))(x_TxD))
        return jnp.sum(jax.checkpoint(jnp.sin)(x_TxD) @ w_DxD)

    function = _tapped(fun, W_DxD, keep_remat=keep_remat)
    assert function.has_remat == (keep_remat and is_met_inside)
    assert _names(function) == ["dot_general"]
