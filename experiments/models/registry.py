"""Models by SPEC: `NAME`, or `NAME:OPTION=VALUE:OPTION=VALUE`.

Options are separated by colons, and the entries of a tuple by hyphens, so that commas
are left to separate specs on a command line, and no shell needs quotes:

    mlp
    mlp:hidden_sizes=1024-1024-1024:activation=relu
    transformer:layers=4:width=128
    resnet18:width=16:stem=small
    transformer:layers=6:scan=true:remat=true

A model's options are the keyword arguments of its builder: their names, types and
defaults are read from its signature.
"""

import dataclasses
import difflib
import inspect
import types
import typing
from collections.abc import Callable, Iterable
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from experiments.errors import UsageError
from experiments.models import classifiers, recurrent, resnet, transformer, vgg

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
_BOOLEANS = {"true": True, "false": False}


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
    entry = _entry(spec)
    options = _options(spec, entry)
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
    return _entry(spec).kind


def num_parameters(params: Any) -> int:
    """Number of scalars in a tree of parameters (or of their shapes)."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def _entry(spec: str) -> Entry:
    name = spec.partition(":")[0]
    if name not in MODELS:
        raise UsageError(
            f"model={spec!r} is unknown{_did_you_mean(name, MODELS)}: expected one of "
            f"{', '.join(MODELS)}"
        )
    return MODELS[name]


def _options(spec: str, entry: Entry) -> dict[str, Any]:
    """The options of `spec`, converted to the types of the builder's arguments."""
    types_by_name = _option_types(entry)
    options: dict[str, Any] = {}
    for part in spec.split(":")[1:]:
        name, equals, text = part.partition("=")
        if not equals or name not in types_by_name:
            raise UsageError(
                f"model={spec!r} has the option {part!r}, expected OPTION=VALUE with "
                f"one of {', '.join(types_by_name) or 'none: this model has none'}"
                f"{_did_you_mean(name, types_by_name)}: change --config.model"
            )
        if name in options:
            raise UsageError(f"model={spec!r} sets {name!r} twice: remove one of them")
        options[name] = _converted(spec, name, text, types_by_name[name])
    return options


def _option_types(entry: Entry) -> dict[str, Any]:
    hints = typing.get_type_hints(entry.build)
    return {
        name: hints[name]
        for name, parameter in inspect.signature(entry.build).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }


def _converted(spec: str, name: str, text: str, expected: Any) -> Any:
    """`text` as the type `expected`: integers >= 1, a choice, or true or false."""
    if isinstance(expected, types.UnionType):
        expected = next(t for t in typing.get_args(expected) if t is not type(None))
    if typing.get_origin(expected) is Literal:
        choices = typing.get_args(expected)
        if text in choices:
            return text
        form = f"one of {', '.join(choices)}"
    elif expected is bool:
        if text in _BOOLEANS:
            return _BOOLEANS[text]
        form = f"one of {', '.join(_BOOLEANS)}"
    elif expected is int:
        if _is_positive(text):
            return int(text)
        form = "an integer >= 1"
    else:
        entries = text.split("-")
        if all(_is_positive(entry) for entry in entries):
            return tuple(int(entry) for entry in entries)
        form = "integers >= 1 with hyphens between, such as 64-32"
    raise UsageError(
        f"model={spec!r} has {name}={text!r}, expected {form}: change --config.model"
    )


def _is_positive(text: str) -> bool:
    return text.isascii() and text.isdigit() and int(text) >= 1


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
