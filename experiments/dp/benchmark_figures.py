"""The pictures of a benchmark: bars of ratios, and lines over what a sweep varies."""

import dataclasses
import math
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib.figure
from matplotlib import axes, ticker

from experiments import plots
from experiments.dp import benchmark_config
from experiments.dp.benchmark_cells import CellSpec
from experiments.dp.benchmark_methods import METHODS, NON_PRIVATE
from experiments.dp.measuring import Result
from experiments.timing import Spread

Measured = Sequence[tuple[CellSpec, Sequence[Result]]]

# Distinguished by readers who see few colours (Okabe & Ito 2008), and in grey by shape.
_COLORS = (
    "#000000",
    "#999999",
    "#0072B2",
    "#56B4E9",
    "#009E73",
    "#E69F00",
    "#D55E00",
    "#CC79A7",
    "#7A4A00",
    "#666666",
    "#F0E442",
    "#332288",
)
_MARKERS = "osD^v<>PX*ph"
_PLAIN = ticker.FuncFormatter(lambda x, _: f"{x:g}")
_STYLES = dict(zip(METHODS, zip(_COLORS, _MARKERS, strict=True), strict=True))


@dataclasses.dataclass(frozen=True)
class _Bars:
    """What one kind of bar shows: its length from a result, and its absolute value."""

    xlabel: str
    ratio: Callable[[Result], Spread | float | None]
    value: Callable[[Result], str]


_STEP_TIME = _Bars(
    "step time / non-private step time",
    lambda result: result.step_ratio,
    lambda result: (
        f"{1e3 * result.step_seconds.median:.3g} ms" if result.step_seconds else ""
    ),
)
_COMPILE_TIME = _Bars(
    "compile time / non-private compile time",
    lambda result: result.compile_ratio,
    lambda result: f"{result.compile_seconds:.3g} s" if result.compile_seconds else "",
)
_TEMPORARY_MEMORY = _Bars(
    "temporary memory / non-private",
    lambda result: result.temp_ratio,
    lambda result: f"{(result.temp_bytes or 0) / 1e6:.3g} MB",
)
_LARGEST_BATCH = _Bars(
    "largest batch / non-private",
    lambda result: result.largest_batch_ratio,
    lambda result: f"{result.largest_batch or 0:,}",
)

_BARS = {
    benchmark_config.STEP_TIME: (_STEP_TIME,),
    benchmark_config.COMPILE_TIME: (_COMPILE_TIME,),
    benchmark_config.MEMORY: (_TEMPORARY_MEMORY, _LARGEST_BATCH),
}


def draw(figure: str, measured: Measured, path: pathlib.Path) -> None:
    """Draws one of `benchmark_config.FIGURES` as a PNG, replaced whole.

    Bars start at 1, the non-private step, on a logarithmic axis; whiskers are
    quartiles. Lines join the medians of a method's step time; what failed has no point.

    Args:
      figure: Which one.
      measured: The cells, at least one.
      path: Where it goes.
    """
    if figure in _BARS:
        plots.save(_bars(_BARS[figure], measured), path)
    else:
        plots.save(_lines(figure, measured), path)


def _bars(kinds: Sequence[_Bars], measured: Measured) -> matplotlib.figure.Figure:
    """A panel for each cell and kind."""
    panels = [(kind, *cell) for cell in measured for kind in kinds]
    tallest = max(len(results) for _, results in measured)
    figure, grid = _grid(len(panels), height=1.2 + 0.36 * tallest)
    for ax, panel in zip(grid, panels, strict=True):
        _draw_bars(ax, *panel)
    return figure


def _draw_bars(
    ax: axes.Axes, kind: _Bars, spec: CellSpec, results: Sequence[Result]
) -> None:
    shown = [r for r in results if r.method != NON_PRIVATE or r.failure]
    spreads = [_spread(kind.ratio(result)) for result in shown]
    ax.set_xscale("log")
    # The widest bar leaves room for its label; a lone short bar gets an axis too.
    medians = [spread.median for spread in spreads if spread]
    low, high = min([0.8, *medians]), max([2.0, *medians])
    ax.update_datalim([(low / 1.2, 0), (high * (high / low) ** 0.7, 0)])
    ax.autoscale_view(scaley=False)
    ax.axvline(1.0, color="0.3", linewidth=1)
    for y, (result, spread) in enumerate(zip(shown, spreads, strict=True)):
        if spread is None:
            label = "failed" if result.failure else "no non-private value"
            ax.text(1.0, y, f" {label}", va="center", color="#D55E00")
            continue
        ratio, lower, upper = spread
        color = "#0072B2" if ratio > 1 else "#009E73"
        ax.barh(y, ratio - 1, left=1, height=0.7, color=color)
        ax.plot([lower, upper], [y, y], color="0.2", linewidth=1.2)
        label = f"  {ratio:.3g} ({kind.value(result)})"
        ax.text(max(upper, 1.0), y, label, va="center")
    ax.set_yticks(range(len(shown)), [r.method for r in shown])
    ax.set_ylim(len(shown) - 0.4, -0.6)
    ax.xaxis.set_major_formatter(_PLAIN)
    ax.xaxis.set_minor_formatter(ticker.NullFormatter())
    ax.set_xlabel(kind.xlabel)
    baseline = next(r for r in results if r.method == NON_PRIVATE)
    absolute = "" if baseline.failure else f"\nnon-private: {kind.value(baseline)}"
    ax.set_title(f"{spec}{absolute}", fontsize=9)


def _spread(ratio: Spread | float | None) -> Spread | None:
    """A number is a spread of no width; a ratio of 0 has no place on a log axis."""
    if not ratio:
        return None
    return ratio if isinstance(ratio, Spread) else Spread(ratio, ratio, ratio)


def _lines(figure_name: str, measured: Measured) -> matplotlib.figure.Figure:
    """A panel for each group of cells that differ only in what the sweep varies."""
    groups: dict[Any, list[tuple[CellSpec, Sequence[Result]]]] = {}
    for spec, results in measured:
        groups.setdefault(_panel_of(figure_name, spec), []).append((spec, results))
    figure, grid = _grid(len(groups), height=3.8)
    for ax, group in zip(grid, groups.values(), strict=True):
        _draw_lines(ax, figure_name, group)
    handles = {
        str(line.get_label()): line
        for ax in grid
        for line in ax.get_legend_handles_labels()[0]
    }
    columns = 5 if len(grid) > 1 else 3
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=columns
    )
    return figure


def _panel_of(figure_name: str, spec: CellSpec) -> tuple[Any, ...]:
    if figure_name == benchmark_config.BATCH_SIZE:
        return spec.model, spec.input_shape
    if figure_name == benchmark_config.IMAGE_SIZE:
        return spec.model, spec.batch_size
    return _family(spec.model), spec.input_shape, spec.batch_size


def _family(model: str) -> str:
    """The letters that a model's name starts with.

    Example:
      >>> _family("resnet18:width=16"), _family("tempered_cnn")
      ('resnet', 'tempered_cnn')
    """
    letters = re.match(r"[a-z_]+", model)
    return letters[0] if letters else model


def _draw_lines(ax: axes.Axes, figure_name: str, group: Measured) -> None:
    specs = [spec for spec, _ in group]
    shared, labels = _labels([spec.model for spec in specs])
    shape, batch = specs[0].shape_name, f"batch {specs[0].batch_size}"
    ax.set_yscale("log")
    ax.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter(_PLAIN)
    ax.yaxis.set_minor_formatter(ticker.NullFormatter())
    if figure_name == benchmark_config.DEPTH:
        positions = list(range(len(specs)))
        ax.set_xticks(positions, labels)
        ax.set_xlim(-0.3, len(specs) - 0.7)
        family = " ".join([_family(specs[0].model), *shared, shape])
        title, xlabel = f"{family}, {batch}", "depth"
    elif figure_name == benchmark_config.BATCH_SIZE:
        positions = [spec.batch_size for spec in specs]
        title, xlabel = f"{specs[0].model} {shape}", "batch size"
    else:
        positions = [spec.input_shape[0] for spec in specs]
        title, xlabel = f"{specs[0].model}, {batch}", "image height and width, pixels"
    if figure_name != benchmark_config.DEPTH:
        ax.set_xscale("log", base=2)
        ax.set_xticks(positions, [str(x) for x in positions])
        ax.xaxis.set_minor_locator(ticker.NullLocator())
    for method in METHODS:
        points = sorted(
            (x, result.step_seconds)
            for x, (_, results) in zip(positions, group, strict=True)
            for result in results
            if result.method == method and result.step_seconds
        )
        if points:
            _draw_line(ax, method, points)
    ax.set(title=title, xlabel=xlabel, ylabel="time per step, ms")
    ax.grid(axis="y", which="major", color="0.9")


def _draw_line(
    ax: axes.Axes, method: str, points: Sequence[tuple[int, Spread]]
) -> None:
    color, marker = _STYLES[method]
    xs = [x for x, _ in points]
    medians = [1e3 * spread.median for _, spread in points]
    errors = (
        [1e3 * (spread.median - spread.lower) for _, spread in points],
        [1e3 * (spread.upper - spread.median) for _, spread in points],
    )
    ax.plot(xs, medians, color=color, marker=marker, markersize=5, lw=1.3, label=method)
    ax.errorbar(xs, medians, errors, fmt="none", ecolor=color, elinewidth=1)


def _labels(models: Sequence[str]) -> tuple[list[str], list[str]]:
    """The options that the specs of a family share, and what each has of its own.

    Example:
      >>> _labels(["resnet18:width=16", "resnet34:width=16"])
      (['width=16'], ['resnet18', 'resnet34'])
      >>> _labels(["mlp:hidden_sizes=64-64", "mlp:hidden_sizes=64-64-64"])
      ([], ['2 hidden_sizes', '3 hidden_sizes'])
    """
    parts = [model.split(":") for model in models]
    shared = [part for part in parts[0] if all(part in others for others in parts)]
    own = [":".join(_short(p) for p in mine if p not in shared) for mine in parts]
    labels = [o or m for o, m in zip(own, models, strict=True)]
    return [part for part in shared if "=" in part], labels


def _short(part: str) -> str:
    """An option with the length of its tuple, if it is one."""
    name, _, value = part.partition("=")
    return f"{len(value.split('-'))} {name}" if "-" in value else part


def _grid(
    num_panels: int, height: float
) -> tuple[matplotlib.figure.Figure, list[axes.Axes]]:
    columns = min(num_panels, 2)
    rows = math.ceil(num_panels / columns)
    figure = matplotlib.figure.Figure(
        figsize=(5.6 * columns, height * rows), layout="constrained"
    )
    grid = list(figure.subplots(rows, columns, squeeze=False).flatten())
    for ax in grid[num_panels:]:
        ax.set_axis_off()
    return figure, grid[:num_panels]
