import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.models import registry


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


@pytest.fixture(scope="module")
def images_BxHxWxC():
    return jax.random.uniform(jax.random.key(2), (2, 5, 4, 3))


def by_hand(params, images_BxHxWxC, layers, state_size, step):
    """Time step by time step, in float64."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params["params"])
    batch_size, height = images_BxHxWxC.shape[:2]
    # One row of all channels per step.
    xs = [
        np.asarray(images_BxHxWxC[:, t]).reshape(batch_size, -1) for t in range(height)
    ]
    for i in range(layers):
        layer, state, outputs = params[f"layer_{i}"], np.zeros(state_size), []
        for x in xs:
            z = x @ layer["input"]["kernel"] + layer["input"]["bias"]
            h = state[0] @ layer["recurrent_kernel"] + layer["recurrent_bias"]
            state = step(z + h, state)
            outputs.append(state[0])
        xs = outputs
    return xs[-1] @ params["head"]["kernel"] + params["head"]["bias"]


@pytest.mark.parametrize("layers", [1, 2])
def test_rnn(images_BxHxWxC, layers, random_params):
    model = registry.build(f"rnn:width=6:layers={layers}", (5, 4, 3), num_classes=3)
    params = random_params(model, images_BxHxWxC)

    def step(z, state):
        return [np.tanh(z)]

    expected = by_hand(params, images_BxHxWxC, layers, (1, 2, 6), step)
    found = jax.jit(model.apply)(params, images_BxHxWxC)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layers", [1, 2])
def test_lstm(images_BxHxWxC, layers, random_params):
    model = registry.build(f"lstm:width=6:layers={layers}", (5, 4, 3), num_classes=3)
    params = random_params(model, images_BxHxWxC)

    def step(z, state):
        i, f, g, o = (z[:, 6 * k : 6 * (k + 1)] for k in range(4))
        c = sigmoid(f) * state[1] + sigmoid(i) * np.tanh(g)
        return [sigmoid(o) * np.tanh(c), c]

    expected = by_hand(params, images_BxHxWxC, layers, (2, 2, 6), step)
    found = jax.jit(model.apply)(params, images_BxHxWxC)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_every_gate_starts_orthogonal():
    model = registry.build("lstm:width=6", (5, 4, 3), num_classes=3)
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 5, 4, 3)))
    kernel_MxP = params["params"]["layer_0"]["recurrent_kernel"]
    gates = jnp.split(kernel_MxP, 4, axis=1)
    for gate_MxM in gates:
        np.testing.assert_allclose(gate_MxM @ gate_MxM.T, np.eye(6), atol=1e-5)
    assert not np.allclose(gates[0], gates[1])
