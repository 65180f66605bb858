"""Whether plain text is what models extract: white space, and the entropy of tokens.

Carlini et al. 2023 (arXiv 2202.07646, section 5.1) found windows that occur 138 to 158
times to be memorised more often than those that occur 159 to 196 times, and traced this
to windows that are mostly white space. So either measure of plainness has a figure:
the fraction against the measure, and the measure's mean beside the fraction in each
bucket of repetitions.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib.figure
import numpy as np
import polars as pl

from experiments.extraction import (
    bucket_fractions,
    estimates,
    panels,
    queries,
    trends,
)
from experiments.extraction.report_figure import Choices, Figure, LeftOut
from experiments.extraction.sweep_runs import Model, SweepRuns

WHITESPACE, ENTROPY = "whitespace", "entropy"
"""The measures, which are columns of records."""

MOSTLY = 0.5
"""A window is mostly white space if its share of it is larger."""

_NUM_BINS = 10
_NAMES = {
    WHITESPACE: "share of white space",
    ENTROPY: "entropy of the tokens, in bits",
}


@dataclasses.dataclass(frozen=True)
class Plainness:
    """What a figure shows.

    Attributes:
      measure: Which measure.
      bins: As `by_quantile` has them.
      buckets: As `by_bucket` has them.
      windows: Number of different windows.
      clusters: Number of clusters in which they lie.
      counted: What the fraction is of, for an axis.
    """

    measure: str
    bins: pl.DataFrame
    buckets: pl.DataFrame
    windows: int
    clusters: int
    counted: str


def upper_ends(values_W: np.ndarray) -> np.ndarray:
    """Tenths of the windows: the largest value in each, [Q] ascending.

    Equal values are not torn apart, so there are fewer bins where a value is common.

    Example:
      >>> upper_ends(np.array([0.0] * 8 + [0.2, 0.4]))
      array([0. , 0.2, 0.4])
    """
    shares = np.arange(1, _NUM_BINS + 1) / _NUM_BINS
    return np.unique(np.quantile(values_W, shares, method="inverted_cdf"))


def by_quantile(
    records: pl.DataFrame, models: Sequence[Model], measure: str
) -> pl.DataFrame:
    """The fraction of windows that are extracted, in bins of a measure.

    Args:
      records: With one row for each window and model, at least one.
      models: Some of the models, each asked about all of these windows.
      measure: A column without nulls.

    Returns:
      model, baseline, params, MEASURE (mean over the bin's windows), MEASURE_low,
      MEASURE_high (least and largest), extracted with its interval, windows, clusters;
      models as given, bins in ascending order.
    """
    values_W = queries.models_with(records, [models[0].name])[measure].to_numpy()
    bin_N = np.searchsorted(upper_ends(values_W), records[measure].to_numpy())
    records = records.with_columns(bin=bin_N)
    rows: list[dict[str, Any]] = []
    for model in models:
        own = queries.models_with(records, [model.name]).sort("bin")
        parts = own.partition_by("bin", maintain_order=True)
        fractions = estimates.means_by(own, "bin", own["extracted"].to_numpy())
        rows += [
            {
                "model": model.name,
                "baseline": model.baseline,
                "params": model.params,
                measure: part[measure].cast(pl.Float64).mean(),
                f"{measure}_low": part[measure].min(),
                f"{measure}_high": part[measure].max(),
                "extracted": fraction.value,
                "extracted_lower": fraction.lower,
                "extracted_upper": fraction.upper,
                "windows": len(part),
                "clusters": part["cluster"].n_unique(),
            }
            for part, fraction in zip(parts, fractions, strict=True)
        ]
    return pl.DataFrame(rows)


def by_bucket(
    records: pl.DataFrame, models: Sequence[Model], measure: str
) -> pl.DataFrame:
    """How plain the windows of each bucket are, beside what is extracted of them.

    Args:
      records: As for `by_quantile`.
      models: Some of the models.
      measure: A column without nulls.

    Returns:
      The columns of `bucket_fractions.table`, and MEASURE (mean over the bucket's
      windows). For white space also mostly_whitespace (share of the windows that are),
      and extracted_of_others (fraction of the other windows; null if there is none).
    """
    mostly = pl.col(measure) > MOSTLY
    further = {
        "mostly_whitespace": mostly.mean(),
        "extracted_of_others": pl.col("extracted").filter(~mostly).mean(),
    }
    plainness = (
        queries.models_with(records, [model.name for model in models])
        .group_by(pl.col("model").cast(pl.String), "bucket")
        .agg(
            pl.col(measure).cast(pl.Float64).mean(),
            **(further if measure == WHITESPACE else {}),
        )
    )
    return bucket_fractions.table(records, models).join(
        plainness, on=["model", "bucket"], maintain_order="left"
    )


def _measure(
    measure: str,
) -> Callable[[SweepRuns, Choices], Plainness | LeftOut | None]:
    def find(runs: SweepRuns, choices: Choices) -> Plainness | LeftOut | None:
        del choices
        records = trends.protocol_records(runs)
        if records.is_empty():
            return LeftOut("no window was put to every model with all of its context")
        if records[measure].has_nulls():
            return LeftOut(_UNKNOWN[measure])
        models = trends.members_and_a_baseline(runs.models)
        return Plainness(
            measure,
            by_quantile(records, models, measure),
            by_bucket(records, models, measure),
            records["window_id"].n_unique(),
            records["cluster"].n_unique(),
            "windows filled perfectly" if runs.masking else "extractable windows",
        )

    return find


_UNKNOWN = {
    WHITESPACE: (
        "it is not known: the evaluation set has no tokenizer, or the sweep is of an "
        "earlier version"
    ),
    ENTROPY: "it is not known: the sweep is of an earlier version",
}


def _caption(shown: Plainness, runs: SweepRuns) -> str:
    del runs
    fraction = (
        "Fraction of windows whose blanks are all filled perfectly"
        if "filled" in shown.counted
        else "Fraction of windows that are extractable"
    )
    what = {
        WHITESPACE: (
            "the share of a window's tokens that are white space and nothing else"
        ),
        ENTROPY: (
            "the entropy of the tokens in a window, in bits per token (0 for one token "
            "again and again)"
        ),
    }
    more = {
        WHITESPACE: (
            " tables/whitespace_buckets.csv has how many of a bucket's windows are "
            "mostly (more than half) white space, and the fraction of the others."
        ),
        ENTROPY: "",
    }
    leading = shown.buckets["model"][0]
    return (
        f"Left: {fraction[0].lower()}{fraction[1:]} against {what[shown.measure]}, "
        f"in tenths of the windows (fewer where many are equal), each at its mean. "
        f"Right: the fraction of `{leading}` in each bucket of repetitions, and "
        "beside it the mean of the same measure. "
        f"{shown.windows:,} windows in {shown.clusters:,} clusters, the same for every "
        "model. Bars and bands are 95 % intervals, which take clusters as the unit. Of "
        f"the baselines, the largest is shown.{more[shown.measure]}"
    )


def _draw(shown: Plainness) -> matplotlib.figure.Figure:
    figure = panels.new_figure(num_panels=2)
    name = _NAMES[shown.measure]
    about = [
        "all lengths and numbers of occurrences pooled",
        f"{shown.windows:,} windows in {shown.clusters:,} clusters; 95 % intervals",
    ]
    ax = panels.panel(figure, f"By {name.split(',')[0]}", about, 2, 0)
    ax.set_ylabel(shown.counted)
    lines = shown.bins.partition_by("model", maintain_order=True)
    shades = iter(panels.shades(sum(not line["baseline"][0] for line in lines))[::-1])
    for i, line in enumerate(lines):
        baseline = line["baseline"][0]
        color = panels.ACCENT if baseline else next(shades)
        x, y = line[shown.measure].to_list(), line["extracted"].to_list()
        ends = line["extracted_lower"].to_list(), line["extracted_upper"].to_list()
        ax.vlines(x, *ends, color=color, linewidth=1, alpha=0.7)
        style = panels.line_style(color, panels.marker(i), baseline)
        ax.plot(x, y, **style, label=line["model"][0])
    ax.set_xlabel(name)
    if shown.measure == WHITESPACE:
        ax.xaxis.set_major_formatter(ax.yaxis.get_major_formatter())
    panels.y_from_0(ax)
    _draw_buckets(figure, shown)
    panels.legend(figure, ax)
    return figure


def _draw_buckets(figure: matplotlib.figure.Figure, shown: Plainness) -> None:
    """The fraction of the first model, and the measure on an axis of its own."""
    leading = shown.buckets.partition_by("model", maintain_order=True)[0]
    name = _NAMES[shown.measure]
    about = [leading["model"][0], f"dotted: {name}"]
    ax = panels.panel(figure, "By repetitions", about, 2, 1)
    ax.set_ylabel(shown.counted)
    x = leading["repetitions"].to_list()
    color = panels.shades(1)[0]
    ends = leading["extracted_lower"].to_list(), leading["extracted_upper"].to_list()
    ax.fill_between(x, *ends, color=color, alpha=0.18, linewidth=0)
    ax.plot(x, leading["extracted"].to_list(), **panels.line_style(color, "o"))
    panels.log_axis(ax, x, "occurrences in the corpus")
    beside = ax.twinx()
    beside.plot(x, leading[shown.measure].to_list(), ":", color="0.25", marker=".")
    beside.set_ylabel(f"mean {name}")
    beside.spines["top"].set_visible(False)
    if shown.measure == WHITESPACE:
        beside.yaxis.set_major_formatter(ax.yaxis.get_major_formatter())
    beside.set_ylim(bottom=0)


def _figure(measure: str, title: str) -> Figure[Plainness]:
    return Figure(
        name=measure,
        title=title,
        measure=_measure(measure),
        caption=_caption,
        draw=_draw,
        table=lambda shown: shown.bins,
        further_tables={"buckets": lambda shown: shown.buckets},
    )


WHITESPACE_FIGURE = _figure(WHITESPACE, "White space")
ENTROPY_FIGURE = _figure(ENTROPY, "Entropy of the tokens")
