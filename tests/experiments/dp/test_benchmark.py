"""Whole benchmarks on the smallest model that has all there is to measure."""

import csv
import dataclasses
import importlib
import json
import os
import pathlib
import subprocess
import sys

import flax.linen as nn
import jax
import matplotlib.image
import pytest

from experiments.dp import (
    benchmark,
    benchmark_config,
    benchmark_problems,
    benchmark_report,
    measuring,
)
from experiments.dp.benchmark_config import BenchmarkConfig
from experiments.dp.benchmark_methods import DEFAULT_METHODS, METHODS, NON_PRIVATE
from experiments.errors import RunError, UsageError
from experiments.models import registry

REPOSITORY = pathlib.Path(__file__).parents[3]
CLIPPING = [name for name, method in METHODS.items() if method.clipped_sum]
CONFIGS = sorted(
    path.stem for path in (REPOSITORY / "experiments/dp/configs").glob("benchmark_*.py")
)

pytestmark = [
    pytest.mark.usefixtures("compiled_once", "compiled_cheaply"),
    # By jax_privacy.
    pytest.mark.filterwarnings("ignore:optax.global_norm is deprecated"),
]

CONFIG = BenchmarkConfig(
    cells="linear@8x8x1@4",
    noise_multiplier=0.0,
    repetitions=2,
    slow_repetitions=1,
    compile_repetitions=1,
    round_seconds=1e-3,
    memory_budget_gb=1e-3,
)


class Linear(nn.Module):
    """One parameter: noise takes most of the compile time, and the same for each."""

    num_classes: int

    @nn.compact
    def __call__(self, images_BxHxWxC):
        x_BxD = images_BxHxWxC.reshape(images_BxHxWxC.shape[0], -1)
        return nn.Dense(self.num_classes, use_bias=False)(x_BxD)


@pytest.fixture(autouse=True)
def small_models(monkeypatch):
    linear = registry.Entry(
        "image", lambda image_shape, num_classes: Linear(num_classes)
    )
    monkeypatch.setitem(registry.MODELS, "linear", linear)


def run(folder, **changes):
    config = dataclasses.replace(CONFIG, out=str(folder), **changes)
    assert benchmark.benchmark(config) == folder.resolve()
    return rows_of(folder)


def rows_of(folder):
    with (folder / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert all(list(row) == list(benchmark_report.COLUMNS) for row in rows)
    return {row["method"]: row for row in rows}


def test_every_method_end_to_end(tmp_path, capsys):
    folder = tmp_path / "new" / "run"
    rows = run(folder, noise_multiplier=1.0)
    assert set(rows) == set(DEFAULT_METHODS)
    for name, row in rows.items():
        assert row["failure"] == ""
        keys = ("model", "input_shape", "batch_size", "num_parameters")
        assert [row[key] for key in keys] == ["linear", "8x8x1", "4", "640"]
        assert row["rounds"] == ("1" if name in CONFIG.slow_methods else "2")
        seconds = float(row["step_seconds"])
        assert float(row["examples_per_second"]) == pytest.approx(4 / seconds)
        for key in ("step_seconds", "step_ratio", "lower_seconds", "compile_seconds"):
            assert float(row[key]) > 0
        for key in ("step_seconds", "step_ratio", "speedup"):
            quartiles = [f"{key}_lower_quartile", key, f"{key}_upper_quartile"]
            values = [float(row[k]) for k in quartiles]
            assert values == sorted(values)
        assert 0 < float(row["temp_bytes"]) < float(row["total_bytes"])
        assert (row["relative_error"] == "") == (name not in CLIPPING)
        assert row["largest_batch"] == ""
    for key in ("step_ratio", "lower_ratio", "compile_ratio", "temp_ratio"):
        assert float(rows[NON_PRIVATE][key]) == 1
    assert float(rows["one_by_one_loop"]["speedup"]) == 1
    # Per-example gradients take their memory.
    for name in ("vmap", "multi_loss"):
        assert float(rows[name]["temp_bytes"]) >= 4 * 4 * 640

    assert {p.name for p in folder.iterdir()} - {".lock"} == {
        "config.json",
        "metrics.jsonl",
        "results.csv",
        "table.md",
        "figure.png",
    }
    record = json.loads((folder / "config.json").read_text())
    assert record["repetitions"] == 2
    assert record["machine"]["versions"]["jax"] == jax.__version__
    assert record["machine"]["cores"] >= 1
    assert record["machine"]["cpu"]
    assert record["machine"]["device_kind"]
    table = (folder / "table.md").read_text()
    lines = [line for line in table.splitlines() if line.startswith("| linear")]
    assert [line.split(" | ")[3] for line in lines] == list(DEFAULT_METHODS)
    assert "largest batch" not in table
    assert "54 to 94" in table
    assert matplotlib.image.imread(folder / "figure.png").std() > 0.05
    output = capsys.readouterr()
    assert table in output.out
    agree = "linear 8x8x1, batch 4: the clipped gradients of 8 methods agree"
    assert agree in output.out
    assert "100%" in output.err


def test_a_stopped_run_continues_with_what_is_missing(tmp_path, monkeypatch):
    cells = "linear@8x8x1@2,linear@8x8x1@3,linear@8x8x1@4"
    whole, measured = measuring.measure, []

    def stops(cell, *args):
        measured.append(cell.batch_size)
        if len(measured) == 2:
            raise KeyboardInterrupt
        return whole(cell, *args)

    monkeypatch.setattr(measuring, "measure", stops)
    changes = {"cells": cells, "methods": (NON_PRIVATE,), "figure": "batch_size"}
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, **changes)
    first = (tmp_path / "results.csv").read_text()
    assert len(first.splitlines()) == 2
    # Stopped while it wrote.
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"spec": {"model": "lin')
    run(tmp_path, **changes)
    assert measured == [2, 3, 3, 4]
    results = (tmp_path / "results.csv").read_text()
    assert results.startswith(first)
    assert [row.split(",")[2] for row in results.splitlines()[1:]] == ["2", "3", "4"]
    run(tmp_path, **changes)
    assert measured == [2, 3, 3, 4]
    assert (tmp_path / "results.csv").read_text() == results


def test_another_config_or_machine_is_not_mixed_in(tmp_path, monkeypatch):
    run(tmp_path, methods=(NON_PRIVATE,))
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(UsageError, match=r"holds a run with repetitions=2 \(now 3\)"):
        run(tmp_path, methods=(NON_PRIVATE,), repetitions=3)
    monkeypatch.setattr(
        benchmark.machine, "describe", lambda: {"cpu": "another", "cores": 64}
    )
    with pytest.raises(UsageError, match="holds a run with machine="):
        run(tmp_path, methods=(NON_PRIVATE,))
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_a_foreign_folder_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"holds 'notes\.txt'"):
        run(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} - {".lock"} == {"notes.txt"}


def test_methods_left_out_of_a_cell(tmp_path):
    rows = run(
        tmp_path,
        cells="linear@8x8x1@4@without=vmap",
        methods=("noise_only", "vmap"),
    )
    assert list(rows) == [NON_PRIVATE, "noise_only"]


def test_nothing_measured_is_a_failure(tmp_path, monkeypatch):
    monkeypatch.setattr(measuring, "free_bytes", lambda: 0)
    message = "every method failed, the first with nothing to check against: MemoryErr"
    with pytest.raises(RunError, match=message):
        run(tmp_path, methods=("auto",))
    assert (tmp_path / "results.csv").exists()


def test_main_ends_with_the_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    values = dataclasses.asdict(dataclasses.replace(CONFIG, methods=(NON_PRIVATE,)))
    config = benchmark_config.make("tiny", {"tiny": ()})
    config.update(values)
    monkeypatch.setattr(benchmark.command_line, "load_config", lambda: config)
    monkeypatch.setattr(benchmark.jax.config, "update", lambda name, value: None)
    benchmark.main()
    folder = pathlib.Path(
        capsys.readouterr().out.splitlines()[-1].removeprefix("Run folder: ")
    )
    assert folder.parent == tmp_path / "runs"
    assert folder.name.startswith("benchmark-")
    assert (folder / "figure.png").exists()


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("cnnn@8x8x1@4", r"model='cnnn' is unknown.*did you mean 'cnn'"),
        ("mlp@512@4", r"takes inputs of shape \(H, W, C\)"),
    ],
)
def test_an_impossible_model_touches_no_folder(tmp_path, cell, message):
    folder = tmp_path / "run"
    with pytest.raises(UsageError, match=message):
        run(folder, cells=f"linear@8x8x1@4,{cell}")
    assert not folder.exists()


def config_of(name, scale):
    module = importlib.import_module(f"experiments.dp.configs.{name}")
    return benchmark_config.parse(module.get_config(scale))


def test_every_config_at_every_scale_names_models_that_exist():
    cells = {
        (cell.model, cell.input_shape): cell
        for name in CONFIGS
        for scale in benchmark_config.SCALES
        for cell in config_of(name, scale).cell_specs
    }
    assert len(cells) > 40
    for cell in cells.values():
        benchmark_problems.build_model(cell)


def test_every_figure_has_a_config_and_runs(tmp_path):
    figures = set()
    for name in CONFIGS:
        config = config_of(name, "tiny")
        figures.add(config.figure)
        folder = tmp_path / name
        rows = run(folder, figure=config.figure, methods=(NON_PRIVATE,), check=False)
        assert list(rows) == [NON_PRIVATE]
        assert matplotlib.image.imread(folder / "figure.png").std() > 0.02
    assert figures == set(benchmark_config.FIGURES)


def test_memory_is_found_without_a_step(tmp_path, monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError

    monkeypatch.setattr(measuring.timing, "warmed_up", never)
    monkeypatch.setattr(benchmark_problems, "make_problem", never)
    methods = ("vmap", "one_by_one_loop")
    rows = run(tmp_path, figure="memory", methods=methods, memory_budget_gb=1e-4)
    largest = {name: int(row["largest_batch"]) for name, row in rows.items()}
    # The gradients of vmap alone, in float32, and the images of each.
    assert 0 < largest["vmap"] < 1e5 / (4 * 640)
    assert largest["vmap"] < largest[NON_PRIVATE] < 1e5 / (4 * 64)
    ratio = largest["vmap"] / largest[NON_PRIVATE]
    assert float(rows["vmap"]["largest_batch_ratio"]) == pytest.approx(ratio)
    assert rows["vmap"]["step_seconds"] == ""
    assert "largest batch" in (tmp_path / "table.md").read_text()


def test_wrong_usage_is_one_line_and_code_2():
    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "experiments.dp.benchmark",
            "--config=experiments/dp/configs/benchmark_depth.py:tiny",
            "--config.cells=lstm@8x8x1@4,transformer:layers=1@8@4@without=ghost",
        ],
        cwd=REPOSITORY,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2, result.stderr
    wrong = "transformer:layers=1@8@4@without=ghost"
    assert result.stderr.startswith(f"error: config.cells has '{wrong}', expected")
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""
