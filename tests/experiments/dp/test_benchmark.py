"""Whole benchmarks on the smallest model that has all there is to measure."""

import csv
import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib.image
import numpy as np
import optax
import pytest

from experiments.dp import (
    benchmark,
    benchmark_config,
    benchmark_methods,
    benchmark_report,
    measuring,
)
from experiments.dp.benchmark_config import BenchmarkConfig
from experiments.dp.benchmark_methods import METHODS, NON_PRIVATE
from experiments.dp.benchmark_report import Cell
from experiments.dp.measuring import Result
from experiments.dp.steps import Data
from experiments.dp.timing import Spread
from experiments.errors import RunError, UsageError
from experiments.models import registry

REPOSITORY = pathlib.Path(__file__).parents[3]
CLIPPING = [name for name, method in METHODS.items() if method.clipped_sum]

pytestmark = [
    pytest.mark.usefixtures("compiled_once"),
    # By jax_privacy.
    pytest.mark.filterwarnings("ignore:optax.global_norm is deprecated"),
]

CONFIG = BenchmarkConfig(
    models=("linear",),
    batch_sizes=(4,),
    image_shape=(8, 8, 1),
    repetitions=2,
    slow_repetitions=1,
    compile_repetitions=1,
    round_seconds=1e-3,
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


@pytest.fixture(autouse=True, scope="module")
def cheap_compilation():
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def run(folder, **changes):
    config = dataclasses.replace(CONFIG, out=str(folder), **changes)
    assert benchmark.benchmark(config) == folder.resolve()
    with (folder / "results.csv").open() as file:
        return {row["method"]: row for row in csv.DictReader(file)}


def problem_for(model):
    return benchmark_methods.make_problem(
        benchmark_methods.build_model(model, (8, 8, 1)),
        benchmark_methods.random_batch((8, 8, 1), batch_size=4),
        noise_multiplier=0.0,
    )


def test_every_method_end_to_end(tmp_path, capsys):
    folder = tmp_path / "new" / "run"
    rows = run(folder)
    assert set(rows) == set(METHODS)
    for name, row in rows.items():
        assert list(row) == list(benchmark_report.COLUMNS)
        assert row["failure"] == ""
        assert (row["model"], row["batch_size"], row["num_parameters"]) == (
            "linear",
            "4",
            "640",
        )
        assert row["rounds"] == ("1" if name in CONFIG.slow_methods else "2")
        seconds = float(row["step_seconds"])
        assert float(row["examples_per_second"]) == pytest.approx(4 / seconds)
        for key in ("step_seconds", "step_ratio", "lower_seconds", "compile_seconds"):
            assert float(row[key]) > 0
        for key in ("step_seconds", "step_ratio"):
            quartiles = [f"{key}_lower_quartile", key, f"{key}_upper_quartile"]
            values = [float(row[k]) for k in quartiles]
            assert values == sorted(values)
        assert (row["temp_bytes"] == "") == (name == "one_by_one_loop")
        assert (row["relative_error"] == "") == (name not in CLIPPING)
    for key in ("step_ratio", "lower_ratio", "compile_ratio", "temp_ratio"):
        assert float(rows[NON_PRIVATE][key]) == 1
    # Per-example gradients take their memory.
    assert float(rows["vmap"]["temp_bytes"]) >= 4 * 4 * 640

    assert {p.name for p in folder.iterdir()} - {".lock"} == {
        "config.json",
        "results.csv",
        "table.md",
        "times.png",
    }
    record = json.loads((folder / "config.json").read_text())
    assert record["repetitions"] == 2
    assert record["machine"]["versions"]["jax"] == jax.__version__
    assert record["machine"]["cores"] >= 1
    assert record["machine"]["cpu"]
    assert record["machine"]["device_kind"]
    table = (folder / "table.md").read_text()
    lines = [line for line in table.splitlines() if line.startswith("| linear")]
    assert [line.split(" | ")[2] for line in lines] == list(METHODS)
    assert {line.count(" | ") for line in lines} == {9}
    assert matplotlib.image.imread(folder / "times.png").std() > 0.05
    output = capsys.readouterr()
    assert table in output.out
    assert "linear, batch 4: the clipped gradients of 7 methods agree" in output.out
    assert "100%" in output.err


def clipped_sum_in_float64(problem):
    """By hand, from gradients in float64."""
    with jax.enable_x64(True):
        params, batch = jax.tree.map(
            lambda x: jnp.asarray(
                x, jnp.float64 if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype
            ),
            (problem.params, problem.batch),
        )
        grad_fn = jax.jit(jax.grad(problem.loss))
        total, num_clipped = jax.tree.map(np.zeros_like, params), 0
        for i in range(problem.batch_size):
            one = jax.tree.map(lambda x, i=i: x[i : i + 1], batch)
            grad = grad_fn(params, Data(*one))
            norm = float(optax.tree.norm(grad))
            num_clipped += norm > problem.l2_clip_norm
            scale = min(1.0, problem.l2_clip_norm / norm)
            total = jax.tree.map(
                lambda t, g, s=scale: t + s * np.asarray(g), total, grad
            )
    assert num_clipped == problem.batch_size // 2, "the clip norm should split them"
    return jax.tree.leaves(total)


def test_methods_clip_alike():
    problem = problem_for("mlp:hidden_sizes=4")
    expected = clipped_sum_in_float64(problem)
    for name in CLIPPING:
        found = measuring.clipped_gradient(name, problem)
        assert measuring.relative_error(found, expected) < 1e-5, name


@pytest.mark.parametrize("name", ["auto", "one_by_one_loop", "noise_only"])
def test_a_step_moves_by_the_noisy_mean(name, monkeypatch):
    monkeypatch.setattr(benchmark_methods, "LEARNING_RATE", 1.0)
    problem = problem_for("linear")
    program = METHODS[name].program(problem)
    step = program.assemble(measuring.compile_program(program).parts)
    before = jax.tree.map(np.asarray, problem.params)
    after = step(program.init()).params
    if name == "noise_only":
        gradient = jax.grad(problem.loss)(problem.params, problem.batch)
        expected = jax.tree.leaves(gradient)
    else:
        expected = [total / 4 for total in clipped_sum_in_float64(problem)]
    moved = jax.tree.map(lambda b, a: b - np.asarray(a), before, after)
    for found, wanted in zip(jax.tree.leaves(moved), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)


def replaced(monkeypatch, name, **changes):
    monkeypatch.setitem(METHODS, name, dataclasses.replace(METHODS[name], **changes))


def test_a_wrong_gradient_is_not_timed(tmp_path, monkeypatch, capsys):
    right = METHODS["auto"].clipped_sum

    def wrong(loss, l2_clip_norm):
        return right(loss, 1.001 * l2_clip_norm)

    replaced(monkeypatch, "auto", clipped_sum=wrong)
    rows = run(tmp_path, methods=("auto", "one_by_one_loop"))
    assert list(rows) == [NON_PRIVATE, "auto", "one_by_one_loop"]
    assert "its clipped gradient differs by" in rows["auto"]["failure"]
    assert 1e-4 < float(rows["auto"]["relative_error"]) < 1e-2
    assert rows["auto"]["step_seconds"] == ""
    assert rows["one_by_one_loop"]["failure"] == ""
    assert float(rows["one_by_one_loop"]["step_ratio"]) > 0
    assert "| auto | failed: ArithmeticError" in (tmp_path / "table.md").read_text()
    assert "the clipped gradients of 1 methods agree" in capsys.readouterr().out


def test_a_method_that_fails_at_once_or_later_fails_alone(tmp_path, monkeypatch):
    def broken(problem):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of\nmemory")

    whole = METHODS["noise_only"].program

    def fails_in_the_rounds(problem):
        program, calls = whole(problem), []

        def assemble(parts):
            step = program.assemble(parts)

            def counted(state):
                calls.append(state)
                if len(calls) > 3:
                    raise RuntimeError("later")
                return step(state)

            return counted

        return dataclasses.replace(program, assemble=assemble)

    replaced(monkeypatch, "auto", program=broken)
    replaced(monkeypatch, "noise_only", program=fails_in_the_rounds)
    rows = run(tmp_path, methods=("auto", "noise_only", "one_by_one_loop"))
    assert rows["auto"]["failure"] == (
        "RuntimeError: RESOURCE_EXHAUSTED: Out of memory"
    )
    assert rows["noise_only"]["failure"] == "RuntimeError: later"
    for name in (NON_PRIVATE, "one_by_one_loop"):
        assert rows[name]["failure"] == ""
        assert float(rows[name]["step_ratio"]) > 0


def test_memory_that_is_not_there(tmp_path, monkeypatch):
    # The loop of calls, whose need is not known, is tried.
    monkeypatch.setattr(measuring, "free_bytes", lambda: 0)
    rows = run(tmp_path, methods=("auto", "one_by_one_loop"))
    assert "0.0 GB are free" in rows["auto"]["failure"]
    assert "0.0 GB are free" in rows[NON_PRIVATE]["failure"]
    # Without a non-private time there are times but no ratios.
    assert float(rows["one_by_one_loop"]["step_seconds"]) > 0
    assert rows["one_by_one_loop"]["step_ratio"] == ""


def test_nothing_measured_is_a_failure(tmp_path, monkeypatch):
    monkeypatch.setattr(measuring, "free_bytes", lambda: 0)
    with pytest.raises(RunError, match="every method failed, the first with MemoryErr"):
        run(tmp_path, methods=("auto",))
    assert (tmp_path / "results.csv").exists()


def cell(batch_size, *ratios):
    def result(method, ratio):
        if ratio is None:
            return Result(method, "MemoryError: it needs 9 GB | 1 GB are free")
        times = Spread(1e-3 * ratio, 0.9e-3 * ratio, 1.1e-3 * ratio)
        return Result(
            method, step_seconds=times, step_ratio=Spread(ratio, ratio, ratio)
        )

    methods = zip(METHODS, ratios, strict=False)
    return Cell("mlp", 640, batch_size, [result(m, ratio) for m, ratio in methods])


@pytest.mark.parametrize(
    "cells",
    [
        [cell(1, 1.0)],
        [cell(1, None, None)],
        [cell(1, 1.0, 0.9, 120.0, None), cell(2, 1.0, 0.98), cell(3, 1.0, 2000.0)],
    ],
)
def test_draws_whatever_was_measured(tmp_path, cells):
    path = tmp_path / "times.png"
    benchmark_report.draw(cells, path)
    assert matplotlib.image.imread(path).std() > 0.05


def test_the_table_survives_any_reason():
    machine = {
        "cpu": "a CPU",
        "cores": 2,
        "device_kind": "cpu",
        "versions": {"jax": "1", "jax-privacy": "2"},
    }
    table = benchmark_report.table([cell(1, 1.0, None)], machine)
    lines = [line for line in table.splitlines() if line.startswith("|")]
    assert {line.replace("\\|", "").count("|") for line in lines} == {11}
    assert "| mlp | 1 | nonprivate | 1.00 [0.900, 1.10] | 1.00 [1.00, 1.00] |" in table


def test_other_results_are_not_overwritten(tmp_path):
    run(tmp_path, methods=(NON_PRIVATE,))
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(
        UsageError, match=r"holds 'config\.json'.*another --config\.out"
    ):
        run(tmp_path, methods=(NON_PRIVATE,))
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_a_foreign_folder_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"holds 'notes\.txt'"):
        run(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} - {".lock"} == {"notes.txt"}


def test_main_ends_with_the_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    values = dataclasses.asdict(dataclasses.replace(CONFIG, methods=(NON_PRIVATE,)))
    monkeypatch.setattr(
        benchmark.command_line,
        "load_config",
        lambda: benchmark_config.make(**values),
    )
    monkeypatch.setattr(benchmark.jax.config, "update", lambda name, value: None)
    benchmark.main()
    folder = pathlib.Path(
        capsys.readouterr().out.splitlines()[-1].removeprefix("Run folder: ")
    )
    assert folder.parent == tmp_path / "runs"
    assert folder.name.startswith("benchmark-")
    assert (folder / "times.png").exists()


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
        ({"slow_repetitions": 3}, "config.slow_repetitions=3, expected at most repet"),
        ({"batch_sizes": (4, 0)}, r"config.batch_sizes=\(4, 0\), expected integers"),
        ({"image_shape": (8, 8)}, "expected height, width and channels"),
        ({"round_seconds": 0.0}, "config.round_seconds=0.0, expected 0 <"),
    ],
)
def test_bad_config(changes, message):
    values = dataclasses.asdict(dataclasses.replace(CONFIG, **changes))
    with pytest.raises(UsageError, match=message) as error:
        benchmark_config.parse(benchmark_config.make(**values))
    assert "\n" not in str(error.value)


def test_unknown_model_touches_no_folder(tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(
        UsageError, match=r"model='cnnn' is unknown.*did you mean 'cnn'"
    ):
        run(folder, models=("cnnn",))
    assert not folder.exists()


def test_config_files():
    for name in ("benchmark_classifiers", "benchmark_tiny"):
        module = __import__(f"experiments.dp.configs.{name}", fromlist=["get_config"])
        assert benchmark_config.parse(module.get_config()).all_methods == tuple(METHODS)


def test_wrong_usage_is_one_line_and_code_2():
    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "experiments.dp.benchmark",
            "--config=experiments/dp/configs/benchmark_tiny.py",
            "--config.methods=auto,ghost",
        ],
        cwd=REPOSITORY,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert result.stderr.startswith("error: config.methods has 'ghost', which is unkno")
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""
