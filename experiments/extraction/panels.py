"""What the pictures of a report share: panels, axes, colours and markers."""

import math
from collections.abc import Sequence
from typing import Any

import matplotlib
import matplotlib.figure
import numpy as np
import polars as pl
from matplotlib import axes, text, ticker

# Viridis orders models and lengths by lightness, which survives colour blindness and
# grey printing (Nuñez, Anderton & Renslow 2018). Vermillion (Okabe & Ito 2008) stands
# apart from it.
_ORDERED = "viridis_r"
ACCENT = "#D55E00"
"""The colour of baselines, and of what else is to stand apart."""
_MARKERS = "osD^vP<X>p"
_GREY = "0.35"
# Of small print across a picture that has one panel.
_CHARACTERS = 100


def new_figure(num_panels: int = 1) -> matplotlib.figure.Figure:
    """An empty picture for `num_panels` panels side by side."""
    return matplotlib.figure.Figure(
        figsize=(6.4 if num_panels == 1 else 10, 4.8), layout="constrained"
    )


def panel(
    figure: matplotlib.figure.Figure,
    title: str,
    about: Sequence[str],
    num_panels: int = 1,
    index: int = 0,
) -> axes.Axes:
    """Adds a panel whose y axis is a share of windows, in percent.

    Args:
      figure: As `new_figure` made it.
      title: Above the panel.
      about: Two lines in small print below it, which become one if that fits.
      num_panels: As for `new_figure`.
      index: Which one this is.
    """
    ax = figure.add_subplot(1, num_panels, index + 1)
    lines = "; ".join(about)
    if num_panels > 1 or len(lines) > _CHARACTERS:
        lines = "\n".join(about)
    ax.set_title(title + "\n" * (1 + lines.count("\n")), loc="left", fontsize=11)
    small = ax.text(0, 1.025, lines, transform=ax.transAxes, fontsize=7.5, color=_GREY)
    small.set_in_layout(False)
    ax.set_ylabel("extractable windows")
    ax.yaxis.set_major_formatter(ticker.FuncFormatter(lambda y, _: f"{100 * y:.3g}%"))
    ax.grid(axis="y", color="0.92")
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def draw_line(
    ax: axes.Axes,
    table: pl.DataFrame,
    x: str,
    y: str,
    color: str,
    index: int,
    label: str,
    shift: float = 1.0,
) -> None:
    """A line with a marker and an interval at each point.

    Args:
      ax: A panel.
      table: Its columns `x`, `y`, `y`_lower and `y`_upper are drawn.
      x: Name of a column.
      y: Name of a column.
      color: Of the line.
      index: Which marker it has; odd ones are dashed, with hollow markers.
      label: For the legend.
      shift: Factor of x, see `shifts`.
    """
    x_K = shift * table[x].to_numpy()
    low_K, high_K = (table[f"{y}_{end}"].to_numpy() for end in ("lower", "upper"))
    ax.vlines(x_K, low_K, high_K, color=color, linewidth=1, alpha=0.7)
    style = line_style(color, marker(index), index % 2 == 1)
    ax.plot(x_K, table[y].to_numpy(), **style, label=label)


def log_axis(ax: axes.Axes, x: Sequence[float], xlabel: str) -> None:
    """A logarithmic x axis around the points; y from 0 to the highest that is drawn.

    Args:
      ax: A panel with everything in it.
      x: > 0, of all points.
      xlabel: Its name.
    """
    ax.set_xscale("log")
    ax.set_xlim(min(x) / 1.15, max(x) * 1.15)
    subs = (1, 2, 5) if max(x) / min(x) > 3 else range(1, 10)
    ax.xaxis.set_major_locator(ticker.LogLocator(subs=subs))
    ax.xaxis.set_major_formatter(ticker.FuncFormatter(lambda x, _: short(x)))
    ax.xaxis.set_minor_formatter(ticker.NullFormatter())
    ax.set_xlabel(xlabel)
    y_from_0(ax)


def y_from_0(ax: axes.Axes) -> None:
    """The y axis, from 0 to a little above the highest that is drawn."""
    top = min(1.02, max(0.02, 1.05 * ax.dataLim.y1))
    # Room for the lower half of a marker at 0.
    ax.set_ylim(-0.015 * top, top)


def ticks(x: Sequence[float]) -> list[float]:
    """The points themselves, but for those too near to a neighbour to be labelled.

    Example:
      >>> ticks([50, 100, 150, 200, 250, 300, 350, 400, 450])
      [50, 100, 150, 200, 250, 300, 350, 450]
    """
    apart = (max(x) / min(x)) ** 0.06
    chosen: list[float] = []
    for tick in sorted(x):
        # The last point has a label, if need be instead of the one before it.
        if tick == max(x) and len(chosen) > 1 and tick < apart * chosen[-1]:
            chosen.pop()
        if not chosen or tick >= apart * chosen[-1]:
            chosen.append(tick)
    return chosen


def legend(figure: matplotlib.figure.Figure, *panels: axes.Axes) -> None:
    """The names of what these panels show, below all of them.

    Comes last: whatever the picture says is then taken literally, names of models too,
    in which `$` would start a formula.
    """
    # Matplotlib's own choice leaves out names that start with "_", as those of lines
    # without a name do.
    named = [
        (line, str(line.get_label()))
        for ax in panels
        for line in ax.lines
        if not str(line.get_label()).startswith("_child")
    ]
    lines, names = zip(*named, strict=True)
    figure.legend(
        lines,
        names,
        loc="outside lower center",
        ncols=2 if len(figure.axes) == 1 else 5,
        fontsize=8,
        frameon=False,
    )
    for said in figure.findobj(text.Text):
        said.set_parse_math(False)


def shifts(num: int) -> list[float]:
    """Factors that move lines sideways a little, or their intervals hide each other."""
    return [1.01 ** (i - (num - 1) / 2) for i in range(num)]


def shades(num: int) -> list[str]:
    """Colours from light to dark; a single one is dark."""
    colormap = matplotlib.colormaps[_ORDERED]
    places = np.linspace(0.2, 0.95, num) if num > 1 else [0.75]
    return [matplotlib.colors.to_hex(colormap(place)) for place in places]


def marker(index: int) -> str:
    """A marker for the line of this index; after ten they come again."""
    return _MARKERS[index % len(_MARKERS)]


def line_style(color: str, marker: str, baseline: bool = False) -> dict[str, Any]:
    """Baselines are dashed, their markers hollow."""
    return {
        "color": color,
        "marker": marker,
        "markersize": 5,
        "linewidth": 1.4,
        "linestyle": "--" if baseline else "-",
        "markerfacecolor": "white" if baseline else color,
    }


def short(number: float) -> str:
    """Three digits with K, M or B.

    Example:
      >>> [short(x) for x in (50, 1_500, 124_439_808, 2.7e9)]
      ['50', '1.5K', '124M', '2.7B']
    """
    power = min(3, max(0, math.floor(math.log10(max(number, 1)) / 3 + 1e-9)))
    return f"{number / 1000**power:.3g}{('', 'K', 'M', 'B')[power]}"
