import jax.numpy as jnp
import numpy as np
import pytest

from experiments.models.attention import causal_mask


@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_mask(window):
    queries_S, keys_L = np.array([4, 5, 6]), np.arange(9)
    found = causal_mask(jnp.asarray(queries_S), jnp.asarray(keys_L), window)
    for i, query in enumerate(queries_S):
        first = 0 if window is None else max(0, query - window + 1)
        np.testing.assert_array_equal(
            np.flatnonzero(found[i]), np.arange(first, query + 1)
        )
