"""How memorization grows: Figures 1, 2a, 2b and 5 of Carlini et al. 2023.

Figures 1 are about windows sampled by how often they occur; Figures 2a and 2b take
their place for windows at random positions of the corpus.
"""

import dataclasses
from collections.abc import Callable, Sequence

from experiments.extraction import figures, tables, trends
from experiments.extraction.dataset_config import UNIFORM
from experiments.extraction.report_figure import Choices, Figure, LeftOut
from experiments.extraction.sweep_runs import SweepRuns
from experiments.extraction.trends import Series, Trend

_NO_WINDOW = LeftOut("no window fits it")


def _measure(
    trend_of: Callable[[SweepRuns, Choices], Trend], uniform: bool | None = None
) -> Callable[[SweepRuns, Choices], Trend | LeftOut | None]:
    def measure(runs: SweepRuns, choices: Choices) -> Trend | LeftOut | None:
        # Models that fill blanks continue no prompt: Figures 4a and 4b are about them.
        if runs.masking:
            return None
        if uniform is not None and uniform != (runs.sample == UNIFORM):
            return None
        trend = trend_of(runs, choices)
        return trend if trend.series else _NO_WINDOW

    return measure


def _caption(text: str) -> Callable[[Trend, SweepRuns], str]:
    def caption(trend: Trend, runs: SweepRuns) -> str:
        return text.format(
            lengths=", ".join(map(str, trend.lengths)),
            sample=trend.sample,
            about=trend.about,
            suffix_length=runs.suffix_length,
        )

    return caption


def _series(trend: Trend) -> Sequence[Series]:
    return trend.series


FIGURE_1A = Figure(
    name="figure_1a",
    title="Figure 1a: model size",
    measure=_measure(
        lambda runs, choices: trends.by_parameters(runs, choices.seed), uniform=False
    ),
    caption=_caption(
        "Fraction of windows that are extractable against the number of parameters: "
        "the mean over lengths ({lengths}) of the fraction at each length. {sample}, "
        "the same for every model. Bars are 95 % intervals, dotted lines log-linear "
        "fits."
    ),
    draw=figures.draw_by_parameters,
    table=tables.by_parameters,
    fitted=_series,
)
FIGURE_1B = Figure(
    name="figure_1b",
    title="Figure 1b: repetitions",
    measure=_measure(
        lambda runs, choices: trends.by_repetitions(runs, choices.seed), uniform=False
    ),
    caption=_caption(
        "Fraction of windows that are extractable against how often they occur in the "
        "corpus, all lengths ({lengths}) pooled. A bucket stands at the geometric mean "
        "of its windows' counts. {sample}, the same for every model. The largest "
        "model and the largest baseline stand out, with bands of 95 % intervals; the "
        "dotted line is the log-linear fit."
    ),
    draw=figures.draw_by_repetitions,
    table=tables.by_repetitions,
    fitted=_series,
)
FIGURE_1C = Figure(
    name="figure_1c",
    title="Figure 1c: context",
    measure=_measure(
        lambda runs, choices: trends.by_context(runs, choices.seed), uniform=False
    ),
    caption=_caption(
        "Fraction of windows that are extractable against the tokens of context, all "
        "numbers of occurrences pooled; windows of length l are prompted by their "
        "first l - {suffix_length} tokens, so each context has windows of its own. "
        "{sample}, the same for every model. Bars are 95 % intervals; lines are "
        "moved sideways a little. Of the baselines, the largest is shown."
    ),
    draw=figures.draw_by_context,
    table=tables.by_context,
    fitted=_series,
)


def _random(trend: Trend) -> Trend:
    return dataclasses.replace(trend, about=f"random windows, {trend.about}")


FIGURE_2A = Figure(
    name="figure_2a",
    title="Figure 2a: model size, random windows",
    measure=_measure(
        lambda runs, choices: _random(trends.by_parameters(runs, choices.seed)),
        uniform=True,
    ),
    caption=_caption(
        "Fraction of windows at random positions of the corpus that are extractable, "
        "against the number of parameters: the mean over lengths ({lengths}) of the "
        "fraction at each length. {sample}, the same for every model. Bars are 95 % "
        "intervals, dotted lines log-linear fits."
    ),
    draw=figures.draw_by_parameters,
    table=tables.by_parameters,
    fitted=_series,
)
FIGURE_2B = Figure(
    name="figure_2b",
    title="Figure 2b: length, random windows",
    measure=_measure(
        lambda runs, choices: _random(trends.by_length(runs, choices.seed)),
        uniform=True,
    ),
    caption=_caption(
        "Fraction of windows at random positions of the corpus that are extractable, "
        "against their length l; the prompt is their first l - {suffix_length} tokens. "
        "{sample}, the same for every model. Bars are 95 % intervals; lines are moved "
        "sideways a little. Of the baselines, the largest is shown."
    ),
    draw=figures.draw_by_length,
    table=tables.by_length,
    fitted=_series,
)


def _figure_5_caption(trend: Trend, runs: SweepRuns) -> str:
    text = (
        "Fraction of windows that are extractable, and share of the suffix's tokens "
        f"that are right, against the tokens of context, for windows of different "
        f"lengths ({trend.about}). {trend.sample}. Bars are 95 % intervals; lines are "
        "moved sideways a little."
    )
    if any(len(series.points) > 1 for series in trend.series):
        return text
    return (
        f"{text} There is one context for each length, so no lines: sweep with "
        "--config.contexts=50,100,150,... for them."
    )


FIGURE_5 = Figure(
    name="figure_5",
    title="Figure 5: prompt length by sequence length",
    measure=_measure(
        lambda runs, choices: trends.by_length_and_context(
            runs, choices.figure_5_bucket
        )
    ),
    caption=_figure_5_caption,
    draw=figures.draw_by_length_and_context,
    table=tables.by_length_and_context,
)
