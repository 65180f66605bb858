"""The config.json of a Hugging Face folder, read into a `DecoderConfig` and written.

Read are the keys from which the reference implementation (transformers 5.24) computes
logits, in present and former spellings, with its defaults but for sizes, which must be
given. A value that asks for what is not built here is refused by name; a key that the
reference does not read changes nothing there, and nothing here. Dropout is for training
and is not read; `reorder_and_upcast_attn` changes nothing in float32.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from experiments.errors import UsageError
from experiments.models import decoder_config
from experiments.models.config_reader import ConfigReader
from experiments.models.decoder import ACTIVATIONS
from experiments.models.decoder_config import DecoderConfig

_MODEL_TYPES = {
    "gpt2": "gpt2",
    "gpt_neo": "gpt_neo",
    "gpt_j": "gptj",
    "gpt_neox": "gpt_neox",
}
_ARCHITECTURES = {
    "gpt2": "GPT2LMHeadModel",
    "gpt_neo": "GPTNeoForCausalLM",
    "gpt_j": "GPTJForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM",
}
GLOBAL, LOCAL = "global", "local"


def parse(values: dict[str, Any], place: str) -> DecoderConfig:
    """The architecture that a config.json describes.

    Args:
      values: Its keys and values.
      place: Its path, for errors.

    Raises:
      UsageError: An unknown family, or a key whose value is not supported.

    Example:
      >>> sizes = dict(vocab_size=8, n_positions=4, n_embd=6, n_layer=1, n_head=2)
      >>> parse({"model_type": "gpt2", **sizes}, "config.json").feed_forward
      24
    """
    reader = ConfigReader(values, place)
    families = {model_type: family for family, model_type in _MODEL_TYPES.items()}
    family = families.get(str(reader.get("model_type")))
    if family is None:
        raise reader.error(
            "model_type",
            f"one of {', '.join(families)} or t5 (a run of train_lm has its model when "
            "it is done)",
        )
    for key in ("is_encoder_decoder", "add_cross_attention"):
        reader.refuse_unless(key, False)
    for key in ("quantization_config", "sliding_window"):
        reader.refuse_unless(key)
    if family != "gpt_neox":
        reader.refuse_unless("rope_scaling")
        reader.refuse_unless("rope_parameters", {})
    try:
        config = _PARSERS[family](reader)
    except ValueError as error:
        raise UsageError(f"{place}: {error}: choose another model") from error
    return dataclasses.replace(
        config,
        bos_id=reader.token("bos_token_id"),
        eos_id=reader.token("eos_token_id"),
    )


def _gpt2(reader: ConfigReader) -> DecoderConfig:
    config = decoder_config.gpt2(**_openai_sizes(reader))
    return dataclasses.replace(
        config,
        activation=_activation(reader, "activation_function", "gelu_new"),
        layer_norm_epsilon=reader.number("layer_norm_epsilon", 1e-5),
        scale_attention=reader.flag("scale_attn_weights", True),
        scale_attention_by_layer=reader.flag("scale_attn_by_inverse_layer_idx", False),
        tied_head=reader.flag("tie_word_embeddings", True),
    )


def _gpt_neo(reader: ConfigReader) -> DecoderConfig:
    config = decoder_config.gpt_neo(
        vocabulary_size=reader.size("vocab_size"),
        max_positions=reader.size("max_position_embeddings"),
        layers=reader.size("num_layers"),
        width=reader.size("hidden_size"),
        heads=reader.size("num_heads"),
        feed_forward=_optional_size(reader, "intermediate_size"),
    )
    window = reader.size("window_size", 256)
    return dataclasses.replace(
        config,
        windows=tuple(window if kind == LOCAL else None for kind in _kinds(reader)),
        activation=_activation(reader, "activation_function", "gelu_new"),
        layer_norm_epsilon=reader.number("layer_norm_epsilon", 1e-5),
        tied_head=reader.flag("tie_word_embeddings", True),
    )


def _kinds(reader: ConfigReader) -> list[str]:
    """`global` or `local` for each layer, from either of the two keys or both."""
    types = reader.get("attention_types")
    layers = reader.get("attention_layers")
    if types is None:
        expanded = layers if layers is not None else [GLOBAL, LOCAL] * 12
    else:
        try:
            expanded = [kind for kinds, times in types for kind in kinds * times]
        except (TypeError, ValueError):
            raise reader.error(
                "attention_types", "entries such as [['global', 'local'], 12]"
            ) from None
    if not isinstance(expanded, list) or any(
        k not in (GLOBAL, LOCAL) for k in expanded
    ):
        key = "attention_layers" if types is None else "attention_types"
        raise reader.error(key, "'global' or 'local' for each layer")
    if layers is not None and layers != expanded:
        raise reader.error("attention_layers", "the same as in attention_types")
    return expanded


def _gpt_j(reader: ConfigReader) -> DecoderConfig:
    reader.refuse_unless("rotary", True)
    reader.refuse_unless("scale_attn_weights", True)
    reader.refuse_unless("rotary_emb_base", 10_000)
    reader.refuse_unless("rope_theta", 10_000)
    reader.refuse_unless("tie_word_embeddings", False)
    config = decoder_config.gpt_j(
        **_openai_sizes(reader), rotary_dim=reader.size("rotary_dim")
    )
    return dataclasses.replace(
        config,
        activation=_activation(reader, "activation_function", "gelu_new"),
        layer_norm_epsilon=reader.number("layer_norm_epsilon", 1e-5),
    )


def _gpt_neox(reader: ConfigReader) -> DecoderConfig:
    width, heads = reader.size("hidden_size"), reader.size("num_attention_heads")
    reader.refuse_unless("head_dim", width // heads)
    base, fraction = _rope(reader)
    config = decoder_config.gpt_neox(
        vocabulary_size=reader.size("vocab_size"),
        max_positions=reader.size("max_position_embeddings"),
        layers=reader.size("num_hidden_layers"),
        width=width,
        heads=heads,
        feed_forward=reader.size("intermediate_size"),
        rotary_dim=max(1, int(width // heads * fraction)),
    )
    parallel = reader.flag("use_parallel_residual", True)
    bias = reader.flag("attention_bias", True)
    return dataclasses.replace(
        config,
        residual="parallel_two_norms" if parallel else "sequential",
        activation=_activation(reader, "hidden_act", "gelu"),
        layer_norm_epsilon=reader.number("layer_norm_eps", 1e-5),
        rotary_base=base,
        qkv_bias=bias,
        attention_output_bias=bias,
        tied_head=reader.flag("tie_word_embeddings", False),
    )


def _rope(reader: ConfigReader) -> tuple[float, float]:
    """Base and rotated fraction of each head, from the keys of old and of new.

    Up to transformers 4 they were `rotary_emb_base` and `rotary_pct`, then
    `rope_theta` and `partial_rotary_factor`, now inside `rope_parameters`.
    """
    bases = ("rotary_emb_base", "rope_theta")
    fractions = ("rotary_pct", "partial_rotary_factor")
    readers = [reader]
    for key in ("rope_parameters", "rope_scaling"):
        inner = reader.get(key, {})
        known = {"rope_type", "type", *bases, *fractions}
        if not isinstance(inner, dict) or not inner.keys() <= known:
            raise reader.error(key, f"keys among {', '.join(sorted(known))} alone")
        readers.append(ConfigReader(inner, f"{reader.place} in {key}"))
        for kind in ("rope_type", "type"):
            readers[-1].refuse_unless(kind, "default")
    return (
        _agreed(readers, bases, decoder_config.ROTARY_BASE),
        _agreed(readers, fractions, 0.25),
    )


def _agreed(
    readers: list[ConfigReader], keys: tuple[str, ...], default: float
) -> float:
    """The number that every spelling of a key has, where it is given."""
    found = [r.number(key, default) for r in readers for key in keys if key in r]
    if len(set(found)) > 1:
        raise UsageError(
            f"{readers[0].place} gives {found} as {' and '.join(keys)}, expected one "
            "number: correct the file"
        )
    return found[0] if found else default


def _openai_sizes(reader: ConfigReader) -> dict[str, Any]:
    """The sizes of GPT-2 and of GPT-J, in the names of their configs."""
    return {
        "vocabulary_size": reader.size("vocab_size"),
        "max_positions": reader.size("n_positions"),
        "layers": reader.size("n_layer"),
        "width": reader.size("n_embd"),
        "heads": reader.size("n_head"),
        "feed_forward": _optional_size(reader, "n_inner"),
    }


def _activation(reader: ConfigReader, key: str, default: str) -> str:
    value = reader.get(key, default)
    if not isinstance(value, str) or value not in ACTIVATIONS:
        raise reader.error(key, f"one of {', '.join(ACTIVATIONS)}")
    return value


def _optional_size(reader: ConfigReader, key: str) -> int | None:
    return reader.size(key) if key in reader else None


_PARSERS: dict[str, Callable[[ConfigReader], DecoderConfig]] = {
    "gpt2": _gpt2,
    "gpt_neo": _gpt_neo,
    "gpt_j": _gpt_j,
    "gpt_neox": _gpt_neox,
}


def to_json(config: DecoderConfig) -> dict[str, Any]:
    """The keys and values of the config.json from which `parse` reads `config`.

    Dropout is 0: the models here have none. Present and former spellings are both
    written where they differ, since an older transformers would take its default for a
    key that it does not find.
    """
    values = {
        "model_type": _MODEL_TYPES[config.family],
        "architectures": [_ARCHITECTURES[config.family]],
        "vocab_size": config.vocabulary_size,
        "bos_token_id": config.bos_id,
        "eos_token_id": config.eos_id,
        "tie_word_embeddings": config.tied_head,
        "dtype": "float32",
        "torch_dtype": "float32",
    }
    return values | _WRITERS[config.family](config)


def _openai_values(config: DecoderConfig) -> dict[str, Any]:
    return {
        "n_positions": config.max_positions,
        "n_embd": config.width,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_inner": config.feed_forward,
        "activation_function": config.activation,
        "layer_norm_epsilon": config.layer_norm_epsilon,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    }


def _gpt2_values(config: DecoderConfig) -> dict[str, Any]:
    return _openai_values(config) | {
        "scale_attn_weights": config.scale_attention,
        "scale_attn_by_inverse_layer_idx": config.scale_attention_by_layer,
    }


def _gpt_neo_values(config: DecoderConfig) -> dict[str, Any]:
    kinds = [GLOBAL if window is None else LOCAL for window in config.windows]
    windows = {window for window in config.windows if window is not None} or {256}
    (window,) = windows
    period = next(
        p for p in range(1, len(kinds) + 1) if kinds == kinds[:p] * (len(kinds) // p)
    )
    return {
        "max_position_embeddings": config.max_positions,
        "hidden_size": config.width,
        "num_layers": config.num_layers,
        "num_heads": config.num_heads,
        "intermediate_size": config.feed_forward,
        "attention_types": [[kinds[:period], len(kinds) // period]],
        "attention_layers": kinds,
        "window_size": window,
        "activation_function": config.activation,
        "layer_norm_epsilon": config.layer_norm_epsilon,
        "attention_dropout": 0.0,
        "embed_dropout": 0.0,
        "resid_dropout": 0.0,
    }


def _gpt_j_values(config: DecoderConfig) -> dict[str, Any]:
    return _openai_values(config) | {"rotary_dim": config.rotary_dim}


def _gpt_neox_values(config: DecoderConfig) -> dict[str, Any]:
    fraction = config.rotary_dim / config.head_dim
    if int(config.head_dim * fraction) < config.rotary_dim:
        # The reader rounds the product down.
        fraction = math.nextafter(fraction, 2)
    return {
        "max_position_embeddings": config.max_positions,
        "hidden_size": config.width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.feed_forward,
        "hidden_act": config.activation,
        "layer_norm_eps": config.layer_norm_epsilon,
        "use_parallel_residual": config.residual == "parallel_two_norms",
        "attention_bias": config.qkv_bias,
        "rotary_emb_base": config.rotary_base,
        "rotary_pct": fraction,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": config.rotary_base,
            "partial_rotary_factor": fraction,
        },
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }


_WRITERS: dict[str, Callable[[DecoderConfig], dict[str, Any]]] = {
    "gpt2": _gpt2_values,
    "gpt_neo": _gpt_neo_values,
    "gpt_j": _gpt_j_values,
    "gpt_neox": _gpt_neox_values,
}
