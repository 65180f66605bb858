"""Configs as dataclasses: their `ConfigDict`, and checks of keys, types and ranges."""

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

import ml_collections
from ml_collections import config_dict

from experiments.errors import UsageError

T = TypeVar("T")


def make(config_class: type, **values: Any) -> ml_collections.ConfigDict:
    """The `ConfigDict` of `config_class(**values)`, for config files.

    A key whose default is None becomes a placeholder of its type, so that the command
    line can set it.
    """
    config = ml_collections.ConfigDict()
    for field in dataclasses.fields(config_class):
        config[field.name] = (
            config_dict.placeholder(_plain_type(config_class, field.name))
            if field.default is None
            else field.default
        )
    config.update(values)
    return config


def check_keys(config_class: type, values: Mapping[str, Any]) -> None:
    """Compares keys with the fields of `config_class`.

    Raises:
      UsageError: Names an unknown key and the nearest known ones, or a missing key.
    """
    known = [field.name for field in dataclasses.fields(config_class)]
    for name in values:
        if name in known:
            continue
        close = difflib.get_close_matches(name, known, n=2)
        hint = f"did you mean {' or '.join(close)}? " if close else ""
        raise UsageError(
            f"config key {name!r} is unknown: {hint}the keys are {', '.join(known)}"
        )
    missing = [name for name in known if name not in values]
    if missing:
        raise UsageError(
            f"the config lacks {', '.join(missing)}: start it from "
            f"{config_class.__module__}.make()"
        )


def parse(config_class: type[T], values: Mapping[str, Any]) -> T:
    """Returns `config_class(**values)` with its keys and types checked.

    An integer will do for a float, and `"a,b"` for the strings `"a", "b"` in a tuple,
    which is how the command line gives them.

    Raises:
      UsageError: Names the key, its value, what was expected and the remedy.
    """
    check_keys(config_class, values)
    return config_class(**{k: _checked(config_class, k, v) for k, v in values.items()})


def expect(config: Any, name: str, ok: bool, expected: str) -> None:
    """Raises `UsageError` about the key `name` unless `ok`."""
    if not ok:
        raise UsageError(
            f"config.{name}={getattr(config, name)!r}, expected {expected}: change "
            f"--config.{name}"
        )


def _plain_type(config_class: type, name: str) -> Any:
    annotation = typing.get_type_hints(config_class)[name]
    if isinstance(annotation, types.UnionType):
        return next(t for t in typing.get_args(annotation) if t is not type(None))
    return annotation


def _checked(config_class: type, name: str, value: Any) -> Any:
    expected = _plain_type(config_class, name)
    if value is None and getattr(config_class, name) is None:
        return None
    if expected is float and type(value) is int:
        return float(value)
    if typing.get_origin(expected) is tuple:
        return _checked_tuple(name, value, typing.get_args(expected)[0])
    if type(value) is not expected:
        raise UsageError(
            f"config.{name}={value!r} is {type(value).__name__}, expected "
            f"{expected.__name__}: set --config.{name} to one"
        )
    return value


def _checked_tuple(name: str, value: Any, entry: type) -> Any:
    entries = value if isinstance(value, tuple) else (value,)
    if entry is str and all(type(v) is str for v in entries):
        return tuple(part.strip() for v in entries for part in v.split(","))
    if type(value) is tuple and all(type(v) is entry for v in value):
        return value
    raise UsageError(
        f"config.{name}={value!r}, expected a tuple of {entry.__name__}: set "
        f"--config.{name}=A,B,C"
    )
