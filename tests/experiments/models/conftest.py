import jax
import numpy as np
import pytest

# It needs torch, in an environment of its own.
collect_ignore = ["golden/make_golden.py"]


@pytest.fixture(scope="session")
def random_params():
    """Returns `f(model, inputs_B) -> variables`: He's law, biases and scales near 1.

    Nothing is compiled, which the model's own initialisers would need.
    """

    def make(model, inputs_B):
        rng = np.random.default_rng(0)

        def leaf(path, x):
            if x.ndim == 1:
                offset = 1.0 if "scale" in jax.tree_util.keystr(path) else 0.0
                return (offset + 0.1 * rng.normal(size=x.shape)).astype(np.float32)
            deviation = np.sqrt(2 / np.prod(x.shape[:-1]))
            return (deviation * rng.normal(size=x.shape)).astype(np.float32)

        shapes = jax.eval_shape(model.init, jax.random.key(0), inputs_B)
        return jax.tree.map_with_path(leaf, shapes)

    return make


@pytest.fixture(autouse=True, scope="session")
def cheap_compilation():
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
