import dataclasses
import json
import pathlib

import pytest

from experiments.errors import UsageError
from experiments.models import build_language_model, huggingface_config

GOLDEN = pathlib.Path(__file__).parent / "golden"
NAMES = sorted(folder.name for folder in GOLDEN.glob("gpt*"))
# What the reference writes and does not compute logits from.
NOT_READ = {
    "add_cross_attention",
    "classifier_dropout",
    "initializer_range",
    "is_decoder",
    "pad_token_id",
    "reorder_and_upcast_attn",
    "summary_activation",
    "summary_first_dropout",
    "summary_proj_to_labels",
    "summary_type",
    "summary_use_proj",
    "transformers_version",
    "use_cache",
}
# Former spellings, for older releases.
ADDED = {"torch_dtype", "rotary_pct", "rotary_emb_base"}

GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 50257,
    "n_positions": 1024,
    "n_ctx": 1024,
    "n_embd": 12,
    "n_layer": 2,
    "n_head": 2,
    "n_inner": None,
    "task_specific_params": {"text-generation": {"max_length": 50}},
}
NEO = {
    "model_type": "gpt_neo",
    "vocab_size": 50257,
    "max_position_embeddings": 2048,
    "hidden_size": 12,
    "num_layers": 4,
    "num_heads": 2,
    "attention_types": [[["global", "local"], 2]],
}
GPTJ = {**GPT2, "model_type": "gptj", "rotary_dim": 4, "rotary": True}
NEOX = {
    "model_type": "gpt_neox",
    "vocab_size": 50304,
    "max_position_embeddings": 2048,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}


def parse(values, **changes):
    return huggingface_config.parse({**values, **changes}, "DIR/config.json")


def golden(name):
    return json.loads((GOLDEN / name / "config.json").read_text())


@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_is_what_was_read(name):
    before = golden(name)
    after = huggingface_config.to_json(huggingface_config.parse(before, name))
    assert before.keys() - after.keys() <= NOT_READ
    assert after.keys() - before.keys() <= ADDED
    for key in before.keys() & after.keys():
        if "drop" in key:
            assert after[key] == 0
        elif key in ("n_inner", "intermediate_size"):
            assert after[key] == (before[key] or 4 * 32)
        else:
            assert after[key] == before[key], key
    json.dumps(after, allow_nan=False)


@pytest.mark.parametrize(
    "spec",
    [
        "gpt2:layers=3:width=6:heads=2",
        "gpt_neo:layers=5:width=6:heads=2:window=7",
        "gpt_neo:layers=1:width=6:heads=2",
        "gpt_j:layers=3:width=12:heads=2:rotary_dim=6",
        # 2/49 of 49 rounds down to 1.
        "gpt_neox:layers=3:width=98:heads=2:rotary_dim=2:feed_forward=5",
        *(f"gpt_neox:width=94:heads=2:rotary_dim={d}" for d in range(2, 48, 4)),
    ],
)
def test_round_trip(spec):
    config = build_language_model(spec, 30, 40, eos_id=3).config
    assert (config.bos_id, config.eos_id) == (3, 3)
    values = json.loads(json.dumps(huggingface_config.to_json(config)))
    assert huggingface_config.parse(values, spec) == config


def test_defaults_are_those_of_the_reference():
    gpt2, neo, gptj, neox = (parse(values) for values in (GPT2, NEO, GPTJ, NEOX))
    assert [c.feed_forward for c in (gpt2, neo, gptj, neox)] == [48, 48, 48, 64]
    assert {c.activation for c in (gpt2, neo, gptj)} == {"gelu_new"}
    assert neox.activation == "gelu"
    assert {c.layer_norm_epsilon for c in (gpt2, neo, gptj, neox)} == {1e-5}
    assert [c.tied_head for c in (gpt2, neo, gptj, neox)] == [True, True, False, False]
    assert neo.windows == (None, 256, None, 256)
    assert (neox.rotary_dim, neox.rotary_base) == (4, 10_000)
    assert neox.residual == "parallel_two_norms"
    assert parse(GPT2, bos_token_id=5, eos_token_id=[7, 8]).bos_id == 5
    assert parse(GPT2, eos_token_id=[7, 8]).eos_id == 7


@pytest.mark.parametrize(
    ("fraction", "base", "changes"),
    [
        (0.5, 1e4, {"rotary_pct": 0.5}),
        (0.25, 5e5, {"rotary_emb_base": 500_000}),
        (0.5, 5e5, {"rotary_pct": 0.5, "rotary_emb_base": 5e5, "rope_scaling": None}),
        (0.5, 5e5, {"partial_rotary_factor": 0.5, "rope_theta": 5e5}),
        (0.5, 1e4, {"rope_parameters": {"partial_rotary_factor": 0.5}}),
        (0.25, 5e5, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
        (0.5, 1e4, {"rotary_pct": 0.5, "rope_parameters": {"rope_theta": 1e4}}),
        (0.25, 1e4, {"rope_scaling": {"type": "default"}}),
    ],
)
def test_rotary_positions_in_all_spellings(fraction, base, changes):
    config = parse(NEOX, **changes)
    assert (config.rotary_dim, config.rotary_base) == (16 * fraction, base)


def test_options_of_one_family():
    neox = parse(
        NEOX,
        use_parallel_residual=False,
        attention_bias=False,
        tie_word_embeddings=True,
        layer_norm_eps=1e-6,
        hidden_act="gelu_fast",
    )
    assert neox.residual == "sequential"
    assert not neox.qkv_bias
    assert not neox.attention_output_bias
    assert neox.tied_head
    assert (neox.layer_norm_epsilon, neox.activation) == (1e-6, "gelu_fast")
    gpt2 = parse(GPT2, scale_attn_weights=False, scale_attn_by_inverse_layer_idx=True)
    assert (gpt2.scale_attention, gpt2.scale_attention_by_layer) == (False, True)
    neo = {key: value for key, value in NEO.items() if key != "attention_types"}
    layers = ["local", "global", "global", "local"]
    assert parse(neo, attention_layers=layers, window_size=3).windows == (
        *(3, None),
        *(None, 3),
    )


@pytest.mark.parametrize(
    ("values", "key", "value"),
    [
        (GPT2, "model_type", "llama"),
        (GPT2, "model_type", None),
        (GPT2, "model_type", ["gpt2"]),
        (GPT2, "n_embd", None),
        (GPT2, "n_layer", 0),
        (GPT2, "n_head", True),
        (GPT2, "vocab_size", "50257"),
        (GPT2, "n_inner", -1),
        (GPT2, "activation_function", "relu"),
        (GPT2, "activation_function", []),
        (GPT2, "layer_norm_epsilon", "1e-5"),
        (GPT2, "scale_attn_weights", "yes"),
        (GPT2, "add_cross_attention", True),
        (GPT2, "is_encoder_decoder", True),
        (GPT2, "quantization_config", {"bits": 4}),
        (GPT2, "sliding_window", 128),
        (GPT2, "rope_scaling", {"type": "linear", "factor": 2.0}),
        (GPT2, "rope_parameters", {"rope_theta": 1e4}),
        (GPT2, "eos_token_id", "</s>"),
        (NEO, "attention_types", [["global", 4]]),
        (NEO, "attention_types", [[["global", "sparse"], 2]]),
        (NEO, "attention_types", 3),
        (NEO, "attention_layers", ["global"] * 4),
        (NEO, "window_size", 0),
        (GPTJ, "rotary", False),
        (GPTJ, "rotary_dim", None),
        (GPTJ, "rotary_emb_base", 500_000),
        (GPTJ, "tie_word_embeddings", True),
        (GPTJ, "scale_attn_weights", False),
        (NEOX, "hidden_act", "silu"),
        (NEOX, "intermediate_size", None),
        (NEOX, "head_dim", 8),
        (NEOX, "rope_scaling", {"type": "linear", "factor": 2.0}),
        (NEOX, "rope_parameters", {"rope_type": "yarn"}),
        (NEOX, "rope_parameters", {"rope_type": "default", "factor": 2.0}),
        (NEOX, "rope_parameters", [1]),
        (NEOX, "rotary_pct", "a quarter"),
        (NEOX, "use_parallel_residual", 1),
    ],
)
def test_refused_by_name(values, key, value):
    with pytest.raises(UsageError, match="expected") as error:
        parse(values, **{key: value})
    message = str(error.value)
    assert message.startswith("DIR/config.json")
    assert key in message or "rope_type" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("values", "changes", "message"),
    [
        (GPT2, {"n_head": 5}, "heads=5 does not divide width=12: choose another"),
        (NEO, {"num_layers": 5}, "4 layers are said to be global or local, but .* 5"),
        (GPTJ, {"rotary_dim": 8}, "rotary_dim=8 is not an even number from 2 to 6"),
        (NEOX, {"rotary_pct": 0.05}, "rotary_dim=1 is not an even number"),
        (
            NEOX,
            {"rotary_pct": 0.5, "rope_parameters": {"partial_rotary_factor": 0.25}},
            r"\[0.5, 0.25\] as rotary_pct and partial_rotary_factor, expected one",
        ),
    ],
)
def test_contradictions(values, changes, message):
    with pytest.raises(UsageError, match=message):
        parse(values, **changes)


def test_every_field_is_written():
    """Nothing that the reader can set is lost by the writer."""
    changed = {
        "gpt2": parse(
            GPT2,
            scale_attn_weights=False,
            scale_attn_by_inverse_layer_idx=True,
            tie_word_embeddings=False,
            activation_function="gelu",
            layer_norm_epsilon=1e-3,
            n_inner=7,
        ),
        "gpt_neox": parse(
            NEOX,
            use_parallel_residual=False,
            attention_bias=False,
            tie_word_embeddings=True,
            rotary_emb_base=300,
            rotary_pct=0.5,
        ),
        "gpt_neo": parse(NEO, window_size=9, tie_word_embeddings=False),
        "gpt_j": parse(GPTJ, activation_function="gelu"),
    }
    for family, config in changed.items():
        assert config.family == family
        again = huggingface_config.parse(huggingface_config.to_json(config), family)
        assert dataclasses.asdict(again) == dataclasses.asdict(config)
