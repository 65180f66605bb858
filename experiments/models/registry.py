"""Models by SPEC: `NAME`, or `NAME:OPTION=VALUE:OPTION=VALUE`.

For example:

    mlp
    mlp:hidden_sizes=1024-1024-1024:activation=relu
    transformer:layers=4:width=128
    resnet18:width=16:stem=small
    transformer:layers=6:scan=true:remat=true

See `experiments.models.model_spec`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from experiments.errors import UsageError
from experiments.models import (
    classifiers,
    model_spec,
    recurrent,
    resnet,
    transformer,
    vgg,
)

InputKind = Literal["image", "tokens"]


@dataclasses.dataclass(frozen=True)
class Entry:
    """A model that can be named.

    Attributes:
      kind: What it takes: images f32[B, H, W, C] or token ids i32[B, T].
      build: Called with the shape of one input, the number of classes, and options by
        keyword. Raises `ValueError` about options that no inputs would fit.
    """

    kind: InputKind
    build: Callable[..., nn.Module]


MODELS: dict[str, Entry] = {
    "mlp": Entry("image", classifiers.mlp),
    "cnn": Entry("image", classifiers.cnn),
    "tempered_cnn": Entry("image", classifiers.tempered_cnn),
    "rnn": Entry("image", recurrent.rnn),
    "lstm": Entry("image", recurrent.lstm),
    "transformer": Entry("tokens", transformer.transformer),
    "resnet18": Entry("image", resnet.resnet18),
    "resnet34": Entry("image", resnet.resnet34),
    "resnet50": Entry("image", resnet.resnet50),
    "resnet101": Entry("image", resnet.resnet101),
    "vgg11": Entry("image", vgg.vgg11),
    "vgg13": Entry("image", vgg.vgg13),
    "vgg16": Entry("image", vgg.vgg16),
    "vgg19": Entry("image", vgg.vgg19),
}

_INPUTS = {
    "image": ("(H, W, C)", 3, jnp.float32),
    "tokens": ("(T,)", 1, jnp.int32),
}


def build(spec: str, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Returns the classifier that `spec` describes; it maps inputs to logits_BxV.

    Args:
      spec: `NAME` or `NAME:OPTION=VALUE:...`.
      input_shape: Of one example: (H, W, C) for images, (T,) for token ids.
      num_classes: Width of the logits.

    Raises:
      UsageError: No such model or option, or inputs that do not fit the model.

    Example:
      >>> model = build("mlp", (28, 28, 1), num_classes=10)
      >>> images = jnp.zeros((1, 28, 28, 1))
      >>> num_parameters(jax.eval_shape(model.init, jax.random.key(0), images))
      136074
      >>> build("mlp:hidden_sizes=64-32", (8, 8, 1), num_classes=10).hidden_sizes
      (64, 32)
    """
    name, options = model_spec.parse(spec, {n: e.build for n, e in MODELS.items()})
    entry = MODELS[name]
    form, num_dims, dtype = _INPUTS[entry.kind]
    if len(input_shape) != num_dims:
        others = ", ".join(n for n, e in MODELS.items() if e.kind != entry.kind)
        raise UsageError(
            f"model={spec!r} takes inputs of shape {form} ({entry.kind}), but the data "
            f"have shape {input_shape}: choose other data, or another model"
            + (f" ({others})" if others else "")
        )
    try:
        model = entry.build(input_shape, num_classes, **options)
        inputs = jax.ShapeDtypeStruct((1, *input_shape), dtype)
        jax.eval_shape(model.init, jax.random.key(0), inputs)
    except (ValueError, ZeroDivisionError) as error:
        raise UsageError(
            f"model={spec!r} does not fit {entry.kind} inputs of shape {input_shape}: "
            f"{error}; change its options, or choose another model"
        ) from error
    return model


def input_kind(spec: str) -> InputKind:
    """What the model takes: images f32[B, H, W, C] or token ids i32[B, T].

    Raises:
      UsageError: No such model.

    Example:
      >>> input_kind("cnn:channels=8-16")
      'image'
    """
    return MODELS[model_spec.name_of(spec, MODELS)].kind


def num_parameters(params: Any) -> int:
    """Number of scalars in a tree of parameters (or of their shapes)."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))
