"""Compares the time and memory of private training steps with the non-private step.

    python -m experiments.dp.benchmark \\
        --config=experiments/dp/configs/benchmark_classifiers.py:small \\
        --config.cells=mlp@28x28x1@128,cnn@28x28x1@32

What follows the colon is the scale: `tiny` runs in seconds and says nothing, `small`
(the default) takes two cores some minutes, `full` is for a GPU or a TPU. A cell is
`MODEL@SHAPE@BATCH`.

A step is the gradient, the clipping, the noise and the update by SGD, on random inputs.
The methods:

  nonprivate                               the mean gradient and the update alone
  noise_only                               the same with noise: what the noise costs
  auto, bookkeeping, reweight, vmap        those of `dpjax.clipped_grad`
  jax_privacy                              `jax_privacy.clipped_grad`
  multi_loss                               one forward pass, and a backward pass of the
                                           whole batch for each example's loss
                                           (multiLoss of Lee & Kifer 2021)
  one_by_one_loop                          a Python loop over a compiled gradient of one
                                           example (their nxBP)
  one_by_one_scan                          that loop inside one compiled function
  bookkeeping_quarters, reweight_quarters  those of `dpjax.clipped_grad` in four
                                           microbatches; not among the defaults

All methods run in this process, on the same batch, and take turns in rounds. A ratio is
the median over rounds of a method's time over the non-private time of the same round,
and not the ratio of two medians: on a machine with other work, what slows a whole round
down cancels in its ratio. Before a method is timed, its clipped gradient is compared
with one that was computed one example at a time; a method whose gradient is wrong is
reported as failed, as is one that needs more memory than is free, and the others go on.

The run folder holds config.json (with the machine), metrics.jsonl (the finished cells),
results.csv (all numbers, in seconds and bytes), table.md and figure.png. A run that was
stopped goes on with the cells that are missing when it is started again with the same
config and folder. For numbers to rely on, let nothing else run on the machine.
"""

import dataclasses
import inspect
import json
import pathlib
import sys
from typing import Any

import jax
import tqdm
from ml_collections import config_flags

from experiments import command_line, machine, run_folder
from experiments.dp import (
    benchmark_config,
    benchmark_problems,
    benchmark_report,
    measuring,
)
from experiments.dp.benchmark_cells import CellSpec
from experiments.dp.benchmark_config import BenchmarkConfig
from experiments.dp.benchmark_report import Cell
from experiments.errors import RunError
from experiments.models import registry


def main() -> None:
    """Measures what the flags say; the last line of output names the run folder."""
    config = benchmark_config.parse(command_line.load_config())
    # A compilation that is read from a disk says nothing about compile time.
    jax.config.update("jax_enable_compilation_cache", False)
    folder = benchmark(config)
    print(f"Run folder: {folder}")


def benchmark(config: BenchmarkConfig) -> pathlib.Path:
    """Measures what `config` says, prints the table and returns the run folder.

    Raises:
      UsageError: The config asks for something impossible, or for a folder in use.
      RunError: Every method failed.
    """
    for spec in config.cell_specs:
        benchmark_problems.build_model(spec)
    record = machine.describe()
    folder = run_folder.choose(config.out, "benchmark").resolve()
    with run_folder.locked(folder):
        public = dataclasses.asdict(config)
        del public["out"]
        # As it will be read: JSON has no tuples.
        public = json.loads(json.dumps({**public, "machine": record}))
        run_folder.claim(folder, public)
        cells = _measure(folder, config, record)
    print(benchmark_report.table(cells, record))
    _require_results(folder, cells)
    return folder


def _measure(
    folder: pathlib.Path, config: BenchmarkConfig, record: dict[str, Any]
) -> list[Cell]:
    """Measures the cells that are missing; the files hold the cells so far."""
    cells = benchmark_report.read_cells(folder)
    done = {cell.spec for cell in cells}
    missing = [spec for spec in config.cell_specs if spec not in done]
    left = [measuring.num_measurements(config, spec) for spec in missing]
    measuring.start_compiler()
    with tqdm.tqdm(total=sum(left), unit="measurement") as progress_bar:
        for i, spec in enumerate(missing):

            def on_measured(what: str, spec: CellSpec = spec) -> None:
                progress_bar.set_description_str(f"{spec}, {what}", refresh=False)
                progress_bar.update()

            cells.append(_measured(spec, config, on_measured))
            # A method that failed left its turns.
            progress_bar.update(sum(left[: i + 1]) - progress_bar.n)
            benchmark_report.write(folder, cells, config.figure, record)
            progress_bar.write(_checked(cells[-1]), file=sys.stdout)
    # Once more, in case the last run was stopped between a cell and its picture.
    benchmark_report.write(folder, cells, config.figure, record)
    return cells


def _measured(spec: CellSpec, config: BenchmarkConfig, on_measured: Any) -> Cell:
    load_average = machine.load_average()
    problem = benchmark_problems.abstract_problem(spec, config.noise_multiplier)
    results = measuring.measure(spec, config, on_measured)
    size = registry.num_parameters(problem.params)
    return Cell(spec, size, load_average, results)


def _checked(cell: Cell) -> str:
    lines = [
        f"{cell.spec}: {result.method} failed: {result.failure}"
        for result in cell.results
        if result.failure
    ]
    errors = [
        result.relative_error
        for result in cell.results
        if result.relative_error is not None and not result.failure
    ]
    if errors:
        agreement = (
            f"{cell.spec}: the clipped gradients of {len(errors)} methods agree with "
            f"those taken one example at a time (largest relative error "
            f"{max(errors):.1e})"
        )
        lines = [agreement, *lines]
    return "\n".join(lines or [f"{cell.spec}: done"])


def _require_results(folder: pathlib.Path, cells: list[Cell]) -> None:
    results = [result for cell in cells for result in cell.results]
    if all(result.failure for result in results):
        raise RunError(
            f"every method failed, the first with {results[0].failure}: see "
            f"{folder / benchmark_report.TABLE}, or give smaller --config.cells"
        )


if __name__ == "__main__":
    keys = inspect.getdoc(BenchmarkConfig)
    config_flags.DEFINE_config_file(
        "config",
        help_string=f"A file of experiments/dp/configs/, :, and its scale. {keys}",
    )
    command_line.run(
        main, config_keys=[f.name for f in dataclasses.fields(BenchmarkConfig)]
    )
