"""The picture of one private training run."""

import pathlib
from collections.abc import Sequence
from typing import Any

import matplotlib.figure

from experiments import plots


def accuracy_and_epsilon(rows: Sequence[dict[str, Any]], path: pathlib.Path) -> None:
    """Draws accuracy (left axis) and epsilon (right axis) against steps as a PNG.

    Args:
      rows: Rows of metrics.jsonl, with step, train_accuracy, test_accuracy, epsilon;
        None values are left out of the line.
      path: Where the picture goes; replaced whole.
    """
    figure = matplotlib.figure.Figure(figsize=(6.4, 4.0), layout="constrained")
    left = figure.add_subplot()
    steps = [row["step"] for row in rows]
    marker = "o" if len(rows) == 1 else ""
    for name, color in (("test", "C0"), ("train", "C7")):
        values = _numbers(rows, f"{name}_accuracy")
        label = "test accuracy" if name == "test" else "accuracy on the step's batch"
        left.plot(steps, values, color=color, marker=marker, label=label)
    left.set(xlabel="step", ylabel="accuracy", ylim=(0, 1))
    right = left.twinx()
    epsilons = _numbers(rows, "epsilon")
    right.plot(steps, epsilons, "--", color="C3", marker=marker, label="epsilon")
    right.set(ylabel="epsilon")
    right.set_ylim(bottom=0)
    lines = left.get_lines() + right.get_lines()
    left.legend(lines, [str(line.get_label()) for line in lines], loc="lower right")
    plots.save(figure, path)


def _numbers(rows: Sequence[dict[str, Any]], key: str) -> list[float]:
    return [float("nan") if row[key] is None else row[key] for row in rows]
