import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.models import registry
from experiments.models.resnet import Block


def captured(spec, image_shape):
    """Shapes of what every submodule returns, by its path."""
    model = registry.build(spec, image_shape, num_classes=10)

    def run(key, images):
        variables = model.init(key, images)
        _, state = model.apply(
            variables, images, capture_intermediates=True, mutable=["intermediates"]
        )
        return state["intermediates"]

    images = jax.ShapeDtypeStruct((1, *image_shape), jnp.float32)
    shapes = jax.eval_shape(run, jax.random.key(0), images)
    return {
        jax.tree_util.keystr(path): leaf.shape
        for path, leaf in jax.tree.leaves_with_path(shapes)
    }


def test_sizes_of_maps_are_those_of_the_paper():
    shapes = captured("resnet18", (256, 256, 3))
    assert shapes["['stem_conv']['__call__'][0]"] == (1, 129, 129, 64)
    for stage, (size, channels) in enumerate(
        [(65, 64), (33, 128), (17, 256), (9, 512)]
    ):
        for block in (0, 1):
            path = f"['stage_{stage}_block_{block}']['__call__'][0]"
            assert shapes[path] == (1, size, size, channels)


def test_bottleneck():
    shapes = captured("resnet50:blocks=1-2:width=8:stem=small", (8, 8, 1))
    assert shapes["['stem_conv']['__call__'][0]"] == (1, 8, 8, 8)
    block = "['stage_1_block_0']"
    assert shapes[f"{block}['conv_0']['__call__'][0]"] == (1, 8, 8, 16)
    assert shapes[f"{block}['conv_1']['__call__'][0]"] == (1, 4, 4, 16)
    assert shapes[f"{block}['conv_2']['__call__'][0]"] == (1, 4, 4, 64)
    assert shapes[f"{block}['shortcut_conv']['__call__'][0]"] == (1, 4, 4, 64)
    assert not any("stage_1_block_1']['shortcut" in path for path in shapes)


@pytest.mark.parametrize("norm", ["group", "frozen"])
def test_a_branch_of_zeros_leaves_the_shortcut(norm, random_params):
    block = Block(4, stride=1, bottleneck=False, norm=norm, branch_scale=0.5)
    x = jax.random.normal(jax.random.key(1), (2, 6, 6, 4))
    variables = random_params(block, x)
    branch = block.apply(variables, x) - jnp.maximum(x, 0)
    assert not np.allclose(branch, 0)
    variables["params"]["conv_1"]["kernel"] *= 0
    if norm == "group":
        variables["params"]["norm_1"]["GroupNorm_0"]["bias"] *= 0
    np.testing.assert_array_equal(block.apply(variables, x), jnp.maximum(x, 0))


def test_frozen_keeps_the_scale_of_activations(random_params):
    spec = "resnet18:blocks=5-5:width=8:stem=small:norm=frozen"
    model = registry.build(spec, (8, 8, 1), num_classes=3)
    images = jax.random.normal(jax.random.key(1), (4, 8, 8, 1))
    _, state = jax.jit(
        lambda variables: model.apply(
            variables, images, capture_intermediates=True, mutable=["intermediates"]
        )
    )(random_params(model, images))
    first, middle, last = (
        jnp.mean(state["intermediates"][name]["__call__"][0] ** 2)
        for name in ("stem_norm", "stage_0_block_4", "stage_1_block_4")
    )
    assert 0.2 * first < middle < 5 * first
    assert 0.2 * first < last < 5 * first
