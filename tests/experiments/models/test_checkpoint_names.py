import math

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.models import build_language_model, checkpoint_names

SPECS = [f"{name}:layers=2:width=12:heads=3" for name in ("gpt2", "gpt_neo")] + [
    f"{name}:layers=2:width=12:heads=3:rotary_dim=2" for name in ("gpt_j", "gpt_neox")
]


def shapes_of(model):
    tokens_BxT = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens_BxT)["params"]
    return {k: v.shape for k, v in flax.traverse_util.flatten_dict(params).items()}


@pytest.mark.parametrize("spec", SPECS)
def test_every_number_has_one_place(spec):
    """All tensors together fill all parameters, each entry once."""
    model = build_language_model(spec, 20, 10)
    arrays = {k: np.zeros(shape) for k, shape in shapes_of(model).items()}
    slots = checkpoint_names.slots(model.config)
    assert len({slot.tensor for slot in slots}) == len(slots)
    for slot in slots:
        view = checkpoint_names.view(arrays[slot.path], slot, model.config)
        shape = checkpoint_names.tensor_shape(arrays[slot.path], slot, model.config)
        assert math.prod(shape) == view.size
        view += 1
    for path, array in arrays.items():
        np.testing.assert_array_equal(array, 1, err_msg=str(path))


def test_rows_by_head():
    """In GPT-NeoX row (h, part, k) of the fused tensor is column (part, h, k) here."""
    config = build_language_model(SPECS[3], 20, 10).config
    slot = next(s for s in checkpoint_names.slots(config) if s.layout == "by_head")
    kernel_DxP = np.arange(12 * 36.0).reshape(12, 36)
    view = checkpoint_names.view(kernel_DxP, slot, config)
    tensor_PxD = view.reshape(36, 12)
    for h, part, k in np.ndindex(3, 3, 4):
        np.testing.assert_array_equal(
            tensor_PxD[h * 12 + part * 4 + k], kernel_DxP[:, part * 12 + h * 4 + k]
        )


@pytest.mark.parametrize(
    ("spec", "name", "expected"),
    [
        (SPECS[0], "h.1.ln_1.bias", "transformer.h.1.ln_1.bias"),
        (SPECS[0], "transformer.wte.weight", "transformer.wte.weight"),
        (SPECS[2], "lm_head.bias", "lm_head.bias"),
        (SPECS[3], "layers.0.mlp.dense_h_to_4h.bias", None),
        (SPECS[3], "embed_out.weight", "embed_out.weight"),
        (SPECS[3], "lm_head.weight", "embed_out.weight"),
    ],
)
def test_canonical(spec, name, expected):
    config = build_language_model(spec, 20, 10).config
    assert checkpoint_names.canonical(name, config) == (expected or f"gpt_neox.{name}")


@pytest.mark.parametrize(
    "name",
    [
        "transformer.h.11.attn.bias",
        "transformer.h.0.attn.masked_bias",
        "transformer.h.0.attn.attention.bias",
        "transformer.h.0.attn.attention.masked_bias",
        "gpt_neox.layers.3.attention.bias",
        "gpt_neox.layers.3.attention.masked_bias",
        "gpt_neox.layers.3.attention.rotary_emb.inv_freq",
        "gpt_neox.rotary_emb.inv_freq",
    ],
)
def test_buffers(name):
    assert checkpoint_names.is_buffer(name)


@pytest.mark.parametrize("spec", SPECS)
def test_no_parameter_is_a_buffer(spec):
    config = build_language_model(spec, 20, 10).config
    names = [slot.tensor for slot in checkpoint_names.slots(config)]
    assert not any(checkpoint_names.is_buffer(name) for name in names)
    assert not checkpoint_names.is_buffer("transformer.h.0.attn.bias.extra")
