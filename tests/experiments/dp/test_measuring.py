"""What is measured of methods that fail, and what is not."""

import dataclasses

import pytest

from experiments.dp import measuring
from experiments.dp.benchmark_cells import CellSpec
from experiments.dp.benchmark_config import BenchmarkConfig
from experiments.dp.benchmark_methods import METHODS, NON_PRIVATE

pytestmark = [pytest.mark.usefixtures("compiled_once", "compiled_cheaply")]

CELL = CellSpec("mlp:hidden_sizes=2", (4, 4, 1), 4)
CONFIG = BenchmarkConfig(
    noise_multiplier=0.0,
    repetitions=2,
    slow_repetitions=1,
    compile_repetitions=1,
    round_seconds=1e-3,
)


def measure(*methods, **changes):
    config = dataclasses.replace(CONFIG, methods=methods, **changes)
    results = measuring.measure(CELL, config, lambda what: None)
    return {result.method: result for result in results}


def replaced(monkeypatch, name, **changes):
    monkeypatch.setitem(METHODS, name, dataclasses.replace(METHODS[name], **changes))


def test_a_wrong_gradient_is_not_timed(monkeypatch):
    right = METHODS["auto"].clipped_sum

    def wrong(problem):
        larger = dataclasses.replace(problem, l2_clip_norm=1.001 * problem.l2_clip_norm)
        return right(larger)

    replaced(monkeypatch, "auto", clipped_sum=wrong)
    results = measure("auto", "one_by_one_loop")
    assert list(results) == [NON_PRIVATE, "auto", "one_by_one_loop"]
    assert "its clipped gradient differs by" in results["auto"].failure
    assert 1e-4 < results["auto"].relative_error < 1e-2
    assert results["auto"].step_seconds is None
    assert results["one_by_one_loop"].failure == ""
    assert results["one_by_one_loop"].step_ratio.median > 0
    # Unless nobody asked.
    unchecked = measure("auto", check=False)["auto"]
    assert (unchecked.failure, unchecked.relative_error) == ("", None)
    assert unchecked.step_ratio.median > 0


def test_a_method_that_fails_at_once_or_later_fails_alone(monkeypatch):
    def broken(problem):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of\nmemory")

    whole = METHODS["noise_only"].step

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

    replaced(monkeypatch, "auto", step=broken)
    replaced(monkeypatch, "noise_only", step=fails_in_the_rounds)
    results = measure("auto", "noise_only", "one_by_one_loop")
    reason = "RuntimeError: RESOURCE_EXHAUSTED: Out of memory"
    assert results["auto"].failure == reason
    assert results["noise_only"].failure == "RuntimeError: later"
    for name in (NON_PRIVATE, "one_by_one_loop"):
        assert results[name].failure == ""
        assert results[name].step_ratio.median > 0


def compiled_bytes(name):
    return measure(name, figure="compile_time")[name].total_bytes


def test_memory_that_is_not_there_is_not_asked_for(monkeypatch):
    """Neither by the check nor by the step; methods that need less go on."""
    need = {name: compiled_bytes(name) for name in ("vmap", NON_PRIVATE)}
    assert need[NON_PRIVATE] < need["vmap"]
    monkeypatch.setattr(measuring, "free_bytes", lambda: need["vmap"] - 1)

    def never(*args, **kwargs):
        raise AssertionError

    results = measure("vmap", check=False)
    assert "GB are free" in results["vmap"].failure
    assert results[NON_PRIVATE].failure == ""
    assert results[NON_PRIVATE].step_seconds.median > 0
    monkeypatch.setattr(measuring, "free_bytes", lambda: 0)
    monkeypatch.setattr(measuring, "relative_error", never)
    monkeypatch.setattr(measuring.timing, "warmed_up", never)
    results = measure("vmap", "one_by_one_loop")
    for result in results.values():
        assert "0.0 GB are free" in result.failure


def test_without_a_non_private_time_there_are_times_and_no_ratios(monkeypatch):
    def broken(problem):
        raise RuntimeError("no")

    replaced(monkeypatch, NON_PRIVATE, step=broken)
    result = measure("one_by_one_scan", check=False)["one_by_one_scan"]
    assert result.step_seconds.median > 0
    assert result.compile_seconds > 0
    assert (result.step_ratio, result.compile_ratio, result.temp_ratio) == (None,) * 3


def test_compile_time_takes_no_step(monkeypatch):
    monkeypatch.setattr(measuring.benchmark_problems, "make_problem", None)
    result = measure("multi_loss", figure="compile_time")["multi_loss"]
    assert result.lower_seconds > 0
    assert result.compile_ratio > 0
    assert result.temp_bytes > 0
    assert result.step_seconds is None


@pytest.mark.parametrize(
    ("figure", "check"),
    [("step_time", True), ("depth", False), ("compile_time", True), ("memory", True)],
)
def test_the_number_of_measurements_is_known_before(figure, check):
    config = dataclasses.replace(
        CONFIG,
        figure=figure,
        check=check,
        methods=("one_by_one_scan",),
        memory_budget_gb=5e-6,
    )
    calls = []
    measuring.measure(CELL, config, calls.append)
    assert len(calls) == measuring.num_measurements(config, CELL)
