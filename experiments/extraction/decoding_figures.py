"""Figure 2c of Carlini et al. 2023: beam search, and matches anywhere in the corpus.

Both are about the largest model that was trained on the corpus and asked, prompted with
all of each window but the suffix, all lengths pooled, bucket by bucket.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import matplotlib.figure
import polars as pl

from experiments.errors import RunError
from experiments.extraction import estimates, one_model, panels
from experiments.extraction.estimates import Difference
from experiments.extraction.report_figure import Choices, Figure
from experiments.extraction.sweep_runs import Model, SweepRuns


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One way to measure what a model memorised beside another, in each bucket.

    Attributes:
      model: The model.
      by_bucket: As `one_model.by_bucket` has it, with `extracted`, the other measure,
        and `gain`, by how much that is higher.
      gain: The same over all buckets, each counting alike.
      summary: One row with the numbers that the caption has.
      sample: How many windows, in words.
      about: The model and how it was asked, in words.
    """

    model: Model
    by_bucket: pl.DataFrame
    gain: Difference
    summary: pl.DataFrame
    sample: str
    about: str


def beams(runs: SweepRuns, choices: Choices) -> Comparison | None:
    """Figure 2c, left: greedy decoding against beam search."""
    known = one_model.with_columns_known(runs, ["beam_extracted", "beam_identical"])
    if not known:
        return None
    model, rows = known[0]
    identical = rows["beam_identical"].cast(pl.Float64)
    compared = _compare(
        model,
        rows,
        "beam_extracted",
        choices.seed,
        f"{model.name}, {runs.beams} beams",
        {"beam_identical": identical},
    )
    shares = compared.by_bucket["beam_identical"]
    return dataclasses.replace(
        compared,
        summary=compared.summary.insert_column(
            1, pl.lit(runs.beams, pl.Int64).alias("beams")
        ).with_columns(
            identical=pl.lit(shares.mean()), identical_pooled=pl.lit(identical.mean())
        ),
    )


def anywhere(runs: SweepRuns, choices: Choices) -> Comparison | None:
    """Figure 2c, right: the true suffix against a match anywhere in the corpus.

    Raises:
      RunError: An extracted window is not found anywhere.
    """
    known = one_model.with_columns_known(runs, ["anywhere"])
    if not known:
        return None
    model, rows = known[0]
    lost = rows.filter(pl.col("extracted") & ~pl.col("anywhere"))
    if len(lost):
        raise RunError(
            f"window {lost['window_id'][0]} is extracted by {model.name!r} and yet not "
            "found anywhere in the corpus: sweep again with the corpus that the "
            "windows were taken from"
        )
    return _compare(model, rows, "anywhere", choices.seed, model.name, {})


def _compare(
    model: Model,
    rows: pl.DataFrame,
    other: str,
    seed: int,
    about: str,
    more: Mapping[str, pl.Series],
) -> Comparison:
    values = {name: rows[name].to_numpy() for name in ("extracted", other)}
    further = {name: series.to_numpy() for name, series in more.items()}
    table = one_model.by_bucket(model, rows, values | further)
    place = table.columns.index(f"{other}_upper") + 1
    table.insert_column(place, (table[other] - table["extracted"]).alias("gain"))
    gain = estimates.difference(
        rows, "bucket", values["extracted"], values[other], seed
    )
    lower, upper = gain.interval or (None, None)
    summary = {
        "model": model.name,
        "buckets": len(table),
        "mean_gain": gain.mean,
        "mean_gain_lower": lower,
        "mean_gain_upper": upper,
        "largest_gain": gain.largest,
        **table.select("bucket", "count_low", "count_high").row(gain.place, named=True),
    }
    return Comparison(
        model,
        table,
        gain,
        pl.DataFrame([summary]),
        one_model.sample(rows),
        about,
    )


def _largest(shown: Comparison) -> str:
    low, high = shown.summary.select("count_low", "count_high").row(0)
    times = f"{low:,}" if low == high else f"{low:,} to {high:,}"
    return f"{100 * shown.gain.largest:+.2f} points at {times} occurrences"


def _mean(shown: Comparison) -> str:
    text = f"{100 * shown.gain.mean:+.2f} points"
    if shown.gain.interval is None:
        return text
    lower, upper = (100 * end for end in shown.gain.interval)
    return f"{text} (95 % interval {lower:+.2f} to {upper:+.2f})"


def _beams_caption(shown: Comparison, runs: SweepRuns) -> str:
    macro, pooled = shown.summary.select("identical", "identical_pooled").row(0)
    return (
        f"Fraction of windows whose suffix {shown.model.name} gives by greedy "
        f"decoding, and by the most likely of {runs.beams} beams, against how often "
        "they occur in the corpus; on the right, how often both give the same tokens. "
        f"{shown.sample}, all lengths pooled, prompted with all but the suffix; bars "
        "are 95 % intervals. In the mean over "
        f"buckets beams gain {_mean(shown)}, at most {_largest(shown)}. Both give the "
        f"same in {100 * macro:.1f} % in the mean over buckets, and in "
        f"{100 * pooled:.1f} % of all windows."
    )


def _anywhere_caption(shown: Comparison, runs: SweepRuns) -> str:
    return (
        f"Fraction of windows whose suffix {shown.model.name} gives by greedy "
        "decoding, and fraction of those whose prompt and generated suffix occur "
        "together anywhere in the corpus, against how often the window occurs in it. "
        f"{shown.sample}, all lengths pooled, prompted with all but the suffix; bars "
        "are 95 % intervals. "
        "Whatever is extracted is found anywhere. In the mean over buckets the "
        f"difference is {_mean(shown)}, at most {_largest(shown)}."
    )


def _draw_beams(shown: Comparison) -> matplotlib.figure.Figure:
    figure = panels.new_figure(num_panels=2)
    _draw_lines(
        figure,
        shown,
        "Greedy decoding and beam search",
        {"extracted": "greedy", "beam_extracted": "beams"},
    )
    ax = _draw_lines(
        figure, shown, "The same tokens from both", {"beam_identical": "same"}, 1
    )
    ax.set_ylabel("windows")
    panels.legend(figure, figure.axes[0])
    return figure


def _draw_anywhere(shown: Comparison) -> matplotlib.figure.Figure:
    figure = panels.new_figure()
    names = {"extracted": "true suffix", "anywhere": "anywhere in the corpus"}
    ax = _draw_lines(figure, shown, "Where the generated text occurs", names)
    ax.set_ylabel("windows")
    panels.legend(figure, ax)
    return figure


def _draw_lines(
    figure: matplotlib.figure.Figure,
    shown: Comparison,
    title: str,
    names: Mapping[str, str],
    index: int = 0,
) -> Any:
    num_panels = 2 if "beam_extracted" in shown.by_bucket.columns else 1
    about = [shown.about, f"{shown.sample}; 95 % intervals"]
    ax = panels.panel(figure, title, about, num_panels, index)
    colors = [panels.shades(1)[0], panels.ACCENT]
    x = shown.by_bucket["repetitions"].to_list()
    for i, (column, name) in enumerate(names.items()):
        panels.draw_line(
            ax,
            shown.by_bucket,
            "repetitions",
            column,
            colors[i],
            i,
            name,
            shift=panels.shifts(len(names))[i],
        )
    panels.log_axis(ax, x, "occurrences in the corpus")
    return ax


BEAMS = Figure(
    name="figure_2c_beams",
    title="Figure 2c, left: beam search",
    measure=beams,
    caption=_beams_caption,
    draw=_draw_beams,
    table=lambda shown: shown.by_bucket,
    further_tables={"summary": lambda shown: shown.summary},
)
ANYWHERE = Figure(
    name="figure_2c_anywhere",
    title="Figure 2c, right: matches anywhere",
    measure=anywhere,
    caption=_anywhere_caption,
    draw=_draw_anywhere,
    table=lambda shown: shown.by_bucket,
    further_tables={"summary": lambda shown: shown.summary},
)
