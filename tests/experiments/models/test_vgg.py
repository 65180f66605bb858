import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.errors import UsageError
from experiments.models import registry, vgg


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (7, 7), (8, 9), (14, 21), (10, 6)])
def test_adaptive_mean_pool(shape):
    height, width = shape
    x = np.asarray(jax.random.normal(jax.random.key(0), (2, height, width, 3)))
    found = vgg.adaptive_mean_pool(jnp.asarray(x), 7)
    assert found.shape == (2, 7, 7, 3)
    for i in range(7):
        for j in range(7):
            rows = slice(i * height // 7, -(-(i + 1) * height // 7))
            columns = slice(j * width // 7, -(-(j + 1) * width // 7))
            expected = x[:, rows, columns].mean(axis=(1, 2))
            np.testing.assert_allclose(found[:, i, j], expected, rtol=1e-4, atol=1e-6)


def test_width_and_depth():
    model = registry.build("vgg11:blocks=1-2:width=4", (8, 8, 1), num_classes=10)
    images = jnp.zeros((1, 8, 8, 1))
    params = jax.eval_shape(model.init, jax.random.key(0), images)["params"]
    shapes = {name: leaf["kernel"].shape for name, leaf in params.items()}
    assert shapes == {
        "stage_0_0_conv": (3, 3, 1, 4),
        "stage_1_0_conv": (3, 3, 4, 8),
        "stage_1_1_conv": (3, 3, 8, 8),
        "dense_0": (7 * 7 * 8, 256),
        "dense_1": (256, 256),
        "head": (256, 10),
    }


def test_images_too_small():
    with pytest.raises(UsageError, match=r"vgg11.*\(8, 8, 1\).*leaves nothing"):
        registry.build("vgg11", (8, 8, 1), num_classes=10)
