"""The keys of a benchmark config: their types, defaults and limits."""

import dataclasses
import difflib
import math
from typing import Any

import ml_collections

from experiments import typed_config
from experiments.dp.benchmark_methods import METHODS, NON_PRIVATE
from experiments.errors import UsageError
from experiments.typed_config import expect


@dataclasses.dataclass(frozen=True)
class BenchmarkConfig:
    """What is measured, and how often. On the command line a tuple is written a,b,c.

    Attributes:
      models: Specs of `experiments.models.registry`.
      batch_sizes: Examples per step; lower them for a small machine.
      image_shape: Height, width and channels of the random images.
      noise_multiplier: Of the private steps; 0 leaves the noise out, whose cost is the
        same for every method, and shows the cost of clipping alone.
      methods: What is compared; the non-private step is measured in any case.
      repetitions: Rounds of each method.
      slow_methods: These take part in `slow_repetitions` rounds only.
      slow_repetitions: At most `repetitions`.
      compile_repetitions: How often each method is traced and compiled.
      round_seconds: In a round a step is repeated for about so long.
      out: The run folder, empty or new; by default a new one under runs/.
    """

    models: tuple[str, ...] = ("mlp", "cnn")
    batch_sizes: tuple[int, ...] = (128,)
    image_shape: tuple[int, ...] = (28, 28, 1)
    noise_multiplier: float = 1.0
    methods: tuple[str, ...] = tuple(METHODS)
    repetitions: int = 31
    slow_methods: tuple[str, ...] = (
        "vmap",
        "jax_privacy",
        "one_by_one_loop",
        "one_by_one_scan",
    )
    slow_repetitions: int = 7
    compile_repetitions: int = 3
    round_seconds: float = 0.1
    out: str = ""

    @property
    def all_methods(self) -> tuple[str, ...]:
        """`methods` with the non-private step first."""
        return tuple(dict.fromkeys((NON_PRIVATE, *self.methods)))

    def rounds(self, method: str) -> int:
        """In how many rounds `method` takes part."""
        return (
            self.slow_repetitions if method in self.slow_methods else self.repetitions
        )


def make(**values: Any) -> ml_collections.ConfigDict:
    """The `ConfigDict` of `BenchmarkConfig(**values)`, for the files in configs/.

    Example:
      >>> make(batch_sizes=(32,)).batch_sizes
      (32,)
    """
    return typed_config.make(BenchmarkConfig, **values)


def parse(config: ml_collections.ConfigDict) -> BenchmarkConfig:
    """Checks every key and value, but for the models, which depend on the images.

    Raises:
      UsageError: Names the key, its value, what was expected and the remedy.
    """
    parsed = typed_config.parse(BenchmarkConfig, config.to_dict())
    for name in ("models", "batch_sizes", "methods"):
        entries = getattr(parsed, name)
        ok = len(entries) > 0 and len(set(entries)) == len(entries)
        expect(parsed, name, ok, "different entries, at least one")
    for name in ("methods", "slow_methods"):
        _check_methods(name, getattr(parsed, name))
    ok = NON_PRIVATE not in parsed.slow_methods
    expect(parsed, "slow_methods", ok, f"methods other than {NON_PRIVATE}")
    for name in ("repetitions", "slow_repetitions", "compile_repetitions"):
        expect(parsed, name, getattr(parsed, name) >= 1, "an integer >= 1")
    ok = parsed.slow_repetitions <= parsed.repetitions
    expect(parsed, "slow_repetitions", ok, f"at most repetitions={parsed.repetitions}")
    ok = min(parsed.batch_sizes) >= 1
    expect(parsed, "batch_sizes", ok, "integers >= 1")
    ok = len(parsed.image_shape) == 3 and min(parsed.image_shape) >= 1
    expect(parsed, "image_shape", ok, "height, width and channels >= 1")
    ok = 0 <= parsed.noise_multiplier < math.inf
    expect(parsed, "noise_multiplier", ok, "a finite number >= 0")
    ok = 0 < parsed.round_seconds <= 60
    expect(parsed, "round_seconds", ok, "0 < round_seconds <= 60")
    return parsed


def _check_methods(key: str, names: tuple[str, ...]) -> None:
    for name in names:
        if name in METHODS:
            continue
        close = difflib.get_close_matches(name, METHODS, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise UsageError(
            f"config.{key} has {name!r}, which is unknown{hint}: expected some of "
            f"{', '.join(METHODS)}: change --config.{key}"
        )
