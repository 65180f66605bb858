"""Draws the figures of a report: Figures 1a, 1b, 1c and 5 of Carlini et al. 2023."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib
import matplotlib.figure
import numpy as np
from matplotlib import axes, ticker

from experiments.extraction.cluster_statistics import LogLinearFit
from experiments.extraction.trends import Estimate, Point, Series, Trend

# Viridis orders models and lengths by lightness, which survives colour blindness and
# grey printing (Nuñez, Anderton & Renslow 2018). Vermillion (Okabe & Ito 2008) stands
# apart from it.
_ORDERED = "viridis_r"
_BASELINE = "#D55E00"
_MARKERS = "osD^vP<X>p"
_GREY = "0.35"


def draw_by_parameters(trend: Trend) -> matplotlib.figure.Figure:
    """Figure 1a: a point for each model with its interval, and the fitted lines."""
    figure = _new_figure()
    ax = _panel(figure, "Extractable fraction by model size", trend)
    for series in trend.series:
        color, marker = (_BASELINE, "s") if series.baseline else (_shades(1)[0], "o")
        _draw_intervals(ax, series, color, _extracted)
        x, y = _coordinates(series, _extracted)
        style = _style(color, marker, series.baseline) | {"linestyle": "none"}
        ax.plot(x, y, **style, label=series.name)
        _draw_fit(ax, series, color, "fit")
        _annotate(ax, series, color, _middle(trend))
    _log_axis(ax, trend, "parameters")
    _legend(figure, ax)
    return figure


def draw_by_repetitions(trend: Trend) -> matplotlib.figure.Figure:
    """Figure 1b: a line for each model; the largest of each kind stands out."""
    figure = _new_figure()
    ax = _panel(figure, "Extractable fraction by repetitions", trend)
    leading = {series.baseline: series for series in reversed(trend.series)}
    for series, color, marker in _styled(trend.series):
        leads = series is leading[series.baseline]
        if leads:
            _draw_band(ax, series, color, _extracted)
        x, y = _coordinates(series, _extracted)
        style = _style(color, marker, series.baseline)
        ax.plot(x, y, **style, alpha=1 if leads else 0.45, label=_model_name(series))
        if leads and not series.baseline:
            _draw_fit(ax, series, color, f"fit to {series.name}")
    _log_axis(ax, trend, "occurrences in the corpus")
    _legend(figure, ax)
    return figure


def draw_by_context(trend: Trend) -> matplotlib.figure.Figure:
    """Figure 1c: a line for each model, with intervals."""
    figure = _new_figure()
    ax = _panel(figure, "Extractable fraction by context", trend)
    shifts = _shifts(len(trend.series))
    for (series, color, marker), shift in zip(
        _styled(trend.series), shifts, strict=True
    ):
        _draw_intervals(ax, series, color, _extracted, shift)
        x, y = _coordinates(series, _extracted, shift)
        style = _style(color, marker, series.baseline)
        ax.plot(x, y, **style, label=_model_name(series))
    _log_axis(ax, trend, "tokens of context")
    ax.set_xticks(_ticks(trend.contexts))
    _legend(figure, ax)
    return figure


def draw_by_length_and_context(trend: Trend) -> matplotlib.figure.Figure:
    """Figure 5: a line for each length; what is extracted, and tokens that are right.

    The second panel is left out where the sweep took verdicts only.
    """
    known = all(p.tokens_correct for series in trend.series for p in series.points)
    figure = _new_figure(num_panels=1 + known)
    measures = {"Extractable fraction by length and context": _extracted}
    if known:
        measures["Tokens of the suffix that are right"] = _tokens_correct
    styles = list(
        zip(_shades(len(trend.series)), _shifts(len(trend.series)), strict=True)
    )
    for i, (title, measure) in enumerate(measures.items()):
        ax = _panel(figure, title, trend, 1 + known, i)
        for j, (series, (color, shift)) in enumerate(
            zip(trend.series, styles, strict=True)
        ):
            _draw_intervals(ax, series, color, measure, shift)
            x, y = _coordinates(series, measure, shift)
            style = _style(color, _MARKERS[j % len(_MARKERS)], False)
            ax.plot(x, y, **style, label=f"length {series.name}")
        _log_axis(ax, trend, "tokens of context")
        ax.set_xticks(_ticks(trend.contexts))
        if measure is _tokens_correct:
            ax.set_ylabel("right tokens of the suffix")
    _legend(figure, figure.axes[0])
    return figure


_Measure = Callable[[Point], Estimate]


def _extracted(point: Point) -> Estimate:
    return point.extracted


def _tokens_correct(point: Point) -> Estimate:
    assert point.tokens_correct is not None
    return point.tokens_correct


def _new_figure(num_panels: int = 1) -> matplotlib.figure.Figure:
    return matplotlib.figure.Figure(
        figsize=(6.4 if num_panels == 1 else 10, 4.8), layout="constrained"
    )


def _panel(
    figure: matplotlib.figure.Figure,
    title: str,
    trend: Trend,
    num_panels: int = 1,
    index: int = 0,
) -> axes.Axes:
    ax = figure.add_subplot(1, num_panels, index + 1)
    # A line of its own for what would not fit a narrow panel.
    about = [trend.about, f"{trend.sample}; 95 % intervals"]
    lines = "\n".join(about) if num_panels > 1 else "; ".join(about)
    ax.set_title(title + "\n" * num_panels, loc="left", fontsize=11)
    text = ax.text(0, 1.025, lines, transform=ax.transAxes, fontsize=7.5, color=_GREY)
    text.set_in_layout(False)
    ax.set_ylabel("extractable windows")
    ax.yaxis.set_major_formatter(ticker.FuncFormatter(lambda y, _: f"{100 * y:.3g}%"))
    ax.grid(axis="y", color="0.92")
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def _log_axis(ax: axes.Axes, trend: Trend, xlabel: str) -> None:
    """A logarithmic x axis around the points; y from 0 to the highest interval."""
    points = [point for series in trend.series for point in series.points]
    x = [point.x for point in points]
    ax.set_xscale("log")
    ax.set_xlim(min(x) / 1.15, max(x) * 1.15)
    subs = (1, 2, 5) if max(x) / min(x) > 3 else range(1, 10)
    ax.xaxis.set_major_locator(ticker.LogLocator(subs=subs))
    ax.xaxis.set_major_formatter(ticker.FuncFormatter(lambda x, _: _short(x)))
    ax.xaxis.set_minor_formatter(ticker.NullFormatter())
    top = min(1.02, max(0.02, 1.05 * ax.dataLim.y1))
    # Room for the lower half of a marker at 0.
    ax.set_ylim(-0.015 * top, top)
    ax.set_xlabel(xlabel)


def _ticks(x: Sequence[float]) -> list[float]:
    """The points themselves, but for those too near to a neighbour to be labelled.

    Example:
      >>> _ticks([50, 100, 150, 200, 250, 300, 350, 400, 450])
      [50, 100, 150, 200, 250, 300, 350, 450]
    """
    apart = (max(x) / min(x)) ** 0.06
    ticks: list[float] = []
    for tick in sorted(x):
        # The last point has a label, if need be instead of the one before it.
        if tick == max(x) and len(ticks) > 1 and tick < apart * ticks[-1]:
            ticks.pop()
        if not ticks or tick >= apart * ticks[-1]:
            ticks.append(tick)
    return ticks


def _middle(trend: Trend) -> float:
    x = [point.x for series in trend.series for point in series.points]
    return math.sqrt(min(x) * max(x))


def _legend(figure: matplotlib.figure.Figure, ax: axes.Axes) -> None:
    handles, labels = ax.get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=2 if len(figure.axes) == 1 else 5,
        fontsize=8,
        frameon=False,
    )


def _styled(series: Sequence[Series]) -> list[tuple[Series, str, str]]:
    """A colour and a marker for each, the largest darkest."""
    shades = iter(_shades(sum(not s.baseline for s in series))[::-1])
    return [
        (s, _BASELINE if s.baseline else next(shades), _MARKERS[i % len(_MARKERS)])
        for i, s in enumerate(series)
    ]


def _shifts(num: int) -> list[float]:
    """Factors that move lines sideways a little, or their intervals hide each other."""
    return [1.01 ** (i - (num - 1) / 2) for i in range(num)]


def _shades(num: int) -> list[str]:
    """Colours from light to dark; a single one is dark."""
    colormap = matplotlib.colormaps[_ORDERED]
    places = np.linspace(0.2, 0.95, num) if num > 1 else [0.75]
    return [matplotlib.colors.to_hex(colormap(place)) for place in places]


def _style(color: str, marker: str, baseline: bool) -> dict[str, Any]:
    """Baselines are dashed, their markers hollow."""
    return {
        "color": color,
        "marker": marker,
        "markersize": 5,
        "linewidth": 1.4,
        "linestyle": "--" if baseline else "-",
        "markerfacecolor": "white" if baseline else color,
    }


def _coordinates(
    series: Series, measure: _Measure, shift: float = 1.0
) -> tuple[list[float], list[float]]:
    x = [shift * point.x for point in series.points]
    return x, [measure(point).value for point in series.points]


def _ends(series: Series, measure: _Measure) -> tuple[list[float], list[float]]:
    estimates = [measure(point) for point in series.points]
    return [e.lower for e in estimates], [e.upper for e in estimates]


def _draw_intervals(
    ax: axes.Axes, series: Series, color: str, measure: _Measure, shift: float = 1.0
) -> None:
    x, _ = _coordinates(series, measure, shift)
    ax.vlines(x, *_ends(series, measure), color=color, linewidth=1, alpha=0.7)


def _draw_band(ax: axes.Axes, series: Series, color: str, measure: _Measure) -> None:
    x, _ = _coordinates(series, measure)
    ax.fill_between(x, *_ends(series, measure), color=color, alpha=0.18, linewidth=0)


def _annotate(ax: axes.Axes, series: Series, color: str, middle: float) -> None:
    """Writes the models' names beside their points, towards the middle."""
    for point in series.points:
        right = point.x > middle
        ax.annotate(
            point.label,
            (point.x, point.extracted.value),
            xytext=(-6 if right else 6, 5),
            textcoords="offset points",
            ha="right" if right else "left",
            fontsize=8,
            color=color,
        )


def _draw_fit(ax: axes.Axes, series: Series, color: str, name: str) -> None:
    if not isinstance(series.fit, LogLinearFit):
        return
    x, _ = _coordinates(series, _extracted)
    ends = np.array([min(x), max(x)])
    label = f"{name}: {100 * series.fit.slope:+.1f} pp per tenfold"
    if series.fit.num_points > 2:
        label += f", R² {series.fit.r_squared:.3f}"
    ax.plot(ends, series.fit(ends), ":", color=color, linewidth=1.2, label=label)


def _model_name(series: Series) -> str:
    size = f"{series.name}, {_short(series.params or 0)}"
    return f"{size} (baseline)" if series.baseline else size


def _short(number: float) -> str:
    """Three digits with K, M or B.

    Example:
      >>> [_short(x) for x in (50, 1_500, 124_439_808, 2.7e9)]
      ['50', '1.5K', '124M', '2.7B']
    """
    power = min(3, max(0, math.floor(math.log10(max(number, 1)) / 3 + 1e-9)))
    return f"{number / 1000**power:.3g}{('', 'K', 'M', 'B')[power]}"
