"""The picture of one language model's training."""

import pathlib
from collections.abc import Sequence
from typing import Any

import matplotlib.figure

from experiments import plots


def loss(rows: Sequence[dict[str, Any]], path: pathlib.Path) -> None:
    """Draws the loss against steps (below) and epochs (above) as a PNG.

    Args:
      rows: Rows of metrics.jsonl, at least one, with step, epoch and loss.
      path: Where the picture goes; replaced whole.
    """
    figure = matplotlib.figure.Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.add_subplot()
    marker = "o" if len(rows) == 1 else ""
    axes.plot([r["step"] for r in rows], [r["loss"] for r in rows], marker=marker)
    axes.set(xlabel="step", ylabel="cross-entropy (nats per token)", xlim=(0, None))
    axes.set_ylim(bottom=0)
    epochs_per_step = rows[-1]["epoch"] / rows[-1]["step"]
    above = axes.secondary_xaxis(
        "top",
        functions=(lambda s: s * epochs_per_step, lambda e: e / epochs_per_step),
    )
    above.set_xlabel("epoch")
    plots.save(figure, path)
