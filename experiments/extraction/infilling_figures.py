"""Figures 4a and 4b of Carlini et al. 2023: T5 models that fill the blanks of windows.

A window counts if all of its blanks are filled exactly; see infilling.py.
"""

import dataclasses
from typing import Any

import matplotlib.figure
import numpy as np
import polars as pl

from experiments.extraction import estimates, figures, panels, queries, tables, trends
from experiments.extraction.report_figure import Choices, Figure, LeftOut
from experiments.extraction.sweep_runs import SweepRuns
from experiments.extraction.trends import Trend

_NO_WINDOW = LeftOut("no window was put to every model")
_FILLED = "windows filled perfectly"


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What Figure 4a shows.

    Attributes:
      trend: As `trends.by_parameters` has it.
      lengths: Of each model and length: model, baseline, params, length, extracted with
        its interval, windows, clusters.
      spread: Of each model, over its lengths, each counting alike: model,
        lengths_deviation (standard deviation, with the number of lengths as divisor),
        lengths_least, lengths_most.
    """

    trend: Trend
    lengths: pl.DataFrame
    spread: pl.DataFrame


def by_length(runs: SweepRuns) -> pl.DataFrame:
    """The fraction of each model's windows of each length, as in `Sizes`."""
    records = trends.protocol_records(runs)
    rows: list[dict[str, Any]] = []
    for model in sorted(runs.models, key=lambda model: (model.baseline, model.params)):
        own = queries.models_with(records, [model.name]).sort("length")
        parts = own.partition_by("length", maintain_order=True)
        fractions = estimates.means_by(own, "length", own["extracted"].to_numpy())
        rows += [
            {
                "model": model.name,
                "baseline": model.baseline,
                "params": model.params,
                "length": part["length"][0],
                "extracted": fraction.value,
                "extracted_lower": fraction.lower,
                "extracted_upper": fraction.upper,
                "windows": len(part),
                "clusters": part["cluster"].n_unique(),
            }
            for part, fraction in zip(parts, fractions, strict=True)
        ]
    return pl.DataFrame(rows)


def spread_over_lengths(lengths: pl.DataFrame) -> pl.DataFrame:
    """How unlike the lengths are, as in `Sizes`.

    Example:
      >>> lengths = pl.DataFrame({"model": "a", "extracted": [0.25, 0.75, 0.5, 0.5]})
      >>> spread_over_lengths(lengths)["lengths_most"].to_list()
      [0.75]
    """
    fraction = pl.col("extracted")
    return lengths.group_by("model", maintain_order=True).agg(
        lengths_deviation=fraction.std(ddof=0),
        lengths_least=fraction.min(),
        lengths_most=fraction.max(),
    )


def _measure_sizes(runs: SweepRuns, choices: Choices) -> Sizes | LeftOut | None:
    if not runs.masking:
        return None
    trend = trends.by_parameters(runs, choices.seed)
    if not trend.series:
        return _NO_WINDOW
    lengths = by_length(runs)
    return Sizes(trend, lengths, spread_over_lengths(lengths))


def _sizes_caption(shown: Sizes, runs: SweepRuns) -> str:
    lengths = ", ".join(map(str, shown.trend.lengths))
    return (
        f"Fraction of windows whose blanks are all filled perfectly ({_blanks(runs)}) "
        "against the number of parameters: the mean over lengths "
        f"({lengths}) of the fraction at each length. {shown.trend.sample}, the same "
        "for every model. The dark band is one standard deviation of the lengths' "
        "fractions to either side of their mean, the light one goes from the least to "
        "the largest of them (the paper does not say what its bands are taken over). "
        "Bars are 95 % intervals of the mean, which take clusters as the unit."
    )


def _blanks(runs: SweepRuns) -> str:
    ways = {
        "iid": "15 % of the tokens, dropped one by one at random",
        "spans": "15 % of the tokens, dropped in random spans of three on average",
    }
    return ways[runs.masking]


def _draw_sizes(shown: Sizes) -> matplotlib.figure.Figure:
    figure = panels.new_figure()
    about = [
        f"{shown.trend.about}; {shown.trend.sample}",
        "dark ± 1 standard deviation of the lengths, light least to most",
    ]
    ax = panels.panel(figure, "Blanks filled perfectly, by model size", about)
    ax.set_ylabel(_FILLED)
    spread = {row["model"]: row for row in shown.spread.iter_rows(named=True)}
    for series in shown.trend.series:
        color = panels.ACCENT if series.baseline else panels.shades(1)[0]
        x = [point.x for point in series.points]
        mean = np.array([point.extracted.value for point in series.points])
        own = [spread[point.label] for point in series.points]
        deviation, least, most = (
            np.array([row[f"lengths_{name}"] for row in own])
            for name in ("deviation", "least", "most")
        )
        below = np.maximum(mean - deviation, 0)
        for ends, alpha in (((least, most), 0.12), ((below, mean + deviation), 0.28)):
            ax.fill_between(x, *ends, color=color, alpha=alpha, linewidth=0)
        lower, upper = zip(
            *((p.extracted.lower, p.extracted.upper) for p in series.points),
            strict=True,
        )
        ax.vlines(x, lower, upper, color=color, linewidth=1, alpha=0.7)
        marker = "s" if series.baseline else "o"
        style = panels.line_style(color, marker, series.baseline)
        ax.plot(x, mean, **style, label=series.name)
    panels.log_axis(ax, shown.lengths["params"].to_list(), "parameters")
    panels.legend(figure, ax)
    return figure


def _measure_repetitions(runs: SweepRuns, choices: Choices) -> Trend | LeftOut | None:
    if not runs.masking:
        return None
    trend = trends.by_repetitions(runs, choices.seed)
    return trend if trend.series else _NO_WINDOW


def _repetitions_caption(trend: Trend, runs: SweepRuns) -> str:
    lengths = ", ".join(map(str, trend.lengths))
    return (
        f"Fraction of windows whose blanks are all filled perfectly ({_blanks(runs)}) "
        f"against how often they occur in the corpus, all lengths ({lengths}) pooled. "
        "A bucket stands at the geometric mean of its windows' counts. "
        f"{trend.sample}, the same for every model. The largest model stands out, with "
        "a band of 95 % intervals, which take clusters as the unit; the dotted line is "
        "the log-linear fit."
    )


def _draw_repetitions(trend: Trend) -> matplotlib.figure.Figure:
    figure = figures.draw_by_repetitions(trend)
    (ax,) = figure.axes
    ax.set_title("Blanks filled perfectly, by repetitions\n", loc="left", fontsize=11)
    ax.set_ylabel(_FILLED)
    return figure


FIGURE_4A = Figure(
    name="figure_4a",
    title="Figure 4a: model size, filling blanks",
    measure=_measure_sizes,
    caption=_sizes_caption,
    draw=_draw_sizes,
    table=lambda shown: tables.by_parameters(shown.trend).join(
        shown.spread, on="model", maintain_order="left"
    ),
    further_tables={"lengths": lambda shown: shown.lengths},
    fitted=lambda shown: shown.trend.series,
)
FIGURE_4B = Figure(
    name="figure_4b",
    title="Figure 4b: repetitions, filling blanks",
    measure=_measure_repetitions,
    caption=_repetitions_caption,
    draw=_draw_repetitions,
    table=tables.by_repetitions,
    fitted=lambda trend: trend.series,
)
