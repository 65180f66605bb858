import dataclasses

import pytest

from experiments import typed_config
from experiments.errors import UsageError


@dataclasses.dataclass(frozen=True)
class Config:
    names: tuple[str, ...] = ("a",)
    sizes: tuple[int, ...] = (1,)
    rate: float | None = None


def parse(**values):
    config = typed_config.make(Config, **values)
    return typed_config.parse(Config, config.to_dict())


@pytest.mark.parametrize("value", [("a,b",), ("a", "b"), ("a, b",), ["a", "b"]])
def test_names_are_split_at_commas(value):
    # ml_collections makes ("a,b",) of --config.names=a,b.
    config = typed_config.make(Config).to_dict()
    if isinstance(value, list):
        value = ",".join(value)
    config["names"] = value
    assert typed_config.parse(Config, config).names == ("a", "b")


def test_defaults_pass_through():
    assert parse() == Config()
    assert parse(rate=2.0, sizes=(3, 4)) == Config(sizes=(3, 4), rate=2.0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"sizes": 3}, "config.sizes=3, expected a tuple of int"),
        ({"sizes": (1, 2.5)}, r"config.sizes=\(1, 2.5\), expected a tuple of int"),
        ({"names": (1,)}, r"config.names=\(1,\), expected a tuple of str"),
        ({"rate": "fast"}, "config.rate='fast' is str, expected float"),
        ({"rates": 1.0}, "config key 'rates' is unknown: did you mean rate"),
    ],
)
def test_wrong_values(values, message):
    config = {**typed_config.make(Config).to_dict(), **values}
    with pytest.raises(UsageError, match=message):
        typed_config.parse(Config, config)


def test_missing_key():
    with pytest.raises(UsageError, match="the config lacks sizes"):
        typed_config.parse(Config, {"names": ("a",), "rate": None})
