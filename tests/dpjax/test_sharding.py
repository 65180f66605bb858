"""Clipping on two devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from dpjax import clipped_grad

METHODS = ("bookkeeping", "reweight", "vmap")


def _loss(w, x):
    return jnp.sum(jnp.sin(x @ w))


@pytest.fixture
def mesh():
    return jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))


def _arrays():
    rng = np.random.default_rng(0)
    w, x = rng.standard_normal((4, 3)), rng.standard_normal((6, 4))
    return jnp.asarray(w, jnp.float32), jnp.asarray(x, jnp.float32)


@pytest.mark.parametrize("method", METHODS)
def test_sharded_batch_gives_the_same_sum(mesh, method):
    w, x = _arrays()
    grad_fn = jax.jit(clipped_grad(_loss, l2_clip_norm=1.0, method=method))
    expected = grad_fn(w, x)
    sharded = jax.device_put(x, NamedSharding(mesh, P("data")))
    replicated = jax.device_put(w, NamedSharding(mesh, P()))
    np.testing.assert_allclose(grad_fn(replicated, sharded), expected, rtol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_shard_map(mesh, method):
    """Each device clips its own examples; with checks on, JAX would sum over them."""
    w, x = _arrays()
    grad_fn = clipped_grad(_loss, l2_clip_norm=1.0, method=method)
    expected = grad_fn(w, x)

    def summed(w, x):
        return jax.lax.psum(grad_fn(w, x), "data")

    mapped = functools.partial(
        jax.shard_map, summed, mesh=mesh, in_specs=(P(), P("data")), out_specs=P()
    )
    found = jax.jit(mapped(check_vma=False))(w, x)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    with pytest.raises(ValueError, match="check_vma=False"):
        jax.jit(mapped())(w, x)
