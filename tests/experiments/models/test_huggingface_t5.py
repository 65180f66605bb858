import dataclasses
import json
import pathlib

import pytest

from experiments.errors import UsageError
from experiments.models import huggingface_t5
from experiments.models.sentinels import Sentinels
from experiments.models.t5_config import t5_v1_1

GOLDEN = pathlib.Path(__file__).parent / "golden"
# What the reference writes and does not compute logits from.
NOT_READ = {
    "classifier_dropout",
    "initializer_factor",
    "is_decoder",
    "transformers_version",
    "use_cache",
}
# As transformers 4 wrote those of google/t5-v1_1 and of the first T5.
V1_1 = {
    "model_type": "t5",
    "architectures": ["T5ForConditionalGeneration"],
    "d_ff": 40,
    "d_kv": 6,
    "d_model": 32,
    "decoder_start_token_id": 0,
    "dropout_rate": 0.1,
    "eos_token_id": 1,
    "feed_forward_proj": "gated-gelu",
    "is_encoder_decoder": True,
    "layer_norm_epsilon": 1e-06,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "num_layers": 2,
    "output_past": True,
    "pad_token_id": 0,
    "relative_attention_num_buckets": 32,
    "tie_word_embeddings": False,
    "vocab_size": 128,
}
FIRST = {
    key: value
    for key, value in V1_1.items()
    if key
    not in (
        "feed_forward_proj",
        "num_decoder_layers",
        "tie_word_embeddings",
        "relative_attention_num_buckets",
    )
}


def parse(values, **changes):
    return huggingface_t5.parse({**values, **changes}, "DIR/config.json")


@pytest.mark.parametrize("name", ["t5_v1_1", "t5_first"])
def test_what_is_written_is_what_was_read(name):
    before = json.loads((GOLDEN / name / "config.json").read_text())
    after = huggingface_t5.to_json(huggingface_t5.parse(before, name))
    assert before.keys() - after.keys() <= NOT_READ
    # The reference writes the second whether it is given or not.
    reference = {"torch_dtype", "scale_decoder_outputs"}
    ours = {"first_sentinel", "num_sentinels"}
    assert after.keys() - before.keys() <= reference | ours
    for key in before.keys() & after.keys():
        if key == "tie_word_embeddings":
            # The reference has it true for all models.
            assert after[key] == (name == "t5_first")
        elif key != "dropout_rate":
            assert after[key] == before[key], key
    assert after["dropout_rate"] == 0
    json.dumps(after, allow_nan=False)


def test_former_and_present_spellings():
    v1_1, first = parse(V1_1), parse(FIRST)
    golden = json.loads((GOLDEN / "t5_v1_1" / "config.json").read_text())
    assert huggingface_t5.parse(golden, "") == v1_1
    assert (v1_1.activation, v1_1.tied_head) == ("gated_gelu", False)
    assert (first.activation, first.tied_head) == ("relu", True)
    assert (first.num_layers, first.num_decoder_layers) == (2, 2)
    assert (first.num_buckets, first.max_distance) == (32, 128)
    assert parse(FIRST, scale_decoder_outputs=True).tied_head
    assert not parse(FIRST, scale_decoder_outputs=False).tied_head


def test_tokens():
    assert parse(V1_1, eos_token_id=[7, 8]).eos_id == 7
    without = {key: value for key, value in V1_1.items() if "token" not in key}
    config = parse(without)
    assert (config.pad_id, config.eos_id, config.start_id) == (0, 1, 0)
    assert parse(without, pad_token_id=5).start_id == 5
    assert parse(V1_1, decoder_start_token_id=3).start_id == 3


def test_sentinels():
    assert parse(V1_1).sentinels == Sentinels(32_099, 100)
    values = {"first_sentinel": 120, "num_sentinels": 121}
    assert parse(V1_1, **values).sentinels == Sentinels(120, 121)


def test_every_field_is_written():
    config = dataclasses.replace(
        t5_v1_1(90, layers=3, width=10, heads=3, head_dim=7, feed_forward=5),
        num_decoder_layers=4,
        activation="relu",
        tied_head=True,
        num_buckets=12,
        max_distance=60,
        layer_norm_epsilon=1e-3,
        pad_id=2,
        eos_id=3,
        start_id=4,
        sentinels=Sentinels(89, 17),
    )
    for given in (config, dataclasses.replace(config, tied_head=False)):
        values = json.loads(json.dumps(huggingface_t5.to_json(given)))
        assert parse(values) == given


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "mt5"),
        ("d_model", None),
        ("d_kv", 0),
        ("num_layers", True),
        ("num_decoder_layers", "3"),
        ("feed_forward_proj", "gated-silu"),
        ("feed_forward_proj", "gelu"),
        ("feed_forward_proj", ["relu"]),
        ("dense_act_fn", "gelu"),
        ("is_gated_act", False),
        ("is_encoder_decoder", False),
        ("is_decoder", True),
        ("tie_encoder_decoder", True),
        ("tie_word_embeddings", "no"),
        ("scale_decoder_outputs", True),
        ("quantization_config", {"bits": 8}),
        ("eos_token_id", "</s>"),
        ("first_sentinel", -1),
        ("first_sentinel", "<extra_id_0>"),
        ("num_sentinels", 0),
        ("num_sentinels", 32_101),
        ("layer_norm_epsilon", 0),
    ],
)
def test_refused_by_name(key, value):
    with pytest.raises(UsageError, match="expected") as error:
        parse(V1_1, **{key: value})
    assert str(error.value).startswith(f"DIR/config.json has {key}=")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"relative_attention_num_buckets": 2}, "2 position buckets, expected 4"),
        ({"relative_attention_max_distance": 16}, "from distance 16 on, expected more"),
        ({"decoder_start_token_id": 128}, "start_id=128 is not one of the 128 tokens"),
    ],
)
def test_contradictions(changes, message):
    with pytest.raises(UsageError, match=rf"config.json: .*{message}.*: choose"):
        parse(V1_1, **changes)
