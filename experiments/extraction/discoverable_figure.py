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
_POINTS_PER_TENFOLD = 5


@dataclasses.dataclass(frozen=True)
class Discovery:
    """What the figure shows.

    Attributes:
      model: The largest model trained on the corpus of which it is known.
      scheme: How suffixes are drawn.
      rates: Of each p and n: model, params, p, queries (n), discoverable with its
        interval, windows, clusters.
      greedy: The fraction that greedy decoding extracts.
      sample: How many windows, in words.
      drawn: Of the draws that were made, their number, the share of windows whose
        suffix was among them, and the share to be expected; None if none were made.
    """

    model: Model
    scheme: Scheme
    rates: pl.DataFrame
    greedy: Estimate
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
        estimates.mean(rows, rows["extracted"].to_numpy()),
        one_model.sample(rows),
        _drawn(rows, log_probability_N, runs.samples),
    )


def _rates(
    model: Model, rows: pl.DataFrame, log_probability_N: np.ndarray
) -> pl.DataFrame:
    found: list[dict[str, Any]] = []
    for p in P:
        least_N = discoverable.least_queries(log_probability_N, p)
        for n in queries().tolist():
            share = estimates.mean(rows, least_N <= n)
            found.append(
                {
                    "model": model.name,
                    "params": model.params,
                    "p": p,
                    "queries": n,
                    "discoverable": share.value,
                    "discoverable_lower": share.lower,
                    "discoverable_upper": share.upper,
                    "windows": len(rows),
                    "clusters": rows["cluster"].n_unique(),
                }
            )
    return pl.DataFrame(found)


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
    return samples, float((extracted > 0).mean()), float(expected_N.mean())  # type: ignore[arg-type]


def _caption(shown: Discovery, runs: SweepRuns) -> str:
    at = shown.rates.filter((pl.col("p") == 0.5) & (pl.col("queries") == MOST_QUERIES))
    text = (
        f"Share of windows that are (n, p)-discoverable (Hayes et al. 2025, arXiv "
        f"2410.19482): n draws from {shown.model.name} ({shown.scheme}) give the "
        "suffix at least once with probability p or more, as computed from the "
        f"suffix's probability. {shown.sample}, prompted with all but the suffix, all "
        "lengths and numbers of occurrences pooled; bands are 95 % intervals. The "
        "dashed line "
        f"is what greedy decoding extracts, {100 * shown.greedy.value:.2f} %; with p = "
        f"0.5 it is {100 * at['discoverable'][0]:.2f} % at n = {MOST_QUERIES:,}."
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
        own = shown.rates.filter(pl.col("p") == p)
        x_K, y_K, low_K, high_K = (
            own[name].to_numpy()
            for name in (
                "queries",
                "discoverable",
                "discoverable_lower",
                "discoverable_upper",
            )
        )
        ax.fill_between(x_K, low_K, high_K, color=color, alpha=0.18, linewidth=0)
        style = panels.line_style(color, panels.marker(i)) | {
            "markevery": _POINTS_PER_TENFOLD
        }
        ax.plot(x_K, y_K, **style, label=f"p = {p:g}")
    ax.axhline(
        shown.greedy.value,
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
