import jax
import jax.numpy as jnp
import pytest

from experiments.models import classifiers, registry


@pytest.mark.parametrize(
    ("name", "image_shape", "expected"),
    [
        ("mlp", (28, 28, 1), 136_074),
        ("mlp", (32, 32, 3), 428_938),
        ("cnn", (28, 28, 1), 129_388),
        ("cnn", (32, 32, 3), 187_988),
        ("tempered_cnn", (28, 28, 1), 26_010),
    ],
)
def test_number_of_parameters(name, image_shape, expected):
    model = registry.build(name, image_shape, num_classes=10)
    images = jnp.zeros((1, *image_shape))
    params = jax.eval_shape(model.init, jax.random.key(0), images)
    assert registry.num_parameters(params) == expected


@pytest.mark.parametrize("name", ["mlp", "cnn", "tempered_cnn"])
def test_examples_do_not_mix(name):
    model = registry.build(name, (16, 16, 1), num_classes=3)
    images_BxHxWxC = jax.random.uniform(jax.random.key(1), (3, 16, 16, 1))
    params = jax.jit(model.init)(jax.random.key(0), images_BxHxWxC)
    apply = jax.jit(model.apply)
    together = apply(params, images_BxHxWxC)
    apart = jnp.concatenate([apply(params, x[None]) for x in images_BxHxWxC])
    assert together.shape == (3, 3)
    assert jnp.allclose(together, apart, rtol=1e-5, atol=1e-6)
    assert not jnp.allclose(together[0], together[1], rtol=1e-3)


def test_cnn_pads_small_images():
    model = registry.build("cnn", (8, 8, 1), num_classes=10)
    assert {layer.padding for layer in model.layers} == {"SAME"}
    images = jnp.zeros((1, 8, 8, 1))
    params = jax.eval_shape(model.init, jax.random.key(0), images)
    assert params["params"]["Dense_0"]["kernel"].shape == (2 * 2 * 50, 128)


def test_sizes_are_arguments():
    model = classifiers.MLP(num_classes=2, hidden_sizes=(5,), activation="tanh")
    images = jnp.zeros((1, 2, 2, 1))
    params = jax.eval_shape(model.init, jax.random.key(0), images)
    assert registry.num_parameters(params) == 4 * 5 + 5 + 5 * 2 + 2
