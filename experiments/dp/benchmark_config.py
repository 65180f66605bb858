"""The keys of a benchmark config: their types, defaults and limits."""

import dataclasses
import difflib
import math
from collections.abc import Mapping
from typing import Any

import ml_collections

from experiments import typed_config
from experiments.dp import benchmark_cells
from experiments.dp.benchmark_cells import CellSpec
from experiments.dp.benchmark_methods import DEFAULT_METHODS, METHODS, NON_PRIVATE
from experiments.errors import UsageError
from experiments.typed_config import expect

# What is drawn, which also says what is measured.
STEP_TIME, BATCH_SIZE, DEPTH, IMAGE_SIZE, MEMORY, COMPILE_TIME = FIGURES = (
    "step_time",
    "batch_size",
    "depth",
    "image_size",
    "memory",
    "compile_time",
)

# Sweeps have many cells, so they take fewer methods and rounds; the gradients of these
# architectures are checked in the figure of all classifiers.
SWEEP: dict[str, Any] = {
    "methods": ("auto", "reweight", "jax_privacy", "multi_loss", "one_by_one_loop"),
    "check": False,
    "repetitions": 11,
    "slow_repetitions": 3,
    "compile_repetitions": 1,
}

# What depends on the machine: to see it run, for two cores, for a GPU or a TPU.
SCALES: dict[str, dict[str, Any]] = {
    "tiny": {
        "repetitions": 2,
        "slow_repetitions": 1,
        "compile_repetitions": 1,
        "round_seconds": 0.001,
        "memory_budget_gb": 0.01,
    },
    "small": {"memory_budget_gb": 4.0},
    "full": {"memory_budget_gb": 64.0},
}


@dataclasses.dataclass(frozen=True)
class BenchmarkConfig:
    """What is measured, and how often. On the command line a tuple is written a,b,c.

    Attributes:
      figure: `step_time` draws the times as bars, `batch_size`, `depth` and
        `image_size` as lines over what the cells differ in; `compile_time` compiles
        only; `memory` compiles only, and seeks the largest batch within the budget.
      cells: Each `MODEL@SHAPE@BATCH`, with commas between; see `benchmark_cells`.
      methods: What is compared; the non-private step is measured in any case.
      noise_multiplier: Of the private steps; 0 leaves the noise out, whose cost is the
        same for every method, and shows the cost of clipping alone.
      check: Whether each clipped gradient is first compared with one computed one
        example at a time, which takes one more compilation of each method.
      repetitions: Rounds of each method.
      slow_methods: These take part in `slow_repetitions` rounds only.
      slow_repetitions: At most `repetitions`.
      compile_repetitions: How often each method is traced and compiled.
      round_seconds: In a round a step is repeated for about so long.
      memory_budget_gb: What a step of the largest batch may take, in 1e9 bytes; of the
        figure `memory` alone.
      out: The run folder, empty, new, or one to continue; by default a new one under
        runs/.
    """

    figure: str = STEP_TIME
    # Not a tuple: what a command line gives for one has to be Python.
    cells: str = "mlp@28x28x1@128,cnn@28x28x1@128"
    methods: tuple[str, ...] = DEFAULT_METHODS
    noise_multiplier: float = 1.0
    check: bool = True
    repetitions: int = 31
    slow_methods: tuple[str, ...] = (
        "vmap",
        "jax_privacy",
        "multi_loss",
        "one_by_one_loop",
        "one_by_one_scan",
    )
    slow_repetitions: int = 7
    compile_repetitions: int = 3
    round_seconds: float = 0.1
    memory_budget_gb: float = 4.0
    out: str = ""

    @property
    def cell_specs(self) -> list[CellSpec]:
        """The cells, read."""
        texts = (text.strip() for text in self.cells.split(","))
        return [benchmark_cells.parse(text, _OPTIONAL) for text in texts]

    def methods_of(self, cell: CellSpec) -> tuple[str, ...]:
        """Those that are measured on `cell`: the non-private step comes first."""
        names = dict.fromkeys((NON_PRIVATE, *self.methods))
        return tuple(name for name in names if name not in cell.without)

    def rounds(self, method: str) -> int:
        """In how many rounds `method` takes part."""
        return (
            self.slow_repetitions if method in self.slow_methods else self.repetitions
        )


_OPTIONAL = tuple(name for name in METHODS if name != NON_PRIVATE)


def make(
    scale: str, cells: Mapping[str, tuple[str, ...]], **values: Any
) -> ml_collections.ConfigDict:
    """The `ConfigDict` of a `BenchmarkConfig` at one of `SCALES`, for configs/.

    Args:
      scale: What stands after the colon in `--config=FILE.py:SCALE`.
      cells: The cells at each scale.
      **values: Other keys; those of the scale override them.

    Raises:
      UsageError: No such scale.

    Example:
      >>> config = make("tiny", {"tiny": ("mlp@8x8x1@4",)}, figure="compile_time")
      >>> config.cells, config.repetitions
      ('mlp@8x8x1@4', 2)
    """
    if scale not in cells:
        raise UsageError(
            f"the scale {scale!r} is unknown: expected --config=FILE.py:SCALE with one "
            f"of {', '.join(cells)}"
        )
    return typed_config.make(
        BenchmarkConfig, **{**values, **SCALES[scale], "cells": ",".join(cells[scale])}
    )


def parse(config: ml_collections.ConfigDict) -> BenchmarkConfig:
    """Checks every key and value, but for the models, which depend on the inputs.

    Raises:
      UsageError: Names the key, its value, what was expected and the remedy.
    """
    parsed = typed_config.parse(BenchmarkConfig, config.to_dict())
    ok = parsed.figure in FIGURES
    expect(parsed, "figure", ok, f"one of {', '.join(FIGURES)}")
    ok = len(parsed.methods) > 0 and len(set(parsed.methods)) == len(parsed.methods)
    expect(parsed, "methods", ok, "different entries, at least one")
    for name in ("methods", "slow_methods"):
        _check_methods(name, getattr(parsed, name))
    specs = [str(cell) for cell in parsed.cell_specs]
    ok = len(set(specs)) == len(specs)
    expect(parsed, "cells", ok, "cells that differ in more than what is left out")
    ok = NON_PRIVATE not in parsed.slow_methods
    expect(parsed, "slow_methods", ok, f"methods other than {NON_PRIVATE}")
    for name in ("repetitions", "slow_repetitions", "compile_repetitions"):
        expect(parsed, name, getattr(parsed, name) >= 1, "an integer >= 1")
    ok = parsed.slow_repetitions <= parsed.repetitions
    expect(parsed, "slow_repetitions", ok, f"at most repetitions={parsed.repetitions}")
    ok = 0 <= parsed.noise_multiplier < math.inf
    expect(parsed, "noise_multiplier", ok, "a finite number >= 0")
    ok = 0 < parsed.round_seconds <= 60
    expect(parsed, "round_seconds", ok, "0 < round_seconds <= 60")
    ok = 0 < parsed.memory_budget_gb < math.inf
    expect(parsed, "memory_budget_gb", ok, "a finite number > 0")
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
