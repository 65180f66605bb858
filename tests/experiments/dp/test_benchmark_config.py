import dataclasses

import pytest

from experiments.dp import benchmark_config
from experiments.dp.benchmark_cells import CellSpec
from experiments.dp.benchmark_config import BenchmarkConfig
from experiments.dp.benchmark_methods import DEFAULT_METHODS, NON_PRIVATE
from experiments.errors import UsageError

CELLS = {"small": ("mlp@8x8x1@4",), "full": ("mlp@28x28x1@128", "cnn@28x28x1@128")}


def parse(**changes):
    config = benchmark_config.make("small", CELLS)
    config.update(dataclasses.asdict(dataclasses.replace(BenchmarkConfig(), **changes)))
    return benchmark_config.parse(config)


def test_the_scale_chooses_the_cells_and_the_effort():
    small, full = (
        benchmark_config.parse(benchmark_config.make(scale, CELLS, figure="depth"))
        for scale in CELLS
    )
    assert small.cell_specs == [CellSpec("mlp", (8, 8, 1), 4)]
    assert full.cell_specs == [
        CellSpec("mlp", (28, 28, 1), 128),
        CellSpec("cnn", (28, 28, 1), 128),
    ]
    assert full.figure == small.figure == "depth"
    assert full.memory_budget_gb > small.memory_budget_gb
    with pytest.raises(UsageError, match=r"scale 'tiny' is unknown.*of small, full"):
        benchmark_config.make("tiny", CELLS)


def test_the_effort_of_the_scale_comes_before_that_of_the_figure():
    cells = {"tiny": ("mlp@8x8x1@4",)}
    config = benchmark_config.make("tiny", cells, **benchmark_config.SWEEP)
    assert config.repetitions == 2
    assert config.methods == benchmark_config.SWEEP["methods"]


def test_the_non_private_step_comes_first_and_cells_leave_methods_out():
    config = parse(methods=("auto", "vmap"), slow_methods=("vmap",))
    cell = CellSpec("mlp", (8, 8, 1), 4)
    assert config.methods_of(cell) == (NON_PRIVATE, "auto", "vmap")
    without = dataclasses.replace(cell, without=("auto",))
    assert config.methods_of(without) == (NON_PRIVATE, "vmap")
    assert config.rounds("auto") == config.repetitions
    assert config.rounds("vmap") == config.slow_repetitions
    assert parse().methods_of(cell) == DEFAULT_METHODS


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"methods": ("auto", "ghost")},
            "config.methods has 'ghost', which is unknown",
        ),
        ({"methods": ("vmapp",)}, "did you mean 'vmap'"),
        ({"methods": ()}, r"config.methods=\(\), expected different entries"),
        ({"methods": ("auto", "auto")}, "expected different entries"),
        ({"slow_methods": ("slow",)}, "config.slow_methods has 'slow'"),
        ({"slow_methods": (NON_PRIVATE,)}, "expected methods other than nonprivate"),
        ({"repetitions": 0}, "config.repetitions=0, expected an integer >= 1"),
        ({"compile_repetitions": 0}, "config.compile_repetitions=0, expected"),
        ({"slow_repetitions": 99}, "config.slow_repetitions=99, expected at most"),
        ({"cells": ""}, "config.cells has '', expected MODEL@SHAPE@BATCH"),
        ({"cells": "mlp@8x8x1@0"}, "config.cells has 'mlp@8x8x1@0', expected a"),
        (
            {"cells": "mlp@8x8x1@4, mlp@8x8x1@4@without=vmap"},
            "expected cells that differ in more than what is left out",
        ),
        (
            {"cells": "mlp@8x8x1@4@without=nonprivate"},
            "expected without=METHOD.METHOD of noise_only",
        ),
        ({"figure": "speed"}, "config.figure='speed', expected one of step_time"),
        ({"noise_multiplier": -1.0}, "config.noise_multiplier=-1.0, expected"),
        ({"round_seconds": 0.0}, "config.round_seconds=0.0, expected 0 <"),
        ({"memory_budget_gb": 0.0}, "config.memory_budget_gb=0.0, expected"),
    ],
)
def test_bad_config(changes, message):
    with pytest.raises(UsageError, match=message) as error:
        parse(**changes)
    assert "\n" not in str(error.value)
