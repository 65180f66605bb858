"""The windows that a sweep asks about, by length, with how plain their text is."""

import pathlib

import numpy as np
import polars

from experiments.extraction import evaluation_set, near_misses, window_measures
from experiments.extraction.sweep_config import SweepConfig


def choose(
    windows: polars.DataFrame, config: SweepConfig
) -> dict[int, polars.DataFrame]:
    """At most `windows_per_bucket` windows of each length and bucket.

    Fewer windows are a part of more, with the same seed.

    Args:
      windows: The rows of windows.parquet.
      config: Of the sweep.

    Returns:
      By length, ascending: rows by window_id, with their `window_measures`.

    Raises:
      RunError: The tokenizer of the evaluation set is damaged.
    """
    is_whitespace_V = _whitespace_tokens(pathlib.Path(config.windows).expanduser())
    return {
        int(length): window_measures.add(rows, is_whitespace_V)
        for (length,), rows in _sampled(windows, config).group_by(
            "length", maintain_order=True
        )
    }


def _sampled(windows: polars.DataFrame, config: SweepConfig) -> polars.DataFrame:
    if config.windows_per_bucket is None:
        return windows.sort("length", "window_id")
    draws = np.random.default_rng(config.seed).random(len(windows))
    rank = polars.col("draw").rank("ordinal").over("length", "bucket")
    return (
        windows.with_columns(draw=draws)
        .filter(rank <= config.windows_per_bucket)
        .drop("draw")
        .sort("length", "window_id")
    )


def _whitespace_tokens(folder: pathlib.Path) -> np.ndarray | None:
    """By the tokenizer of an evaluation set, if it has one."""
    path = folder / evaluation_set.TOKENIZER
    return near_misses.whitespace_tokens(path) if path.is_file() else None
