import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from experiments.errors import UsageError
from experiments.models import registry, transformer

SPEC = "transformer:layers=2:width=8:heads=2:feed_forward=12:vocabulary_size=20"
LENGTH = 6


@pytest.fixture(scope="module")
def model():
    return registry.build(SPEC, (LENGTH,), num_classes=3)


@pytest.fixture(scope="module")
def params(model, random_params):
    return random_params(model, jnp.zeros((1, LENGTH), jnp.int32))


@pytest.fixture(scope="module")
def apply(model):
    return jax.jit(model.apply)


def layer_norm(params, x):
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
    return x * params["scale"] + params["bias"]


def dense(params, x):
    return x @ np.asarray(params["kernel"], np.float64) + np.asarray(params["bias"])


def test_by_hand(apply, params):
    """One sentence without padding, token by token and head by head."""
    ids_T = np.array([3, 1, 4, 1, 5, 9])
    x = transformer.random_embeddings(20, 8)[ids_T] + transformer.positions(LENGTH, 8)
    x = x.astype(np.float64)
    for i in range(2):
        layer = params["params"][f"layer_{i}"]
        qkv = dense(layer["qkv"], x).reshape(LENGTH, 3, 2, 4)
        heads = []
        for h in range(2):
            q, k, v = (qkv[:, j, h] for j in range(3))
            scores = np.exp(q @ k.T / 2)
            heads.append(scores / scores.sum(axis=1, keepdims=True) @ v)
        attended = dense(layer["projection"], np.concatenate(heads, axis=1))
        x = layer_norm(layer["attention_norm"], x + attended)
        hidden = np.maximum(dense(layer["hidden"], x), 0)
        x = layer_norm(layer["output_norm"], x + dense(layer["output"], hidden))
    expected = dense(params["params"]["head"], x.mean(axis=0))
    found = apply(params, jnp.asarray(ids_T)[None])[0]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_padding_changes_nothing(apply, params):
    ids_T = jnp.array([[3, 1, 4, 1]])
    padded = jnp.pad(ids_T, ((0, 0), (0, 5)))
    np.testing.assert_allclose(
        apply(params, ids_T), apply(params, padded), rtol=1e-5, atol=1e-6
    )


def test_nothing_but_padding_is_finite(model, params):
    ids_1xT = jnp.zeros((1, LENGTH), jnp.int32)
    grads = jax.jit(jax.grad(lambda p: model.apply(p, ids_1xT).sum()))(params)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))


def test_the_order_of_tokens_matters(apply, params):
    ids_BxT = jnp.array([[3, 1, 4, 1, 5, 9], [9, 5, 1, 4, 1, 3]])
    forth, back = apply(params, ids_BxT)
    assert not np.allclose(forth, back, rtol=1e-3)


def test_trained_embeddings_start_like_the_frozen_ones(apply, params):
    trained = registry.build(f"{SPEC}:embeddings=trained", (LENGTH,), num_classes=3)
    ids_BxT = jnp.array([[3, 1, 4, 1, 5, 9]])
    init = jax.jit(lambda key: trained.init(key, ids_BxT)["params"]["embedding"])
    table_VxD = init(jax.random.key(0))
    assert table_VxD.shape == (20, 8)
    variables = {"params": {**params["params"], "embedding": table_VxD}}
    np.testing.assert_allclose(
        jax.jit(trained.apply)(variables, ids_BxT), apply(params, ids_BxT), rtol=1e-5
    )


def test_a_scan_stacks_the_layers(apply, params, random_params):
    ids_BxT = jnp.array([[3, 1, 4, 1, 5, 9], [2, 7, 1, 8, 0, 0]])
    names = ("layer_0", "layer_1")
    layers = [params["params"][name] for name in names]
    others = {k: v for k, v in params["params"].items() if k not in names}
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *layers)
    variables = {"params": {**others, "layers": stacked}}
    expected = apply(params, ids_BxT)
    for options in ("scan=true", "scan=true:remat=true"):
        model = registry.build(f"{SPEC}:{options}", (LENGTH,), num_classes=3)
        shapes = jax.eval_shape(model.init, jax.random.key(0), ids_BxT)
        assert jax.tree.map(np.shape, variables) == jax.tree.map(np.shape, shapes)
        assert registry.num_parameters(shapes) == registry.num_parameters(params)
        found = jax.jit(model.apply)(variables, ids_BxT)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_scanned_layers_start_differently():
    model = registry.build(f"{SPEC}:scan=true", (LENGTH,), num_classes=3)
    ids_BxT = jnp.ones((1, LENGTH), jnp.int32)
    kernel_LxDxF = jax.jit(
        lambda key: model.init(key, ids_BxT)["params"]["layers"]["hidden"]["kernel"]
    )(jax.random.key(0))
    assert not np.allclose(kernel_LxDxF[0], kernel_LxDxF[1], atol=1e-2)


def test_remat_changes_no_logits(apply, params):
    ids_BxT = jnp.array([[3, 1, 4, 1, 5, 9]])
    model = registry.build(f"{SPEC}:remat=true:scan=false", (LENGTH,), num_classes=3)
    found = jax.jit(model.apply)(params, ids_BxT)
    np.testing.assert_allclose(found, apply(params, ids_BxT), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "num_scans", "num_remats"),
    [
        ("scan=false", 0, 0),
        ("scan=true", 1, 0),
        ("remat=true", 0, 2),
        ("scan=true:remat=true", 1, 1),
    ],
)
def test_remat_goes_inside_the_scan(options, num_scans, num_remats):
    model = registry.build(f"{SPEC}:{options}", (LENGTH,), num_classes=3)
    ids_BxT = jnp.ones((1, LENGTH), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), ids_BxT)
    program = str(jax.make_jaxpr(model.apply)(params, ids_BxT))
    assert len(re.findall(r"\bscan\[", program)) == num_scans
    assert len(re.findall(r"\b(?:remat2?|checkpoint)\[", program)) == num_remats


@pytest.mark.parametrize("options", ["scan=true", "remat=true", "scan=true:remat=true"])
def test_no_parameter_falls_back_to_its_own_gradient(options, random_params):
    model = registry.build(f"{SPEC}:{options}", (LENGTH,), num_classes=3)
    ids_BxT = jnp.ones((4, LENGTH), jnp.int32)
    params = random_params(model, ids_BxT)

    def loss(params, ids_BxT):
        return model.apply(params, ids_BxT)[:, 0].sum()

    explanation = dpjax.explain(loss, params, ids_BxT)
    assert explanation.fallbacks == ()
    assert "['hidden']['kernel']" in str(explanation)


def test_embeddings_are_public_and_the_same_everywhere():
    table_VxD = transformer.random_embeddings(500, 20)
    np.testing.assert_array_equal(table_VxD, transformer.random_embeddings(500, 20))
    assert table_VxD.dtype == np.float32
    assert abs(table_VxD.mean()) < 0.05
    assert abs(table_VxD.std() - 1) < 0.05


def test_feed_forward_is_four_times_the_width():
    spec = "transformer:width=24:heads=3"
    assert registry.build(spec, (LENGTH,), 2).feed_forward == 96


def test_odd_width_has_positions_too():
    assert transformer.positions(4, 5).shape == (4, 5)


def test_heads_that_do_not_divide_the_width():
    with pytest.raises(UsageError, match="heads=8 does not divide width=100; change"):
        registry.build("transformer:width=100", (LENGTH,), num_classes=2)
