"""Compares the time and memory of private training steps with the non-private step.

    python -m experiments.dp.benchmark \\
        --config=experiments/dp/configs/benchmark_classifiers.py \\
        --config.models=mlp,cnn --config.batch_sizes=32,128

A step is the gradient, the clipping, the noise and the update by SGD, on random images.
The methods:

  nonprivate                               the mean gradient and the update alone
  noise_only                               the same with noise: what the noise costs
  auto, bookkeeping, reweight, vmap        those of `dpjax.clipped_grad`
  jax_privacy                              `jax_privacy.clipped_grad`
  one_by_one_loop                          a Python loop over a compiled gradient of one
                                           example (nxBP of Lee & Kifer 2021)
  one_by_one_scan                          that loop inside one compiled function

All methods run in this process, on the same batch, and take turns in rounds. A ratio is
the median over rounds of a method's time over the non-private time of the same round,
and not the ratio of two medians: on a machine with other work, what slows a whole round
down cancels in its ratio. Before a method is timed, its clipped gradient is compared
with one that was computed one example at a time; a method whose gradient is wrong is
reported as failed, as is one that runs out of memory, and the others go on.

The run folder holds config.json (with the machine), results.csv (all numbers, in
seconds and bytes), table.md and times.png. It is never one that holds something
already. For numbers to rely on, let nothing else run on the machine.
"""

import dataclasses
import inspect
import pathlib
import sys
from typing import Any

import jax
import tqdm
from ml_collections import config_flags

from experiments import command_line
from experiments.dp import (
    benchmark_config,
    benchmark_methods,
    benchmark_report,
    machine,
    measuring,
    run_folder,
)
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
    models = {
        name: benchmark_methods.build_model(name, config.image_shape)
        for name in config.models
    }
    record = machine.describe()
    folder = run_folder.choose(config.out, "benchmark").resolve()
    with run_folder.locked(folder):
        public = dataclasses.asdict(config)
        del public["out"]
        run_folder.claim_empty(folder, {**public, "machine": record})
        cells = _measure(folder, config, models, record)
    print(benchmark_report.table(cells, record))
    _require_results(folder, cells)
    return folder


def _measure(
    folder: pathlib.Path,
    config: BenchmarkConfig,
    models: dict[str, Any],
    record: dict[str, Any],
) -> list[Cell]:
    """Measures cell by cell; the files hold the cells so far."""
    cells: list[Cell] = []
    per_cell = measuring.num_measurements(config)
    total = per_cell * len(models) * len(config.batch_sizes)
    with tqdm.tqdm(total=total, unit="measurement") as progress_bar:
        for name, model in models.items():
            for batch_size in config.batch_sizes:
                where = f"{name}, batch {batch_size}"
                batch = benchmark_methods.random_batch(config.image_shape, batch_size)
                problem = benchmark_methods.make_problem(
                    model, batch, config.noise_multiplier
                )

                def on_measured(what: str, where: str = where) -> None:
                    progress_bar.set_description_str(f"{where}, {what}", refresh=False)
                    progress_bar.update()

                results = measuring.measure(problem, config, on_measured)
                size = registry.num_parameters(problem.params)
                cells.append(Cell(name, size, batch_size, results))
                # A method that failed left its turns.
                progress_bar.update(per_cell * len(cells) - progress_bar.n)
                benchmark_report.write(folder, cells, record)
                progress_bar.write(_checked(cells[-1]), file=sys.stdout)
    return cells


def _checked(cell: Cell) -> str:
    where = f"{cell.model}, batch {cell.batch_size}"
    lines = [
        f"{where}: {result.method} failed: {result.failure}"
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
            f"{where}: the clipped gradients of {len(errors)} methods agree with those "
            f"taken one example at a time (largest relative error {max(errors):.1e})"
        )
        lines = [agreement, *lines]
    return "\n".join(lines)


def _require_results(folder: pathlib.Path, cells: list[Cell]) -> None:
    results = [result for cell in cells for result in cell.results]
    if all(result.failure for result in results):
        raise RunError(
            f"every method failed, the first with {results[0].failure}: see "
            f"{folder / benchmark_report.TABLE}, or lower --config.batch_sizes"
        )


if __name__ == "__main__":
    keys = inspect.getdoc(BenchmarkConfig)
    config_flags.DEFINE_config_file(
        "config", help_string=f"A file of experiments/dp/configs/. {keys}"
    )
    command_line.run(
        main, config_keys=[f.name for f in dataclasses.fields(BenchmarkConfig)]
    )
