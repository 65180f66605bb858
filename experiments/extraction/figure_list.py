"""All figures of a report, in its order. Another one is a module and a line here."""

from typing import Any

import tqdm

from experiments.extraction import (
    approximate_figure,
    decoding_figures,
    discoverable_figure,
    infilling_figures,
    plainness_figures,
    training_set_figure,
    trend_figures,
)
from experiments.extraction.report_figure import (
    Choices,
    Figure,
    Finding,
    Findings,
    LeftOut,
)
from experiments.extraction.sweep_runs import SweepRuns

FIGURES: tuple[Figure[Any], ...] = (
    trend_figures.FIGURE_1A,
    trend_figures.FIGURE_1B,
    trend_figures.FIGURE_1C,
    trend_figures.FIGURE_2A,
    trend_figures.FIGURE_2B,
    decoding_figures.BEAMS,
    decoding_figures.ANYWHERE,
    infilling_figures.FIGURE_4A,
    infilling_figures.FIGURE_4B,
    training_set_figure.FIGURE_4C,
    trend_figures.FIGURE_5,
    approximate_figure.FIGURE,
    discoverable_figure.FIGURE,
    plainness_figures.WHITESPACE_FIGURE,
    plainness_figures.ENTROPY_FIGURE,
)


def measure(runs: SweepRuns, choices: Choices) -> Findings:
    """Measures what each figure shows of the sweeps."""
    found, notes = [], []
    for figure in tqdm.tqdm(FIGURES, desc="Measuring", unit="figure"):
        shown = figure.measure(runs, choices)
        if isinstance(shown, LeftOut):
            notes.append(f"{figure.title}: not drawn, as {shown.reason}.")
        elif shown is not None:
            found.append(Finding(figure, shown, runs))
    return Findings(tuple(found), tuple(notes))
