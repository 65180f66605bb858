"""Where each tensor of a Hugging Face checkpoint lies among the parameters."""

import re
from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np

from experiments.models.decoder_config import DecoderConfig
from experiments.models.t5_config import T5Config

Config = DecoderConfig | T5Config
Layout = Literal["same", "transposed", "by_head"]


class Slot(NamedTuple):
    """One tensor and its place.

    Attributes:
      tensor: Its name.
      path: Keys of the parameter below "params", such as ("head", "kernel").
      layout: `same`; `transposed`: [out, in], as a linear layer has it there, against
        [in, out] here; `by_head`: the columns of the fused projection of head 0 (its
        queries, keys, values), then of head 1, and so on, transposed too, against all
        queries, all keys, all values here.
      part: 0, 1 or 2 of a tensor that is the queries', keys' or values' third of the
        fused projection; None: it is all of its parameter.
    """

    tensor: str
    path: tuple[str, ...]
    layout: Layout = "same"
    part: int | None = None


def prefix(config: DecoderConfig) -> str:
    """What starts all names but the head's; some folders leave it out."""
    return "gpt_neox." if config.family == "gpt_neox" else "transformer."


def slots(config: Config) -> list[Slot]:
    """All tensors of a checkpoint, in the names that saving uses.

    Example:
      >>> from experiments.models.decoder_config import gpt2
      >>> slots(gpt2(vocabulary_size=8, max_positions=4))[0]
      Slot(tensor='transformer.wte.weight', path=('embedding', 'embedding'), \
layout='same', part=None)
    """
    if isinstance(config, T5Config):
        return list(_t5(config))
    body = _neox_body if config.family == "gpt_neox" else _openai_body
    found = [s._replace(tensor=prefix(config) + s.tensor) for s in body(config)]
    return [*found, *_head(config)]


def copies(config: Config) -> list[tuple[str, str]]:
    """Tensors that some folders hold besides those of `slots`, and what they equal."""
    if isinstance(config, T5Config):
        names = ["encoder.embed_tokens", "decoder.embed_tokens"]
        names += ["lm_head"] if config.tied_head else []
        return [(f"{name}.weight", "shared.weight") for name in names]
    if not config.tied_head:
        return []
    head, table = ("embed_out", "embed_in") if _is_neox(config) else ("lm_head", "wte")
    return [(f"{head}.weight", f"{prefix(config)}{table}.weight")]


def canonical(name: str, config: Config) -> str:
    """The name that `slots` has for a tensor that a folder calls `name`.

    Example:
      >>> from experiments.models.decoder_config import gpt2
      >>> canonical("wte.weight", gpt2(vocabulary_size=8, max_positions=4))
      'transformer.wte.weight'
    """
    if isinstance(config, T5Config):
        return name
    if _is_neox(config):
        name = re.sub(r"^lm_head\.", "embed_out.", name)
    start = prefix(config)
    if name.startswith((start, "lm_head.", "embed_out.")):
        return name
    return start + name


def is_buffer(name: str) -> bool:
    """Whether a canonical name is of something that logits do not depend on.

    Masks and tables that the config determines; and the position biases that the first
    T5 has for attention to the inputs, where nothing reads them.

    Example:
      >>> is_buffer("transformer.h.0.attn.bias")
      True
      >>> is_buffer("transformer.h.0.attn.c_attn.bias")
      False
    """
    return re.fullmatch(_BUFFER, name) is not None


_BUFFER = (
    r"transformer\.h\.\d+\.attn\.(attention\.)?(bias|masked_bias|embed_positions)"
    r"|gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)"
    r"|gpt_neox\.rotary_emb\.inv_freq"
    r"|decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight"
)


def view(parameter: np.ndarray, slot: Slot, config: Config) -> np.ndarray:
    """The part of a parameter that `slot` names, in the order of the tensor's numbers.

    A view: what is written to it is written to the parameter. Its shape is the tensor's
    but for `by_head`, where rows are split into heads, parts and dimensions.
    """
    if slot.part is not None:
        start = slot.part * config.width
        parameter = parameter[..., start : start + config.width]
    if slot.layout == "by_head":
        fused = (3, config.num_heads, config.head_dim)
        split = parameter.reshape(*parameter.shape[:-1], *fused)
        return np.moveaxis(split, (-2, -3, -1), (0, 1, 2))
    return parameter.T if slot.layout == "transposed" else parameter


def tensor_shape(parameter: np.ndarray, slot: Slot, config: Config):
    """Shape of the tensor in a checkpoint."""
    shape = view(parameter, slot, config).shape
    return (parameter.shape[-1], *shape[3:]) if slot.layout == "by_head" else shape


def _is_neox(config: DecoderConfig) -> bool:
    return config.family == "gpt_neox"


def _norm(tensor: str, *path: str) -> Iterator[Slot]:
    yield Slot(f"{tensor}.weight", (*path, "scale"))
    yield Slot(f"{tensor}.bias", (*path, "bias"))


def _dense(
    tensor: str, *path: str, bias: bool = True, layout: Layout = "transposed"
) -> Iterator[Slot]:
    yield Slot(f"{tensor}.weight", (*path, "kernel"), layout)
    if bias:
        bias_layout: Layout = "by_head" if layout == "by_head" else "same"
        yield Slot(f"{tensor}.bias", (*path, "bias"), bias_layout)


def _head(config: DecoderConfig) -> Iterator[Slot]:
    if not config.tied_head:
        name = "embed_out" if _is_neox(config) else "lm_head"
        yield from _dense(name, "head", bias=config.head_bias)


def _openai_body(config: DecoderConfig) -> Iterator[Slot]:
    """GPT-2, GPT-Neo and GPT-J, which share most names."""
    yield Slot("wte.weight", ("embedding", "embedding"))
    if config.learned_positions:
        yield Slot("wpe.weight", ("position_embedding", "embedding"))
    # GPT-2 has [in, out] kernels.
    layout: Layout = "same" if config.family == "gpt2" else "transposed"
    mlp = ("fc_in", "fc_out") if config.family == "gpt_j" else ("c_fc", "c_proj")
    for i in range(config.num_layers):
        name, path = f"h.{i}", f"layers_{i}"
        yield from _norm(f"{name}.ln_1", path, "attention_norm")
        yield from _openai_attention(config, f"{name}.attn", path)
        if config.residual != "parallel_one_norm":
            yield from _norm(f"{name}.ln_2", path, "mlp_norm")
        for tensor, module in zip(mlp, ("mlp_input", "mlp_output"), strict=True):
            yield from _dense(f"{name}.mlp.{tensor}", path, module, layout=layout)
    yield from _norm("ln_f", "final_norm")


def _openai_attention(config: DecoderConfig, name: str, layer: str) -> Iterator[Slot]:
    qkv, output = (layer, "attention", "qkv"), (layer, "attention", "output")
    if config.family == "gpt2":
        yield from _dense(f"{name}.c_attn", *qkv, layout="same")
        yield from _dense(f"{name}.c_proj", *output, layout="same")
        return
    if config.family == "gpt_neo":
        name = f"{name}.attention"
    for part, letter in enumerate("qkv"):
        tensor = f"{name}.{letter}_proj.weight"
        yield Slot(tensor, (*qkv, "kernel"), "transposed", part)
    yield from _dense(f"{name}.out_proj", *output, bias=config.attention_output_bias)


def _neox_body(config: DecoderConfig) -> Iterator[Slot]:
    yield Slot("embed_in.weight", ("embedding", "embedding"))
    for i in range(config.num_layers):
        name, path = f"layers.{i}", f"layers_{i}"
        yield from _norm(f"{name}.input_layernorm", path, "attention_norm")
        yield from _norm(f"{name}.post_attention_layernorm", path, "mlp_norm")
        yield from _dense(
            f"{name}.attention.query_key_value",
            *(path, "attention", "qkv"),
            bias=config.qkv_bias,
            layout="by_head",
        )
        yield from _dense(
            f"{name}.attention.dense",
            *(path, "attention", "output"),
            bias=config.attention_output_bias,
        )
        yield from _dense(f"{name}.mlp.dense_h_to_4h", path, "mlp_input")
        yield from _dense(f"{name}.mlp.dense_4h_to_h", path, "mlp_output")
    yield from _norm("final_layer_norm", "final_norm")


def _t5(config: T5Config) -> Iterator[Slot]:
    yield Slot("shared.weight", ("embedding", "embedding"))
    for stack, num_layers in (
        ("encoder", config.num_layers),
        ("decoder", config.num_decoder_layers),
    ):
        # In the reference, the first layer has it, and the others get it from there.
        bias = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        yield Slot(bias, (stack, "position_bias", "embedding"))
        for i in range(num_layers):
            yield from _t5_layer(config, stack, i)
        yield Slot(f"{stack}.final_layer_norm.weight", (stack, "final_norm", "scale"))
    if not config.tied_head:
        yield from _dense("lm_head", "head", bias=False)


def _t5_layer(config: T5Config, stack: str, layer: int) -> Iterator[Slot]:
    mlp: dict[str, tuple[str, ...]] = {"wi": ("mlp_input",), "wo": ("mlp_output",)}
    if config.activation == "gated_gelu":
        mlp = {"wi_0": ("mlp_gate",), "wi_1": ("mlp_input",), "wo": ("mlp_output",)}
    parts = [("SelfAttention", "attention", _t5_attention("attention"))]
    if stack == "decoder":
        kernels = _t5_attention("cross_attention")
        parts.append(("EncDecAttention", "cross_attention", kernels))
    parts.append(("DenseReluDense", "mlp", mlp))
    path = (stack, f"layers_{layer}")
    for i, (part, module, kernels) in enumerate(parts):
        name = f"{stack}.block.{layer}.layer.{i}"
        yield Slot(f"{name}.layer_norm.weight", (*path, f"{module}_norm", "scale"))
        for tensor, keys in kernels.items():
            yield from _dense(f"{name}.{part}.{tensor}", *path, *keys, bias=False)


def _t5_attention(module: str) -> dict[str, tuple[str, ...]]:
    names = {"q": "query", "k": "key", "v": "value", "o": "output"}
    return {tensor: (module, name) for tensor, name in names.items()}
