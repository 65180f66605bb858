"""Suffixes that are nearly right, beside those that are right to the token."""

import dataclasses
from collections.abc import Sequence

import matplotlib.figure
import numpy as np
import polars as pl

from experiments.extraction import one_model, panels
from experiments.extraction.near_misses import BLEU_THRESHOLD
from experiments.extraction.report_figure import Choices, Figure
from experiments.extraction.sweep_runs import Model, SweepRuns

EDITS_PERCENT = 10
"""At most so many edits, in percent of the suffix, count as near: our choice."""

SIMILAR = f"bleu_over_{BLEU_THRESHOLD:g}"
EDITED = f"edits_up_to_{EDITS_PERCENT}_percent"
_RIGHT = "tokens_correct"


@dataclasses.dataclass(frozen=True)
class Nearness:
    """What the figure shows.

    Attributes:
      models: Those trained on the corpus of which it is known, the largest first.
      by_bucket: As `one_model.by_bucket` has it, for each of them: `extracted`, the
        shares of windows with a BLEU above 0.75 and with few edits, and the share of
        the suffixes' tokens that are right.
      sample: How many windows of the largest model, in words.
    """

    models: tuple[Model, ...]
    by_bucket: pl.DataFrame
    sample: str


def measure(runs: SweepRuns, choices: Choices) -> Nearness | None:
    """What is near, for each model that decoded; None if none did."""
    known = one_model.with_columns_known(
        runs, ["bleu", "edit_distance", "tokens_correct"]
    )
    if not known:
        return None
    parts = [one_model.by_bucket(model, rows, _measures(rows)) for model, rows in known]
    return Nearness(
        tuple(model for model, _ in known),
        pl.concat(parts),
        one_model.sample(known[0][1]),
    )


def _measures(rows: pl.DataFrame) -> dict[str, np.ndarray]:
    # Whole numbers, so that a share of exactly 10 % is not lost to rounding.
    near = 100 * rows["edit_distance"] <= EDITS_PERCENT * rows["num_targets"]
    return {
        "extracted": rows["extracted"].to_numpy(),
        SIMILAR: (rows["bleu"] > BLEU_THRESHOLD).to_numpy(),
        EDITED: near.to_numpy(),
        _RIGHT: (rows["tokens_correct"] / rows["num_targets"]).to_numpy(),
    }


def _caption(shown: Nearness, runs: SweepRuns) -> str:
    assert runs.suffix_length is not None
    edits = EDITS_PERCENT * runs.suffix_length // 100
    text = (
        f"For the windows of {shown.models[0].name}, against how often they occur in "
        "the corpus: the fraction of which greedy decoding gives the suffix exactly "
        f"(*extracted*); of which its BLEU with the true suffix is above "
        f"{BLEU_THRESHOLD:g} (Ippolito et al. 2023, arXiv 2210.17546); which takes at "
        f"most {edits} edits of one token, {EDITS_PERCENT} % of the suffix (our "
        "choice); and the mean share of the suffix's tokens that are right, given the "
        f"true ones before them. {shown.sample}, all lengths pooled, prompted with all "
        "but the suffix; bars are 95 % intervals."
    )
    if len(shown.models) == 1:
        return text
    return (
        f"{text} On the right, all models trained on the corpus: lines for BLEU, and "
        "dotted ones for what is extracted."
    )


def _draw(shown: Nearness) -> matplotlib.figure.Figure:
    num_panels = 1 + (len(shown.models) > 1)
    figure = panels.new_figure(num_panels)
    largest = shown.models[0]
    about = [largest.name, f"{shown.sample}; 95 % intervals"]
    ax = panels.panel(figure, "Near misses by repetitions", about, num_panels)
    names = {
        "extracted": "extracted",
        SIMILAR: f"BLEU > {BLEU_THRESHOLD:g}",
        EDITED: f"at most {EDITS_PERCENT} % edited",
        _RIGHT: "tokens that are right",
    }
    table = shown.by_bucket.filter(pl.col("model") == largest.name)
    colors = [*panels.shades(len(names) - 1)[::-1], panels.ACCENT]
    shifts = panels.shifts(len(names))
    for i, (column, name) in enumerate(names.items()):
        panels.draw_line(
            ax, table, "repetitions", column, colors[i], i, name, shifts[i]
        )
    ax.set_ylabel("windows, or tokens")
    panels.log_axis(ax, table["repetitions"].to_list(), "occurrences in the corpus")
    if num_panels > 1:
        _draw_models(figure, shown)
    panels.legend(figure, *figure.axes)
    return figure


def _draw_models(figure: matplotlib.figure.Figure, shown: Nearness) -> None:
    about = [f"lines: BLEU > {BLEU_THRESHOLD:g}", "dotted: extracted"]
    ax = panels.panel(figure, "All models", about, 2, 1)
    ax.set_ylabel("windows")
    colors: Sequence[str] = panels.shades(len(shown.models))[::-1]
    for i, (model, color) in enumerate(zip(shown.models, colors, strict=True)):
        own = shown.by_bucket.filter(pl.col("model") == model.name)
        x_K = own["repetitions"].to_numpy()
        style = panels.line_style(color, panels.marker(i))
        label = f"{model.name}, {panels.short(model.params)}"
        ax.plot(x_K, own[SIMILAR].to_numpy(), **style, label=label)
        ax.plot(x_K, own["extracted"].to_numpy(), ":", color=color, linewidth=1.2)
    x = shown.by_bucket["repetitions"].to_list()
    panels.log_axis(ax, x, "occurrences in the corpus")


FIGURE = Figure(
    name="approximate",
    title="Approximate memorization",
    measure=measure,
    caption=_caption,
    draw=_draw,
    table=lambda shown: shown.by_bucket,
)
