import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.models import t5_start
from experiments.models.t5 import T5
from experiments.models.t5_config import t5_v1_1


@pytest.fixture(scope="module")
def started():
    """A config, random variables, and those that training starts from."""
    config = t5_v1_1(40, layers=2, width=32, heads=6, head_dim=16, feed_forward=32)
    tokens_1x3 = jnp.zeros((1, 3), jnp.int32)
    variables = jax.jit(T5(config).init)(jax.random.key(0), tokens_1x3, tokens_1x3)
    return config, variables, t5_start.with_lookup(variables, config)


def test_only_cross_queries_and_the_encoders_biases_change(started):
    _, before, after = started
    assert jax.tree.map(jnp.shape, before) == jax.tree.map(jnp.shape, after)
    changed = {
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, differs in jax.tree_util.tree_leaves_with_path(
            jax.tree.map(lambda x, y: bool((x != y).any()), before, after)
        )
        if differs
    }
    assert changed == {
        "params/decoder/layers_0/cross_attention/query/kernel",
        "params/decoder/layers_1/cross_attention/query/kernel",
        "params/encoder/position_bias/embedding",
    }


def test_the_decoder_finds_what_it_has_read(started):
    config, _, variables = started
    table_VxD = variables["params"]["embedding"]["embedding"]
    normed_VxD = table_VxD / jnp.sqrt(jnp.mean(table_VxD**2, axis=1, keepdims=True))
    attention = variables["params"]["decoder"]["layers_1"]["cross_attention"]
    query_VxHxK, key_VxHxK = (
        (normed_VxD @ attention[name]["kernel"]).reshape(40, config.num_heads, -1)
        for name in ("query", "key")
    )
    weights_HxVxV = jax.nn.softmax(
        jnp.einsum("qhk,vhk->hqv", query_VxHxK, key_VxHxK), axis=-1
    )
    own_HxV = jnp.diagonal(weights_HxVxV, axis1=1, axis2=2)
    assert float(own_HxV.mean()) > 0.8


def test_four_heads_favour_a_neighbour_each(started):
    _, before, after = started
    difference_NxH = np.subtract(
        *(
            np.asarray(variables["params"]["encoder"]["position_bias"]["embedding"])
            for variables in (after, before)
        )
    )
    # Buckets of distances -1, 1, -2 and 2 of 32, the later ones in the upper half.
    expected_NxH = np.zeros((32, 6))
    expected_NxH[[1, 17, 2, 18], [0, 1, 2, 3]] = 6
    np.testing.assert_allclose(difference_NxH, expected_NxH, atol=1e-5)
