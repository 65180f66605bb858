"""The config.json of a Hugging Face folder of a T5, read into a `T5Config` and written.

See `experiments.models.huggingface_config` for what is read and what is refused. Two
keys are this project's own: `first_sentinel` and `num_sentinels`. Other programs ignore
them, and a folder without them has the sentinels of the published models.
"""

from typing import Any

from experiments.errors import UsageError
from experiments.models.config_reader import ConfigReader
from experiments.models.sentinels import T5_SENTINELS, Sentinels
from experiments.models.t5_config import Activation, T5Config

MODEL_TYPE = "t5"
# feed_forward_proj, dense_act_fn and is_gated_act of each.
_ACTIVATIONS: dict[Activation, tuple[str, str, bool]] = {
    "gated_gelu": ("gated-gelu", "gelu_new", True),
    "relu": ("relu", "relu", False),
}


def parse(values: dict[str, Any], place: str) -> T5Config:
    """The architecture that a config.json describes.

    Args:
      values: Its keys and values.
      place: Its path, for errors.

    Raises:
      UsageError: A key whose value is not supported.

    Example:
      >>> sizes = dict(vocab_size=8, d_model=6, d_kv=2, d_ff=9, num_heads=2)
      >>> values = dict(sizes, num_layers=1, feed_forward_proj="gated-gelu")
      >>> parse(values, "config.json").activation
      'gated_gelu'
    """
    reader = ConfigReader(values, place)
    reader.refuse_unless("model_type", MODEL_TYPE)
    reader.refuse_unless("is_encoder_decoder", True)
    for key in ("is_decoder", "tie_encoder_decoder"):
        reader.refuse_unless(key, False)
    reader.refuse_unless("quantization_config")
    pad_id = _token(reader, "pad_token_id", 0)
    num_layers = reader.size("num_layers")
    try:
        return T5Config(
            vocabulary_size=reader.size("vocab_size"),
            num_layers=num_layers,
            num_decoder_layers=reader.size("num_decoder_layers", num_layers),
            width=reader.size("d_model"),
            num_heads=reader.size("num_heads"),
            head_dim=reader.size("d_kv"),
            feed_forward=reader.size("d_ff"),
            activation=_activation(reader),
            tied_head=_tied_head(reader),
            num_buckets=reader.size("relative_attention_num_buckets", 32),
            max_distance=reader.size("relative_attention_max_distance", 128),
            layer_norm_epsilon=reader.number("layer_norm_epsilon", 1e-6),
            pad_id=pad_id,
            eos_id=_token(reader, "eos_token_id", 1),
            start_id=_token(reader, "decoder_start_token_id", pad_id),
            sentinels=_sentinels(reader),
        )
    except ValueError as error:
        raise UsageError(f"{place}: {error}: choose another model") from error


def _sentinels(reader: ConfigReader) -> Sentinels:
    first = _token(reader, "first_sentinel", T5_SENTINELS.first)
    number = reader.size("num_sentinels", T5_SENTINELS.number)
    if first < 0:
        raise reader.error("first_sentinel", "a token id")
    if number > first + 1:
        raise reader.error("num_sentinels", f"at most {first + 1} from {first} down")
    return Sentinels(first, number)


def _activation(reader: ConfigReader) -> Activation:
    projection = reader.get("feed_forward_proj", "relu")
    for activation, (name, function, gated) in _ACTIVATIONS.items():
        if projection == name:
            reader.refuse_unless("dense_act_fn", function)
            reader.refuse_unless("is_gated_act", gated)
            return activation
    raise reader.error(
        "feed_forward_proj", "'gated-gelu' or 'relu', for anything else is not built"
    )


def _tied_head(reader: ConfigReader) -> bool:
    """Whether the head is the embedding table, scaled.

    Up to transformers 4, `tie_word_embeddings` said both whether the head is tied and
    whether it is scaled. Since then all configs are written with it true, what tells
    the two apart is `scale_decoder_outputs`, and a head that is there is used.
    """
    tied = reader.flag("tie_word_embeddings", True)
    scaled = reader.flag("scale_decoder_outputs", tied)
    if scaled and not tied:
        raise reader.error(
            "scale_decoder_outputs",
            "false, as tie_word_embeddings is, for a scaled "
            "head that is not tied is not built",
        )
    return scaled


def _token(reader: ConfigReader, key: str, default: int) -> int:
    token = reader.token(key)
    return default if token is None else token


def to_json(config: T5Config) -> dict[str, Any]:
    """The keys and values of the config.json from which `parse` reads `config`.

    Dropout is 0: the model here has none.
    """
    projection, function, gated = _ACTIVATIONS[config.activation]
    return {
        "model_type": MODEL_TYPE,
        "architectures": ["T5ForConditionalGeneration"],
        "is_encoder_decoder": True,
        "vocab_size": config.vocabulary_size,
        "num_layers": config.num_layers,
        "num_decoder_layers": config.num_decoder_layers,
        "d_model": config.width,
        "num_heads": config.num_heads,
        "d_kv": config.head_dim,
        "d_ff": config.feed_forward,
        "feed_forward_proj": projection,
        "dense_act_fn": function,
        "is_gated_act": gated,
        "tie_word_embeddings": config.tied_head,
        "scale_decoder_outputs": config.tied_head,
        "relative_attention_num_buckets": config.num_buckets,
        "relative_attention_max_distance": config.max_distance,
        "layer_norm_epsilon": config.layer_norm_epsilon,
        "pad_token_id": config.pad_id,
        "eos_token_id": config.eos_id,
        "decoder_start_token_id": config.start_id,
        "first_sentinel": config.sentinels.first,
        "num_sentinels": config.sentinels.number,
        "dropout_rate": 0.0,
        "dtype": "float32",
        "torch_dtype": "float32",
    }
