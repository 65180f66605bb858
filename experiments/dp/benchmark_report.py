"""A benchmark's results as CSV, as a Markdown table and as a picture."""

import csv
import dataclasses
import io
import math
import pathlib
from collections.abc import Sequence
from typing import Any

import matplotlib.figure
from matplotlib import axes, ticker

from experiments.dp import plots, run_folder
from experiments.dp.benchmark_methods import NON_PRIVATE
from experiments.dp.measuring import Result
from experiments.dp.timing import Spread

RESULTS, TABLE, PLOT = "results.csv", "table.md", "times.png"

COLUMNS = (
    "model",
    "num_parameters",
    "batch_size",
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
    "examples_per_second",
    "lower_seconds",
    "lower_ratio",
    "compile_seconds",
    "compile_ratio",
    "temp_bytes",
    "temp_ratio",
)

_HEADER = (
    "model",
    "batch",
    "method",
    "step, ms",
    "step / non-private",
    "examples/s",
    "trace and lower, s",
    "compile, s",
    "temporary memory, MB",
    "relative error",
)

_LEGEND = (
    "Steps: medians [quartiles] of interleaved rounds; ratios: medians [quartiles] of "
    "the ratio to the non-private step in the same round. In parentheses: the ratio to "
    "the non-private step. Relative error: of the clipped gradient, against gradients "
    "clipped one at a time; largest over parameters. Half of the examples are clipped. "
    "The step noise_only clips nothing: what the noise costs on top of the gradient."
)


@dataclasses.dataclass(frozen=True)
class Cell:
    """The results on one model and batch size."""

    model: str
    num_parameters: int
    batch_size: int
    results: list[Result]


def write(folder: pathlib.Path, cells: Sequence[Cell], machine: dict[str, Any]) -> None:
    """Writes results.csv, table.md and times.png, each replaced whole."""
    run_folder.write_atomically(folder / RESULTS, results_csv(cells))
    run_folder.write_atomically(folder / TABLE, table(cells, machine))
    draw(cells, folder / PLOT)


def results_csv(cells: Sequence[Cell]) -> str:
    """Every number in base units; what was not measured is empty."""
    file = io.StringIO()
    writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for cell in cells:
        writer.writerows(_csv_row(cell, result) for result in cell.results)
    return file.getvalue()


def table(cells: Sequence[Cell], machine: dict[str, Any]) -> str:
    """The results for people, in Markdown."""
    rows = [_HEADER, tuple("---" for _ in _HEADER)]
    rows += [_table_row(cell, result) for cell in cells for result in cell.results]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    on = (
        f"On {machine['cpu']}, {machine['cores']} cores, device "
        f"{machine['device_kind']}, JAX {machine['versions']['jax']}, jax_privacy "
        f"{machine['versions']['jax-privacy']}."
    )
    return "\n".join([*lines, "", _LEGEND, "", on]) + "\n"


def draw(cells: Sequence[Cell], path: pathlib.Path) -> None:
    """Draws one panel per model and batch size: bars of time over non-private time.

    Bars start at 1, the non-private step, on a logarithmic axis: to the right is
    slower. Whiskers are quartiles.
    """
    columns = min(len(cells), 2)
    rows = math.ceil(len(cells) / columns)
    tallest = max(len(cell.results) for cell in cells)
    figure = matplotlib.figure.Figure(
        figsize=(5.6 * columns, (1.2 + 0.36 * tallest) * rows), layout="constrained"
    )
    grid = figure.subplots(rows, columns, sharex=True, squeeze=False).flatten()
    for ax, cell in zip(grid, cells, strict=False):
        _draw_cell(ax, cell)
    for ax in grid[len(cells) :]:
        ax.set_axis_off()
    plots.save(figure, path)


def _draw_cell(ax: axes.Axes, cell: Cell) -> None:
    results = [r for r in cell.results if r.method != NON_PRIVATE or r.failure]
    ax.set_xscale("log")
    # The widest bar leaves room for its label; a lone short bar gets an axis too.
    ratios = [r.step_ratio.median for r in results if r.step_ratio]
    low, high = min([0.8, *ratios]), max([2.0, *ratios])
    ax.update_datalim([(low / 1.2, 0), (high * (high / low) ** 0.4, 0)])
    ax.autoscale_view(scaley=False)
    ax.axvline(1.0, color="0.3", linewidth=1)
    for y, result in enumerate(results):
        if result.step_ratio is None:
            label = "failed" if result.failure else "no non-private time"
            ax.text(1.0, y, f" {label}", va="center", color="C3")
            continue
        ratio, lower, upper = result.step_ratio
        ax.barh(y, ratio - 1, left=1, height=0.7, color="C0" if ratio > 1 else "C2")
        ax.plot([lower, upper], [y, y], color="0.2", linewidth=1.2)
        ax.text(max(upper, 1.0), y, f"  {_significant(ratio)}", va="center")
    ax.set_yticks(range(len(results)), [r.method for r in results])
    ax.set_ylim(len(results) - 0.4, -0.6)
    ax.xaxis.set_major_formatter(ticker.FuncFormatter(lambda x, _: f"{x:g}"))
    ax.xaxis.set_minor_formatter(ticker.NullFormatter())
    ax.tick_params(labelbottom=True)
    ax.set_xlabel("step time / non-private step time")
    baseline = next(r for r in cell.results if r.method == NON_PRIVATE).step_seconds
    time = f": 1 = {_significant(1e3 * baseline.median)} ms" if baseline else ""
    ax.set_title(f"{cell.model}, batch {cell.batch_size}{time}")


def _csv_row(cell: Cell, result: Result) -> dict[str, Any]:
    row = {
        "model": cell.model,
        "num_parameters": cell.num_parameters,
        "batch_size": cell.batch_size,
        "examples_per_second": _examples_per_second(cell, result),
    }
    for field in dataclasses.fields(Result):
        value = getattr(result, field.name)
        if field.name in ("step_seconds", "step_ratio"):
            median, lower, upper = value or (None, None, None)
            row[field.name] = median
            row[f"{field.name}_lower_quartile"] = lower
            row[f"{field.name}_upper_quartile"] = upper
        else:
            row[field.name] = value
    return row


def _table_row(cell: Cell, result: Result) -> tuple[str, ...]:
    names = (cell.model, str(cell.batch_size), result.method)
    if result.failure:
        reason = "failed: " + result.failure.replace("|", "\\|")
        return (*names, reason, *("" for _ in _HEADER[len(names) + 1 :]))
    speed = _examples_per_second(cell, result)
    megabytes = None if result.temp_bytes is None else result.temp_bytes / 1e6
    return (
        *names,
        _with_quartiles(result.step_seconds, 1e3),
        _with_quartiles(result.step_ratio),
        "-" if speed is None else f"{speed:,.0f}",
        _with_ratio(result.lower_seconds, result.lower_ratio),
        _with_ratio(result.compile_seconds, result.compile_ratio),
        _with_ratio(megabytes, result.temp_ratio),
        "-" if result.relative_error is None else f"{result.relative_error:.0e}",
    )


def _examples_per_second(cell: Cell, result: Result) -> float | None:
    if result.step_seconds is None:
        return None
    return cell.batch_size / result.step_seconds.median


def _with_quartiles(spread: Spread | None, unit: float = 1.0) -> str:
    if spread is None:
        return "-"
    median, lower, upper = (_significant(unit * value) for value in spread)
    return f"{median} [{lower}, {upper}]"


def _with_ratio(value: float | None, ratio: float | None) -> str:
    if value is None:
        return "-"
    suffix = "" if ratio is None else f" ({_significant(ratio)})"
    return f"{_significant(value)}{suffix}"


def _significant(value: float) -> str:
    """Three significant digits, without an exponent.

    Example:
      >>> [_significant(x) for x in (0.98765, 1.0, 12.345, 1234.5, 0.00012, 0.0)]
      ['0.988', '1.00', '12.3', '1234', '0.00012', '0']
    """
    if value == 0:
        return "0"
    decimals = max(2 - math.floor(math.log10(abs(value))), 0)
    return f"{value:.{min(decimals, 5)}f}"
