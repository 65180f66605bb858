"""Reads a SPEC: `NAME`, or `NAME:OPTION=VALUE:OPTION=VALUE`.

Options are separated by colons, and the entries of a tuple by hyphens, so that commas
are left to separate specs on a command line, and no shell needs quotes. A model's
options are the keyword arguments of its builder: their names, types and defaults are
read from its signature.
"""

import difflib
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from experiments.errors import UsageError

_BOOLEANS = {"true": True, "false": False}


def name_of(spec: str, names: Iterable[str]) -> str:
    """The name in `spec`.

    Raises:
      UsageError: It is not one of `names`.
    """
    name, known = spec.partition(":")[0], list(names)
    if name not in known:
        raise UsageError(
            f"model={spec!r} is unknown{_did_you_mean(name, known)}: expected one of "
            f"{', '.join(known)}"
        )
    return name


def parse(
    spec: str, builders: Mapping[str, Callable[..., Any]]
) -> tuple[str, dict[str, Any]]:
    """The name in `spec`, and its options in the types of the builder's arguments.

    Raises:
      UsageError: No such name or option, or a value of another type.

    Example:
      >>> def mlp(*, sizes: tuple[int, ...] = (8,), bias: bool = True): ...
      >>> parse("mlp:sizes=64-32:bias=false", {"mlp": mlp})
      ('mlp', {'sizes': (64, 32), 'bias': False})
    """
    name = name_of(spec, builders)
    types_by_name = _option_types(builders[name])
    options: dict[str, Any] = {}
    for part in spec.split(":")[1:]:
        option, equals, text = part.partition("=")
        if not equals or option not in types_by_name:
            raise UsageError(
                f"model={spec!r} has the option {part!r}, expected OPTION=VALUE with "
                f"one of {', '.join(types_by_name) or 'none: this model has none'}"
                f"{_did_you_mean(option, types_by_name)}: change --config.model"
            )
        if option in options:
            raise UsageError(
                f"model={spec!r} sets {option!r} twice: remove one of them"
            )
        options[option] = _converted(spec, option, text, types_by_name[option])
    return name, options


def _option_types(build: Callable[..., Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(build)
    return {
        name: hints[name]
        for name, parameter in inspect.signature(build).parameters.items()
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
