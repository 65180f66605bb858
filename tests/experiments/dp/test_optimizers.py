import jax.numpy as jnp
import numpy as np
import pytest

from experiments.dp import optimizers
from experiments.errors import UsageError


@pytest.mark.parametrize("name", optimizers.NAMES)
def test_every_name_takes_a_step(name):
    optimizer = optimizers.build(name, learning_rate=0.1, momentum=0.0)
    params = jnp.ones(3)
    updates, _ = optimizer.update(jnp.ones(3), optimizer.init(params), params)
    assert np.all(np.asarray(updates) < 0)


def test_momentum_reaches_the_optimizer():
    optimizer = optimizers.build("sgd", learning_rate=1.0, momentum=0.5)
    state = optimizer.init(jnp.zeros(1))
    _, state = optimizer.update(jnp.ones(1), state)
    updates, _ = optimizer.update(jnp.ones(1), state)
    assert updates.tolist() == [-1.5]


def test_unknown_name():
    with pytest.raises(UsageError, match=r"'sdg' is unknown.*did you mean sgd"):
        optimizers.build("sdg", learning_rate=0.1, momentum=0.0)


def test_momentum_without_a_place():
    with pytest.raises(UsageError, match=r"momentum=0\.9 but optimizer adam has no"):
        optimizers.build("adam", learning_rate=0.1, momentum=0.9)
