"""Dtypes narrower and wider than float32, and JAX's strict settings."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import clipped_grad
from dpjax.precision import is_narrow, wide_dtype, widened

METHODS = ("bookkeeping", "reweight", "vmap")


@pytest.fixture(params=METHODS)
def method(request):
    return request.param


def test_wide_dtypes():
    assert wide_dtype(jnp.float16, jnp.bfloat16) == jnp.float32
    assert wide_dtype(jnp.float32, jnp.float64) == jnp.float64
    assert wide_dtype(jnp.complex64) == jnp.complex64
    assert widened(jnp.ones(2, jnp.bfloat16)).dtype == jnp.float32
    assert widened(jnp.ones(2, jnp.int8)).dtype == jnp.int8
    assert is_narrow(jnp.ones(2, jnp.float16))
    assert not is_narrow(jnp.ones(2, jnp.int8))


@pytest.mark.parametrize("params_dtype", [jnp.bfloat16, jnp.float32])
def test_strict_promotion(method, params_dtype):
    params = {"table": jnp.ones((9, 4), params_dtype), "w": jnp.ones((4, 3))}

    def loss(params, ids):
        hidden = params["table"][ids].astype(jnp.bfloat16)
        logits = hidden @ params["w"].astype(jnp.bfloat16)
        return jnp.sum(jnp.sin(logits.astype(jnp.float32)))

    grad_fn = clipped_grad(loss, l2_clip_norm=0.1, method=method)
    ids = jnp.asarray([[0, 1, 1], [8, 2, 3]])
    with jax.numpy_dtype_promotion("strict"):
        total = grad_fn(params, ids)
    expected = clipped_grad(loss, l2_clip_norm=0.1, method="vmap")(params, ids)
    for found, wanted in zip(
        jax.tree.leaves(total), jax.tree.leaves(expected), strict=True
    ):
        assert found.dtype == wanted.dtype
        np.testing.assert_allclose(
            np.asarray(found, np.float32), np.asarray(wanted, np.float32), rtol=2e-2
        )


@pytest.mark.parametrize(
    "loss",
    [
        lambda p, x: jnp.sum(jnp.sin(x @ p.astype(jnp.float64))),
        lambda p, x: jnp.sum(jnp.sin(x.astype(jnp.float32) @ p.astype(jnp.float32))),
        lambda p, x: jnp.sum(
            jax.lax.dot(
                x.astype(jnp.float32),
                p.astype(jnp.float32),
                preferred_element_type=jnp.float64,
            )
        ),
    ],
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_float32_meets_float64(method, loss, dtype):
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        w = jnp.asarray(rng.standard_normal((4, 3)), dtype)
        x = jnp.asarray(rng.standard_normal((5, 4)), jnp.float64)
        total = clipped_grad(loss, l2_clip_norm=0.5, method=method)(w, x)
        gradients = jax.vmap(lambda x: jax.grad(loss)(w, x[None]))(x)
        norms = np.linalg.norm(gradients.reshape(5, -1), axis=1)
        expected = np.tensordot(np.minimum(1, 0.5 / norms), gradients, 1)
        assert total.dtype == dtype
        np.testing.assert_allclose(total, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("l2_clip_norm", [0.0, 1.0, np.inf])
@pytest.mark.parametrize("rescale", [False, True])
def test_debug_nans(method, l2_clip_norm, rescale):
    """No NaN on the way, with zero gradients and padding about."""
    grad_fn = clipped_grad(
        lambda w, x: jnp.sum(x @ w),
        l2_clip_norm=l2_clip_norm,
        rescale_to_unit_norm=rescale,
        method=method,
    )
    x = jnp.zeros((3, 4)).at[0].set(1.0)
    with jax.debug_nans(True):
        total = grad_fn(
            jnp.ones((4, 2)), x, is_padding_example=jnp.array([False, False, True])
        )
    assert jnp.all(jnp.isfinite(total))


def test_clip_norms_below_what_squares_can_hold(method):
    grad_fn = clipped_grad(lambda w, x: w * x[0], l2_clip_norm=1e-25, method=method)
    assert grad_fn(1.0, jnp.full(1, 1e-24)) <= 1e-25


def test_clip_norm_is_one_number_for_a_group():
    with pytest.raises(
        ValueError, match=r"l2_clip_norm holds an array of shape \(3,\)"
    ):
        clipped_grad(lambda w, x: w * x[0], l2_clip_norm=jnp.ones(3))
    grad_fn = jax.jit(clipped_grad(lambda w, x: w * x[0], l2_clip_norm=jnp.array(1.0)))
    assert grad_fn(1.0, jnp.full(2, 3.0)) == 2.0
