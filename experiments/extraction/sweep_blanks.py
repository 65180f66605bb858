"""What encoder-decoders are asked to fill in: windows with some tokens dropped."""

import dataclasses
from collections.abc import Mapping
from typing import cast

import numpy as np
import polars

from experiments.errors import UsageError
from experiments.extraction import span_corruption
from experiments.extraction.span_corruption import Masking
from experiments.extraction.sweep_config import SweepConfig


@dataclasses.dataclass(frozen=True, eq=False)
class BlankedWindows:
    """Windows of one length, of which so many tokens are dropped.

    Attributes:
      length: Of the windows, in tokens.
      masking: How tokens are dropped.
      windows: Their rows, as `sweep_windows.choose` gives them.
    """

    length: int
    masking: Masking
    windows: polars.DataFrame

    @property
    def name(self) -> str:
        """Distinguishes the windows of one sweep by their length."""
        return f"{self.length}"

    @property
    def contexts(self) -> tuple[int, ...]:
        """How many tokens are kept."""
        return (self.length - span_corruption.num_dropped(self.length),)

    @property
    def num_positions(self) -> int:
        """The most tokens that are fed to the encoder and to the decoder together."""
        blanks = span_corruption.most_blanks(self.masking, self.length)
        return self.length + 2 * (blanks + 1)

    def read(self, tokens_NxL: np.ndarray) -> np.ndarray:
        """Of the tokens of some windows those that a model reads or predicts: all."""
        return tokens_NxL


def make(
    config: SweepConfig, by_length: Mapping[int, polars.DataFrame]
) -> tuple[BlankedWindows, ...]:
    """All windows, from `sweep_windows.choose`, by length.

    Raises:
      UsageError: There is none, or one of a single token.
    """
    if not by_length:
        raise UsageError(
            f"config.windows={config.windows!r} holds no window: build another set"
        )
    span_corruption.num_dropped(min(by_length))
    masking = cast(Masking, config.masking)
    return tuple(
        BlankedWindows(length, masking, rows) for length, rows in by_length.items()
    )
