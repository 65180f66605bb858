"""Reads a config.json key by key, and says what is wrong with one by its name."""

import math
from typing import Any

from experiments.errors import UsageError


class ConfigReader:
    """The keys of a config.json; what is wrong with one is said with its name."""

    def __init__(self, values: dict[str, Any], place: str) -> None:
        self._values, self.place = values, place

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def error(self, key: str, expected: str) -> UsageError:
        return UsageError(
            f"{self.place} has {key}={self._values.get(key)!r}, expected {expected}: "
            "choose another model"
        )

    def get(self, key: str, default: Any = None) -> Any:
        """The value; a null or missing one is `default`."""
        return self._values[key] if key in self else default

    def size(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if type(value) is not int or value < 1:
            raise self.error(key, "an integer >= 1")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.get(key, default)
        if type(value) not in (int, float) or not (0 < value < math.inf):
            raise self.error(key, "a number > 0")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if type(value) is not bool:
            raise self.error(key, "true or false")
        return value

    def token(self, key: str) -> int | None:
        """One id; of a list, which some models have for `eos_token_id`, the first."""
        value = self.get(key)
        value = value[0] if isinstance(value, list) and value else value
        if value is not None and type(value) is not int:
            raise self.error(key, "a token id")
        return value

    def refuse_unless(self, key: str, *allowed: Any) -> None:
        """Raises unless the key is missing, null or one of the values `allowed`."""
        if key in self and self._values[key] not in allowed:
            what = " or ".join(repr(value) for value in allowed)
            raise self.error(key, f"{what or 'none'}, for anything else is not built")
