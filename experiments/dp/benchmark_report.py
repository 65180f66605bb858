"""A benchmark's results as JSON rows, as CSV and as a Markdown table."""

import csv
import dataclasses
import io
import json
import math
import pathlib
from collections.abc import Sequence
from typing import Any

from experiments import run_folder
from experiments.dp import benchmark_figures
from experiments.dp.benchmark_cells import CellSpec
from experiments.dp.measuring import Result
from experiments.timing import Spread

RESULTS, TABLE, PLOT = "results.csv", "table.md", "figure.png"

COLUMNS = (
    "model",
    "input_shape",
    "batch_size",
    "num_parameters",
    "method",
    "failure",
    "relative_error",
    "rounds",
    "steps_per_round",
    "step_seconds",
    "step_seconds_lower_quartile",
    "step_seconds_upper_quartile",
    "step_ratio",
    "step_ratio_lower_quartile",
    "step_ratio_upper_quartile",
    "speedup",
    "speedup_lower_quartile",
    "speedup_upper_quartile",
    "examples_per_second",
    "lower_seconds",
    "lower_ratio",
    "compile_seconds",
    "compile_ratio",
    "temp_bytes",
    "temp_ratio",
    "total_bytes",
    "largest_batch",
    "largest_batch_ratio",
    "load_average",
)

_SPREADS = ("step_seconds", "step_ratio", "speedup")

_NAMES = ("model", "input", "batch", "method")
_MEASURED = (
    "step, ms",
    "step / non-private",
    "one_by_one_loop / step",
    "examples/s",
    "trace and lower, s",
    "compile, s",
    "temporary memory, MB",
    "total memory, MB",
    "largest batch",
    "relative error",
)

_LEGENDS = {
    "step, ms": (
        "Steps: medians [quartiles] of interleaved rounds; ratios: medians [quartiles] "
        "of the ratio within the same round."
    ),
    "one_by_one_loop / step": (
        "The speed-up over one example at a time: Lee & Kifer 2021 report 54 to 94 for "
        "their method at batch 128, on their hardware and in PyTorch."
    ),
    "compile, s": "Compiling: medians.",
    "total memory, MB": (
        "Memory: what the compiler assigns; total adds arguments and results."
    ),
    "largest batch": (
        "Largest batch: a step of it fits the memory budget, to within 3 %, by the "
        "compiler's total; the search ends at 1,048,576 examples."
    ),
    "relative error": (
        "Relative error: of the clipped gradient, against gradients clipped one at a "
        "time; largest over parameters. Half of the examples are clipped."
    ),
}


@dataclasses.dataclass(frozen=True)
class Cell:
    """The results on one model, shape and batch size.

    Attributes:
      spec: What was measured.
      num_parameters: Scalars in the model's parameters.
      load_average: Of the machine when the cell began; None if unknown.
      results: One per method.
    """

    spec: CellSpec
    num_parameters: int
    load_average: float | None
    results: list[Result]


def read_cells(folder: pathlib.Path) -> list[Cell]:
    """The cells that `write` has saved in `folder`."""
    return [_cell(row) for row in run_folder.read_metrics(folder)]


def write(
    folder: pathlib.Path, cells: Sequence[Cell], figure: str, machine: dict[str, Any]
) -> None:
    """Writes metrics.jsonl, results.csv, table.md and figure.png, each replaced whole.

    Args:
      folder: The run folder.
      cells: All cells so far.
      figure: One of `benchmark_config.FIGURES`.
      machine: As `machine.describe` has it.
    """
    rows = "".join(json.dumps(dataclasses.asdict(cell)) + "\n" for cell in cells)
    run_folder.write_atomically(folder / run_folder.METRICS, rows)
    run_folder.write_atomically(folder / RESULTS, results_csv(cells))
    run_folder.write_atomically(folder / TABLE, table(cells, machine))
    benchmark_figures.draw(figure, [(c.spec, c.results) for c in cells], folder / PLOT)


def results_csv(cells: Sequence[Cell]) -> str:
    """Every number in base units; what was not measured is empty."""
    file = io.StringIO()
    writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for cell in cells:
        writer.writerows(_csv_row(cell, result) for result in cell.results)
    return file.getvalue()


def table(cells: Sequence[Cell], machine: dict[str, Any]) -> str:
    """The results for people, in Markdown, without columns of what was not measured."""
    rows = [_table_row(cell, result) for cell in cells for result in cell.results]
    measured = [name for name in _MEASURED if any(row.get(name) for row in rows)]
    # What failed says so in the first column of numbers, even if all did.
    header = [*_NAMES, *(measured or _MEASURED[:1])]
    lines = [header, ["---"] * len(header)]
    for row in rows:
        blank = "" if _FAILED in row else "-"
        values = [row.get(name) or blank for name in header]
        if _FAILED in row:
            values[len(_NAMES)] = row[_FAILED]
        lines.append(values)
    text = ["| " + " | ".join(line) + " |" for line in lines]
    legend = " ".join(_LEGENDS[name] for name in measured if name in _LEGENDS)
    on = (
        "In parentheses: the ratio to the non-private step. "
        f"On {machine['cpu']}, {machine['cores']} cores, device "
        f"{machine['device_kind']}, JAX {machine['versions']['jax']}, jax_privacy "
        f"{machine['versions']['jax-privacy']}."
    )
    return "\n".join([*text, "", f"{legend} {on}".strip()]) + "\n"


_FAILED = "failed"


def _table_row(cell: Cell, result: Result) -> dict[str, str]:
    names = (
        cell.spec.model,
        cell.spec.shape_name,
        str(cell.spec.batch_size),
        result.method,
    )
    row = dict(zip(_NAMES, names, strict=True))
    if result.failure:
        return {**row, _FAILED: "failed: " + result.failure.replace("|", "\\|")}
    speed, error = _examples_per_second(cell, result), result.relative_error
    largest = result.largest_batch
    values = (
        _with_quartiles(result.step_seconds, 1e3),
        _with_quartiles(result.step_ratio),
        _with_quartiles(result.speedup),
        "" if speed is None else f"{speed:,.0f}",
        _with_ratio(result.lower_seconds, result.lower_ratio),
        _with_ratio(result.compile_seconds, result.compile_ratio),
        _with_ratio(_megabytes(result.temp_bytes), result.temp_ratio),
        _with_ratio(_megabytes(result.total_bytes)),
        "" if largest is None else f"{largest:,}{_ratio(result.largest_batch_ratio)}",
        "" if error is None else f"{error:.0e}",
    )
    return row | dict(zip(_MEASURED, values, strict=True))


def _csv_row(cell: Cell, result: Result) -> dict[str, Any]:
    row = {
        "model": cell.spec.model,
        "input_shape": cell.spec.shape_name,
        "batch_size": cell.spec.batch_size,
        "num_parameters": cell.num_parameters,
        "examples_per_second": _examples_per_second(cell, result),
        "load_average": cell.load_average,
    }
    for field in dataclasses.fields(Result):
        value = getattr(result, field.name)
        if field.name in _SPREADS:
            median, lower, upper = value or (None, None, None)
            row[field.name] = median
            row[f"{field.name}_lower_quartile"] = lower
            row[f"{field.name}_upper_quartile"] = upper
        else:
            row[field.name] = value
    return row


def _cell(row: dict[str, Any]) -> Cell:
    """The inverse of `dataclasses.asdict` and JSON."""
    spec = row["spec"]
    spec = CellSpec(
        spec["model"],
        tuple(spec["input_shape"]),
        spec["batch_size"],
        tuple(spec["without"]),
    )
    results = [_result(result) for result in row["results"]]
    return Cell(spec, row["num_parameters"], row["load_average"], results)


def _result(row: dict[str, Any]) -> Result:
    spreads = {name: Spread(*row[name]) for name in _SPREADS if row[name] is not None}
    return Result(**{**row, **spreads})


def _examples_per_second(cell: Cell, result: Result) -> float | None:
    if result.step_seconds is None:
        return None
    return cell.spec.batch_size / result.step_seconds.median


def _megabytes(size: int | None) -> float | None:
    return None if size is None else size / 1e6


def _with_quartiles(spread: Spread | None, unit: float = 1.0) -> str:
    if spread is None:
        return ""
    median, lower, upper = (significant(unit * value) for value in spread)
    return f"{median} [{lower}, {upper}]"


def _with_ratio(value: float | None, ratio: float | None = None) -> str:
    return "" if value is None else f"{significant(value)}{_ratio(ratio)}"


def _ratio(ratio: float | None) -> str:
    return "" if ratio is None else f" ({significant(ratio)})"


def significant(value: float) -> str:
    """Three significant digits, without an exponent.

    Example:
      >>> [significant(x) for x in (0.98765, 1.0, 12.345, 1234.5, 0.00012, 0.0)]
      ['0.988', '1.00', '12.3', '1234', '0.00012', '0']
    """
    if value == 0:
        return "0"
    decimals = max(2 - math.floor(math.log10(abs(value))), 0)
    return f"{value:.{min(decimals, 5)}f}"
