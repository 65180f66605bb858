import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from experiments import models
from experiments.errors import RunError, UsageError
from experiments.models import language_models
from experiments.models.sentinels import Sentinels

GOLDEN = pathlib.Path(__file__).parent / "golden"
ALL_NAMES = sorted(folder.name for folder in GOLDEN.iterdir() if folder.is_dir())
NAMES = [name for name in ALL_NAMES if not name.startswith("t5")]
WEIGHTS = "model.safetensors"


@pytest.fixture
def copied(tmp_path):
    def copy(name):
        return pathlib.Path(shutil.copytree(GOLDEN / name, tmp_path / name))

    return copy


def tensors_in(folder):
    files = folder.glob("*.safetensors")
    return {name: x for file in files for name, x in load_file(file).items()}


def rewrite(folder, change):
    """Replaces the tensors of `folder` by those that `change` makes of them."""
    tensors = tensors_in(folder)
    save_file(change(tensors) or tensors, folder / WEIGHTS)


def set_config(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize("name", NAMES)
def test_logits_of_the_reference(name):
    """On 300 tokens, more than the local window, and with unused vocabulary rows."""
    model, params = models.load(GOLDEN / name)
    expected = np.load(GOLDEN / name / "expected.npz")
    logits_BxTxV = jax.jit(model.apply)(params, expected["tokens"])
    assert expected["tokens"].shape == (2, 300)
    assert expected["tokens"].max() < 96
    assert logits_BxTxV.shape == (2, 300, 128)
    found_BxPxV = np.asarray(logits_BxTxV)[:, expected["positions"]]
    np.testing.assert_allclose(found_BxPxV, expected["logits"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["gpt2", "gpt_neo", "gpt_j", "gpt_neox"])
def test_decoding_past_the_window(name):
    """The reference's logits through the cache: a prompt, then token by token."""
    model, params = models.load(GOLDEN / name)
    expected = np.load(GOLDEN / name / "expected.npz")
    tokens_BxT = jnp.asarray(expected["tokens"])

    @jax.jit
    def logits_of_the_last(tokens_BxT):
        cache = model.init_cache(2, 300)
        _, cache = model.apply(params, tokens_BxT[:, :290], cache, method="extend")

        def step(cache, token_B):
            x, cache = model.apply(params, token_B[:, None], cache, method="extend")
            return cache, model.apply(params, x, method="logits")[:, 0]

        _, logits_SxBxV = jax.lax.scan(step, cache, tokens_BxT[:, 290:].T)
        return jnp.swapaxes(logits_SxBxV, 0, 1)

    np.testing.assert_allclose(
        logits_of_the_last(tokens_BxT), expected["logits"][:, -10:], rtol=0, atol=1e-4
    )


@pytest.mark.parametrize("name", ALL_NAMES)
def test_saved_as_it_was_read(name, tmp_path):
    """Equal bytes in equally named tensors: transformers opened the golden folder."""
    model, params = models.load(GOLDEN / name)
    models.save(tmp_path / "copy", model, params)
    before, after = tensors_in(GOLDEN / name), tensors_in(tmp_path / "copy")
    assert before.keys() == after.keys()
    for tensor, values in before.items():
        assert after[tensor].dtype == np.float32
        np.testing.assert_array_equal(after[tensor], values, err_msg=tensor)
    model_again, params_again = models.load(tmp_path / "copy")
    assert model_again == model
    jax.tree.map(np.testing.assert_array_equal, params_again, params)


@pytest.mark.parametrize("name", ["gpt2", "gpt_neo", "gpt_j", "gpt_neox"])
def test_params_are_those_of_init(name):
    model, params = models.load(GOLDEN / name)
    expected = jax.eval_shape(
        model.init, jax.random.key(0), jnp.zeros((1, 3), jnp.int32)
    )
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), params)
    assert shapes == jax.tree.map(lambda x: (x.shape, x.dtype), expected)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(params))


# As other folders of the same models have them.
def without_prefix(tensors):
    return {k.partition(".")[2] if "h." in k else k: v for k, v in tensors.items()}


def without_any_prefix(tensors):
    return {
        k.removeprefix("transformer.").removeprefix("gpt_neox."): v
        for k, v in tensors.items()
    }


def with_openai_buffers(tensors):
    mask = np.tril(np.ones((1, 1, 300, 300), np.uint8))
    return tensors | {"transformer.h.0.attn.bias": mask}


def with_neo_buffers(tensors):
    name = "transformer.h.0.attn.attention"
    mask, masked = np.ones((1, 1, 9, 9), bool), np.array(-1e9, np.float32)
    return tensors | {f"{name}.bias": mask, f"{name}.masked_bias": masked}


def with_neox_buffers(tensors):
    name = "gpt_neox.layers.1.attention"
    frequencies = np.ones(2, np.float32)
    return tensors | {
        f"{name}.bias": np.ones((1, 1, 9, 9), bool),
        f"{name}.masked_bias": np.array(-1e4, np.float16),
        f"{name}.rotary_emb.inv_freq": frequencies,
    }


def with_tied_head(tensors):
    return tensors | {"lm_head.weight": tensors["transformer.wte.weight"]}


def with_new_head_name(tensors):
    return {k.replace("embed_out", "lm_head"): v for k, v in tensors.items()}


def with_the_head_alone(tensors):
    return {k.replace("transformer.wte", "lm_head"): v for k, v in tensors.items()}


def with_embeddings_of_both_stacks(tensors):
    table = tensors["shared.weight"]
    names = [f"{stack}.embed_tokens.weight" for stack in ("encoder", "decoder")]
    return tensors | dict.fromkeys(names, table)


def with_the_encoders_embedding_alone(tensors):
    return {k.replace("shared", "encoder.embed_tokens"): v for k, v in tensors.items()}


def with_t5_head(tensors):
    return tensors | {"lm_head.weight": tensors["shared.weight"]}


def with_unread_position_biases(tensors):
    name = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    return tensors | {name: np.ones((20, 4), np.float32)}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("gpt2", without_prefix),
        ("gpt2", without_any_prefix),
        ("gpt_neox", without_any_prefix),
        ("gpt_j", without_any_prefix),
        ("gpt2", with_openai_buffers),
        ("gpt_j", with_openai_buffers),
        ("gpt_neo", with_neo_buffers),
        ("gpt_neox", with_neox_buffers),
        ("gpt2", with_tied_head),
        ("gpt_neo", with_tied_head),
        ("gpt_neox", with_new_head_name),
        ("gpt2", with_the_head_alone),
        ("t5_v1_1", with_embeddings_of_both_stacks),
        ("t5_v1_1", with_the_encoders_embedding_alone),
        ("t5_first", with_embeddings_of_both_stacks),
        ("t5_first", with_t5_head),
        ("t5_first", with_unread_position_biases),
    ],
)
def test_other_names(name, change, copied):
    folder = copied(name)
    rewrite(folder, change)
    model, params = models.load(folder)
    expected_model, expected = models.load(GOLDEN / name)
    assert model == expected_model
    jax.tree.map(np.testing.assert_array_equal, params, expected)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_short_floats(dtype, copied):
    folder = copied("gpt_j")
    rewrite(folder, lambda ts: {k: v.astype(dtype) for k, v in ts.items()})
    _, params = models.load(folder)
    _, full = models.load(GOLDEN / "gpt_j")
    for found, exact in zip(
        jax.tree.leaves(params), jax.tree.leaves(full), strict=True
    ):
        assert found.dtype == jnp.float32
        rounded = np.asarray(exact).astype(dtype).astype(np.float32)
        np.testing.assert_array_equal(found, rounded)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "gpt2",
            lambda ts: {k: v for k, v in ts.items() if "ln_f" not in k},
            r"lacks tensor 'transformer.ln_f.weight' and 1 more, .*gpt2 of 2 layers",
        ),
        (
            "gpt_j",
            lambda ts: {k: v for k, v in ts.items() if k != "lm_head.weight"},
            r"lacks tensor 'lm_head.weight', so",
        ),
        (
            "gpt_neo",
            lambda ts: ts | {"transformer.h.4.ln_1.bias": np.ones(32, np.float32)},
            r"unexpected tensor 'transformer.h.4.ln_1.bias', .*4 layers.*: copy",
        ),
        (
            "gpt2",
            lambda ts: ts | {"score.weight": np.ones(2, np.float32)},
            r"unexpected tensor 'transformer.score.weight'",
        ),
        (
            "gpt_neox",
            lambda ts: ts | {"embed_out.weight": np.ones((32, 128), np.float32)},
            r"'embed_out.weight' of shape \(32, 128\), expected \(128, 32\)",
        ),
        (
            "gpt2",
            lambda ts: ts | {"wte.weight": ts["transformer.wte.weight"]},
            r"holds 'transformer.wte.weight' twice, .* 'wte.weight'.*: remove one",
        ),
        (
            "gpt_neo",
            lambda ts: ts | {"lm_head.weight": ts["transformer.wte.weight"] + 1},
            r"'lm_head.weight', which differs from .* set tie_word_embeddings to false",
        ),
        (
            "t5_v1_1",
            lambda ts: {k: v for k, v in ts.items() if k != "lm_head.weight"},
            r"lacks tensor 'lm_head.weight', so it is not the t5 of 2 layers",
        ),
        (
            "t5_first",
            lambda ts: ts | {"lm_head.weight": ts["shared.weight"] + 1},
            r"'lm_head.weight', which differs from 'shared.weight' although",
        ),
        (
            "t5_v1_1",
            lambda ts: ts | {"decoder.embed_tokens.weight": ts["shared.weight"] + 1},
            r"'decoder.embed_tokens.weight', which differs from 'shared.weight'",
        ),
    ],
)
def test_wrong_tensors(name, change, message, copied):
    folder = copied(name)
    rewrite(folder, change)
    with pytest.raises(RunError, match=message) as error:
        models.load(folder)
    assert "\n" not in str(error.value)
    assert str(folder) in str(error.value)


def test_config_of_other_sizes(copied):
    folder = copied("gpt2")
    set_config(folder, vocab_size=96)
    with pytest.raises(
        RunError, match=r"wte.weight' of shape \(128, 32\), .* \(96, 32"
    ):
        models.load(folder)
    set_config(folder, vocab_size=128, n_layer=3)
    with pytest.raises(RunError, match=r"lacks tensor 'transformer.h.2.ln_1.weight'"):
        models.load(folder)


def test_wrong_folders(tmp_path, copied):
    with pytest.raises(UsageError, match=r"'.*nowhere' does not exist"):
        models.load(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"'.*file' is a file: give a folder"):
        models.load(tmp_path / "file")
    with pytest.raises(UsageError, match=r"has no config.json: give a Hugging Face"):
        models.load(tmp_path)
    folder = copied("gpt2")
    set_config(folder, model_type="llama")
    with pytest.raises(UsageError, match="model_type='llama', expected one of gpt2"):
        models.load(folder)
    for text in ("{", "[]"):
        (folder / "config.json").write_text(text)
        with pytest.raises(RunError, match=r"config.json is not .*: copy it again"):
            models.load(folder)


def test_a_run_of_train_lm(tmp_path):
    (tmp_path / "config.json").write_text('{"corpus": "stdlib"}')
    with pytest.raises(
        UsageError, match=r"model_type=None, .* has its model when it is"
    ):
        models.load(tmp_path)
    shutil.copytree(GOLDEN / "gpt_j", tmp_path / "model")
    model, _ = models.load(str(tmp_path))
    assert model.config.family == "gpt_j"
    assert language_models.model_folder(tmp_path) == tmp_path / "model"


SMALL_T5 = "t5:layers=1:width=8:heads=2:head_dim=6:feed_forward=10"


def test_a_t5_has_its_own_tokens_behind_those_of_the_corpus():
    model = models.build_language_model(SMALL_T5, 20, max_positions=4, eos_id=3)
    config = model.config
    assert (config.width, config.num_heads, config.head_dim) == (8, 2, 6)
    assert (config.num_layers, config.num_decoder_layers) == (1, 1)
    assert config.feed_forward == 10
    own = [config.pad_id, config.eos_id]
    first, number = config.sentinels.first, config.sentinels.number
    own += range(first, first - number, -1)
    assert sorted(own) == list(range(20, config.vocabulary_size))
    assert config.start_id == config.pad_id
    assert number == 100


def test_a_built_t5_comes_back(tmp_path):
    model = models.build_language_model(SMALL_T5, 20, max_positions=4)
    tokens_2x7 = jax.random.randint(jax.random.key(1), (2, 7), 0, 122)
    # Not those of the initialisers: no two numbers are the same.
    shapes = jax.eval_shape(model.init, jax.random.key(0), tokens_2x7, tokens_2x7)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: rng.normal(size=x.shape).astype("f4"), shapes)
    models.save(tmp_path / "t5", model, params)
    again, params_again = models.load(tmp_path / "t5")
    assert again == model
    # Nothing but the config is needed to know the architecture, sentinels included.
    (tmp_path / "t5" / WEIGHTS).unlink()
    assert language_models.architecture(tmp_path / "t5") == model
    apply = jax.jit(model.apply)
    np.testing.assert_array_equal(
        apply(params_again, tokens_2x7, tokens_2x7),
        apply(params, tokens_2x7, tokens_2x7),
    )


def test_a_folder_that_does_not_say_has_the_published_sentinels():
    config = language_models.architecture(GOLDEN / "t5_v1_1").config
    assert config.sentinels == Sentinels(32_099, 100)


def test_save_overwrites_nothing(tmp_path):
    model, params = models.load(GOLDEN / "gpt2")
    folder = tmp_path / "out"
    folder.mkdir()
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text("{}")
    models.save(folder, model, params, tokenizer)
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["config.json", WEIGHTS, "tokenizer.json"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "tokenizer.json"]
    for taken in (folder, tokenizer):
        before = taken.stat().st_mtime_ns
        with pytest.raises(UsageError, match="exists: give another folder"):
            models.save(taken, model, params)
        assert taken.stat().st_mtime_ns == before


def test_save_refuses_the_parameters_of_another_model(tmp_path):
    model, params = models.load(GOLDEN / "gpt2")
    less = {k: v for k, v in params["params"].items() if k != "final_norm"}
    more = params["params"] | {"head": {"kernel": jnp.ones((32, 128))}}
    for wrong in (less, more):
        with pytest.raises(ValueError, match="other names or shapes"):
            models.save(tmp_path / "out", model, {"params": wrong})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("gpt3", r"'gpt3' is unknown \(did you mean 'gpt2'\?\): expected one of gpt2,"),
        ("gpt2:depth=3", "option 'depth=3', expected .* layers, width, heads"),
        ("gpt2:rotary_dim=3", "option 'rotary_dim=3', expected"),
        ("gpt_neo:window=0", "window='0', expected an integer >= 1"),
        ("gpt2:width=10:heads=3", "heads=3 does not divide width=10; change"),
        ("t5:rotary_dim=7", "option 'rotary_dim=7', expected .* head_dim"),
        ("gpt_j:rotary_dim=7", "rotary_dim=7 is not an even number from 2 to 64"),
    ],
)
def test_wrong_spec(spec, message):
    with pytest.raises(UsageError, match=message):
        models.build_language_model(spec, 10, 10)
