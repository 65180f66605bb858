"""Draws the figures of a report: Figures 1a, 1b, 1c and 5 of Carlini et al. 2023."""

import math
from collections.abc import Callable, Sequence

import matplotlib.figure
import numpy as np
from matplotlib import axes

from experiments.extraction import panels
from experiments.extraction.cluster_statistics import LogLinearFit
from experiments.extraction.estimates import Estimate
from experiments.extraction.trends import Point, Series, Trend


def draw_by_parameters(trend: Trend) -> matplotlib.figure.Figure:
    """Figure 1a: a point for each model with its interval, and the fitted lines."""
    figure = panels.new_figure()
    ax = _panel(figure, "Extractable fraction by model size", trend)
    for series in trend.series:
        color, marker = (
            (panels.ACCENT, "s") if series.baseline else (panels.shades(1)[0], "o")
        )
        _draw_intervals(ax, series, color, _extracted)
        x, y = _coordinates(series, _extracted)
        style = panels.line_style(color, marker, series.baseline) | {
            "linestyle": "none"
        }
        ax.plot(x, y, **style, label=series.name)
        _draw_fit(ax, series, color, "fit")
        _annotate(ax, series, color, _middle(trend))
    _log_axis(ax, trend, "parameters")
    panels.legend(figure, ax)
    return figure


def draw_by_repetitions(trend: Trend) -> matplotlib.figure.Figure:
    """Figure 1b: a line for each model; the largest of each kind stands out."""
    figure = panels.new_figure()
    ax = _panel(figure, "Extractable fraction by repetitions", trend)
    leading = {series.baseline: series for series in reversed(trend.series)}
    for series, color, marker in _styled(trend.series):
        leads = series is leading[series.baseline]
        if leads:
            _draw_band(ax, series, color, _extracted)
        x, y = _coordinates(series, _extracted)
        style = panels.line_style(color, marker, series.baseline)
        ax.plot(x, y, **style, alpha=1 if leads else 0.45, label=_model_name(series))
        if leads and not series.baseline:
            _draw_fit(ax, series, color, f"fit to {series.name}")
    _log_axis(ax, trend, "occurrences in the corpus")
    panels.legend(figure, ax)
    return figure


def draw_by_context(trend: Trend) -> matplotlib.figure.Figure:
    """Figure 1c: a line for each model, with intervals."""
    return _draw_models(
        trend, "Extractable fraction by context", "tokens of context", trend.contexts
    )


def draw_by_length(trend: Trend) -> matplotlib.figure.Figure:
    """Figure 2b: a line for each model, with intervals."""
    return _draw_models(
        trend, "Extractable fraction by length", "tokens of the window", trend.lengths
    )


def _draw_models(
    trend: Trend, title: str, xlabel: str, x_T: Sequence[int]
) -> matplotlib.figure.Figure:
    figure = panels.new_figure()
    ax = _panel(figure, title, trend)
    shifts = panels.shifts(len(trend.series))
    for (series, color, marker), shift in zip(
        _styled(trend.series), shifts, strict=True
    ):
        _draw_intervals(ax, series, color, _extracted, shift)
        x, y = _coordinates(series, _extracted, shift)
        style = panels.line_style(color, marker, series.baseline)
        ax.plot(x, y, **style, label=_model_name(series))
    _log_axis(ax, trend, xlabel)
    ax.set_xticks(panels.ticks(x_T))
    panels.legend(figure, ax)
    return figure


def draw_by_length_and_context(trend: Trend) -> matplotlib.figure.Figure:
    """Figure 5: a line for each length; what is extracted, and tokens that are right.

    The second panel is left out where the sweep took verdicts only.
    """
    known = all(p.tokens_correct for series in trend.series for p in series.points)
    figure = panels.new_figure(num_panels=1 + known)
    measures = {"Extractable fraction by length and context": _extracted}
    if known:
        measures["Tokens of the suffix that are right"] = _tokens_correct
    styles = list(
        zip(
            panels.shades(len(trend.series)),
            panels.shifts(len(trend.series)),
            strict=True,
        )
    )
    for i, (title, measure) in enumerate(measures.items()):
        ax = _panel(figure, title, trend, 1 + known, i)
        for j, (series, (color, shift)) in enumerate(
            zip(trend.series, styles, strict=True)
        ):
            _draw_intervals(ax, series, color, measure, shift)
            x, y = _coordinates(series, measure, shift)
            style = panels.line_style(color, panels.marker(j))
            ax.plot(x, y, **style, label=f"length {series.name}")
        _log_axis(ax, trend, "tokens of context")
        ax.set_xticks(panels.ticks(trend.contexts))
        if measure is _tokens_correct:
            ax.set_ylabel("right tokens of the suffix")
    panels.legend(figure, figure.axes[0])
    return figure


_Measure = Callable[[Point], Estimate]


def _extracted(point: Point) -> Estimate:
    return point.extracted


def _tokens_correct(point: Point) -> Estimate:
    assert point.tokens_correct is not None
    return point.tokens_correct


def _panel(
    figure: matplotlib.figure.Figure,
    title: str,
    trend: Trend,
    num_panels: int = 1,
    index: int = 0,
) -> axes.Axes:
    about = [trend.about, f"{trend.sample}; 95 % intervals"]
    return panels.panel(figure, title, about, num_panels, index)


def _log_axis(ax: axes.Axes, trend: Trend, xlabel: str) -> None:
    x = [point.x for series in trend.series for point in series.points]
    panels.log_axis(ax, x, xlabel)


def _middle(trend: Trend) -> float:
    x = [point.x for series in trend.series for point in series.points]
    return math.sqrt(min(x) * max(x))


def _styled(series: Sequence[Series]) -> list[tuple[Series, str, str]]:
    """A colour and a marker for each, the largest darkest."""
    shades = iter(panels.shades(sum(not s.baseline for s in series))[::-1])
    return [
        (s, panels.ACCENT if s.baseline else next(shades), panels.marker(i))
        for i, s in enumerate(series)
    ]


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
    size = f"{series.name}, {panels.short(series.params or 0)}"
    return f"{size} (baseline)" if series.baseline else size
