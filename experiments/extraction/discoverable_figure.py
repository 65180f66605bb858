"""How many draws it takes to see a suffix: (n, p)-discoverable windows against n.

See discoverable.py for what that is, and for its source.
"""

import dataclasses
from typing import Any

import matplotlib.figure
import numpy as np
import polars as pl
from matplotlib import ticker

from experiments.extraction import discoverable, estimates, one_model, panels
from experiments.extraction.estimates import Estimate
from experiments.extraction.report_figure import Choices, Figure
from experiments.extraction.sweep_runs import Model, Scheme, SweepRuns

P = (0.1, 0.5, 0.9)
"""With at least these probabilities the suffix is drawn."""

MOST_QUERIES = 10**6
# Three bands over each other cannot be told apart.
_WITH_BAND = 0.5
_POINTS_PER_TENFOLD = 5


@dataclasses.dataclass(frozen=True)
class Discovery:
    """What the figure shows.

    Attributes:
      model: The largest model trained on the corpus of which it is known.
      scheme: How suffixes are drawn.
      rates: Of each n: model, params, queries (n), for each p `column_of(p)` with its
        interval, extracted (by greedy decoding, whatever n is) likewise, windows,
        clusters.
      sample: How many windows, in words.
      drawn: Of the draws that were made, their number, the share of windows whose
        suffix was among them, and the share to be expected; None if none were made.
    """

    model: Model
    scheme: Scheme
    rates: pl.DataFrame
    sample: str
    drawn: tuple[int, float, float] | None


def queries() -> np.ndarray:
    """The numbers of queries that are shown: whole ones, evenly on a logarithmic axis.

    Example:
      >>> queries()[:7], queries()[-1]
      (array([ 1,  2,  3,  4,  6, 10, 16]), np.int64(1000000))
    """
    tenfolds = round(np.log10(MOST_QUERIES))
    exact = np.logspace(0, tenfolds, _POINTS_PER_TENFOLD * tenfolds + 1)
    return np.unique(np.round(exact).astype(np.int64))


def measure(runs: SweepRuns, choices: Choices) -> Discovery | None:
    """The share of windows that are discoverable; None where nothing is known of it."""
    scheme = runs.scheme or Scheme(1.0, None)
    column = "scheme_logprob" if runs.scheme else "suffix_logprob"
    known = one_model.with_columns_known(runs, [column])
    if runs.masking or not known:
        return None
    model, rows = known[0]
    log_probability_N = rows[column].to_numpy().astype(np.float64)
    return Discovery(
        model,
        scheme,
        _rates(model, rows, log_probability_N),
        one_model.sample(rows),
        _drawn(rows, log_probability_N, runs.samples),
    )


def _rates(
    model: Model, rows: pl.DataFrame, log_probability_N: np.ndarray
) -> pl.DataFrame:
    least = {p: discoverable.least_queries(log_probability_N, p) for p in P}
    found: list[dict[str, Any]] = []
    for n in queries().tolist():
        row = {"model": model.name, "params": model.params, "queries": n}
        for p, least_N in least.items():
            row |= _columns(column_of(p), estimates.mean(rows, least_N <= n))
        found.append(row)
    return pl.DataFrame(found).with_columns(
        **_columns("extracted", estimates.mean(rows, rows["extracted"].to_numpy())),
        windows=pl.lit(len(rows), pl.Int64),
        clusters=pl.lit(rows["cluster"].n_unique(), pl.Int64),
    )


def column_of(p: float) -> str:
    """Where the table has the shares of windows that are (n, p)-discoverable."""
    return f"discoverable_{p:g}"


def _columns(name: str, share: Estimate) -> dict[str, float]:
    return {
        name: share.value,
        f"{name}_lower": share.lower,
        f"{name}_upper": share.upper,
    }


def _drawn(
    rows: pl.DataFrame, log_probability_N: np.ndarray, samples: int
) -> tuple[int, float, float] | None:
    extracted = rows["samples_extracted"]
    if not samples or extracted.has_nulls():
        return None
    probability_N = np.exp(np.minimum(log_probability_N, 0))
    # 1 - (1 - p)^n, without losing small p.
    with np.errstate(divide="ignore"):
        expected_N = -np.expm1(samples * np.log1p(-probability_N))
    seen_N = extracted.to_numpy() > 0
    return samples, float(seen_N.mean()), float(expected_N.mean())


def _caption(shown: Discovery, runs: SweepRuns) -> str:
    last = shown.rates.row(-1, named=True)
    text = (
        f"Share of windows that are (n, p)-discoverable (Hayes et al. 2025, arXiv "
        f"2410.19482): n draws from {shown.model.name} ({shown.scheme}) give the "
        "suffix at least once with probability p or more, as computed from the "
        f"suffix's probability. {shown.sample}, prompted with all but the suffix, all "
        "lengths and numbers of occurrences pooled; the band is the 95 % interval for "
        f"p = {_WITH_BAND:g}, and the table has those of the others. The dashed line "
        f"is what greedy decoding extracts, {100 * last['extracted']:.2f} %; with p = "
        f"0.5 it is {100 * last[column_of(0.5)]:.2f} % at n = {MOST_QUERIES:,}."
    )
    if shown.drawn is None:
        return text
    samples, seen, expected = shown.drawn
    return (
        f"{text} Of {samples:,} draws that were made of each prompt, one or more gave "
        f"the suffix of {100 * seen:.2f} % of the windows; by the probabilities "
        f"{100 * expected:.2f} % were to be expected."
    )


def _draw(shown: Discovery) -> matplotlib.figure.Figure:
    figure = panels.new_figure()
    about = [f"{shown.model.name}, {shown.scheme}", f"{shown.sample}; 95 % intervals"]
    ax = panels.panel(figure, "Discoverable windows by number of draws", about)
    for i, (p, color) in enumerate(zip(P, panels.shades(len(P)), strict=True)):
        y = column_of(p)
        x_K, y_K, low_K, high_K = (
            shown.rates[name].to_numpy()
            for name in ("queries", y, f"{y}_lower", f"{y}_upper")
        )
        if p == _WITH_BAND:
            ax.fill_between(x_K, low_K, high_K, color=color, alpha=0.18, linewidth=0)
        style = panels.line_style(color, panels.marker(i)) | {
            "markevery": _POINTS_PER_TENFOLD
        }
        ax.plot(x_K, y_K, **style, label=f"p = {p:g}")
    ax.axhline(
        shown.rates["extracted"][0],
        color=panels.ACCENT,
        linestyle="--",
        linewidth=1.4,
        label="greedy decoding",
    )
    panels.log_axis(ax, queries().tolist(), "draws, n")
    ax.xaxis.set_major_locator(ticker.LogLocator())
    ax.set_ylabel("discoverable windows")
    panels.legend(figure, ax)
    return figure


FIGURE = Figure(
    name="discoverable",
    title="Windows that draws discover",
    measure=measure,
    caption=_caption,
    draw=_draw,
    table=lambda shown: shown.rates,
)
