import jax
import jax.numpy as jnp

from experiments.models import classifiers, registry


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
