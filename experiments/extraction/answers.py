"""What one model answers to one part of the windows, as records."""

import dataclasses
from typing import Any

import numpy as np
import polars

from experiments.errors import RunError
from experiments.extraction import records
from experiments.extraction.sweep_config import SweepConfig
from experiments.extraction.sweep_plan import Part

_OF_THE_WINDOW = ("window_id", "length", "count", "bucket", "whitespace", "entropy")


@dataclasses.dataclass(frozen=True)
class Answer:
    """The records of a part.

    Attributes:
      rows: By context, and then by window.
      near_ties: A line for each suffix that decoding leaves at another token than
        teacher forcing, by no more than `near_tie`.
    """

    rows: polars.DataFrame
    near_ties: list[str] = dataclasses.field(default_factory=list)


def rows(
    part: Part, config: SweepConfig, found: dict[str, np.ndarray]
) -> polars.DataFrame:
    """Records from columns [N, K] or [N, K, 50], K contexts; other columns are null."""
    schema = records.columns(config)
    windows = part.windows
    frames = []
    for k, context in enumerate(part.question.contexts):
        columns: dict[str, Any] = dict.fromkeys(schema)
        columns |= {name: windows[name] for name in _OF_THE_WINDOW}
        columns |= {
            "model": part.model.name,
            "params": part.model.params,
            "context": context,
        }
        columns |= {name: values[:, k] for name, values in found.items()}
        frames.append(polars.DataFrame(columns).cast(polars.Schema(schema)))
    return polars.concat(frames)


def check_finite(finite_NxK: np.ndarray, part: Part) -> None:
    """Raises `RunError` about the first window and context whose logits are not."""
    if finite_NxK.all():
        return
    row, k = np.argwhere(~finite_NxK)[0]
    raise RunError(
        f"model {part.model.name!r} gives logits that are not finite for window "
        f"{part.windows['window_id'][int(row)]} (context {part.question.contexts[k]}): "
        "its weights are damaged or overflow float32, so copy its folder again, or "
        "leave it out"
    )
