import jax
import numpy as np
import pytest

from experiments.models.normalization import Normalization


@pytest.mark.parametrize(("channels", "size"), [(32, 16), (16, 16), (24, 8), (5, 1)])
def test_groups(channels, size):
    x = jax.random.normal(jax.random.key(0), (2, 3, 4, channels)) * 2 + 1
    y, variables = Normalization("group").init_with_output(jax.random.key(1), x)
    groups = np.asarray(y).reshape(2, 12, channels // size, size)
    np.testing.assert_allclose(groups.mean(axis=(1, 3)), 0, atol=1e-5)
    np.testing.assert_allclose(groups.var(axis=(1, 3)), 1, atol=1e-4)
    shapes = [leaf.shape for leaf in jax.tree.leaves(variables)]
    assert shapes == [(channels,), (channels,)]


def test_frozen_is_a_constant_factor():
    x = jax.random.normal(jax.random.key(0), (2, 3, 4, 5))
    y, variables = Normalization("frozen", 0.5).init_with_output(jax.random.key(1), x)
    np.testing.assert_array_equal(y, 0.5 * x)
    assert not jax.tree.leaves(variables)
