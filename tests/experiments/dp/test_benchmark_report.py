import csv
import dataclasses
import io

import pytest

from experiments import run_folder
from experiments.dp import benchmark_report
from experiments.dp.benchmark_cells import CellSpec
from experiments.dp.benchmark_methods import METHODS
from experiments.dp.benchmark_report import Cell
from experiments.dp.measuring import Result
from experiments.timing import Spread

MACHINE = {
    "cpu": "a CPU",
    "cores": 2,
    "device_kind": "cpu",
    "versions": {"jax": "1", "jax-privacy": "2"},
}


def result(method, ratio):
    if ratio is None:
        return Result(method, "MemoryError: it needs 9 GB | 1 GB are free")
    times = Spread(1e-3 * ratio, 0.9e-3 * ratio, 1.1e-3 * ratio)
    return Result(
        method,
        step_seconds=times,
        step_ratio=Spread(ratio, ratio, ratio),
        temp_bytes=2_500_000,
        temp_ratio=1.25,
    )


def cell(batch_size, *ratios):
    spec = CellSpec("mlp", (8, 8, 1), batch_size, without=("vmap",))
    methods = zip(METHODS, ratios, strict=False)
    return Cell(spec, 640, 0.25, [result(m, ratio) for m, ratio in methods])


def test_what_was_written_is_read_again(tmp_path):
    cells = [cell(1, 1.0, None, 3.0), cell(2, 1.0)]
    benchmark_report.write(tmp_path, cells, "batch_size", MACHINE)
    assert benchmark_report.read_cells(tmp_path) == cells
    assert (tmp_path / run_folder.METRICS).read_text().count("\n") == 2


def test_the_csv_has_every_number():
    text = benchmark_report.results_csv([cell(4, 1.0, None)])
    done, failed = csv.DictReader(io.StringIO(text))
    fields = {field.name for field in dataclasses.fields(Result)}
    assert fields < set(benchmark_report.COLUMNS)
    assert float(done["step_seconds_upper_quartile"]) == 1.1e-3
    assert float(done["examples_per_second"]) == 4000
    assert (done["temp_bytes"], done["load_average"]) == ("2500000", "0.25")
    assert failed["failure"].startswith("MemoryError")
    assert failed["step_seconds"] == ""


def test_the_table_survives_any_reason():
    table = benchmark_report.table([cell(1, 1.0, None)], MACHINE)
    lines = [line for line in table.splitlines() if line.startswith("|")]
    # Names, step, ratio, examples/s, memory; nothing else was measured.
    assert {line.replace("\\|", "").count("|") for line in lines} == {9}
    assert (
        "| mlp | 8x8x1 | 1 | nonprivate | 1.00 [0.900, 1.10] | 1.00 [1.00, 1.00] | "
        "1,000 | 2.50 (1.25) |" in table
    )
    assert "| noise_only | failed: MemoryError: it needs 9 GB \\| 1 GB" in table


@pytest.mark.parametrize("ratios", [(None,), (None, None)])
def test_a_table_of_failures_says_why(ratios):
    table = benchmark_report.table([cell(1, *ratios)], MACHINE)
    assert table.count("failed: MemoryError") == len(ratios)
