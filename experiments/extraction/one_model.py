"""What figures about a single model share: which model, and its windows by bucket."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl

from experiments.extraction import estimates, queries, trends
from experiments.extraction.sweep_runs import Model, SweepRuns


def with_columns_known(
    runs: SweepRuns, columns: Sequence[str]
) -> list[tuple[Model, pl.DataFrame]]:
    """The models trained on the corpus of which `columns` are known, the largest first.

    Returns:
      Each model with its records at full context that have all of the columns, at least
      one, in ascending order of buckets.
    """
    full = queries.at_full_context(runs.records, runs.suffix_length)
    known = full.drop_nulls(list(columns)).sort("bucket", maintain_order=True)
    members = [
        model for model in trends.largest_first(runs.models) if not model.baseline
    ]
    rows = ((model, queries.models_with(known, [model.name])) for model in members)
    return [(model, own) for model, own in rows if len(own)]


def by_bucket(
    model: Model, rows: pl.DataFrame, measures: dict[str, np.ndarray]
) -> pl.DataFrame:
    """The mean of each measure in each bucket of a model's windows.

    Args:
      model: The model.
      rows: Its records, at least one.
      measures: By name, [N] values in [0, 1].

    Returns:
      model, params, bucket, count_low, count_high, repetitions (see `queries.buckets`),
      for each measure NAME, NAME_lower and NAME_upper, windows, clusters.
    """
    sizes = (
        rows.group_by("bucket")
        .agg(windows=pl.len(), clusters=pl.col("cluster").n_unique())
        .sort("bucket")
    )
    means: dict[str, Any] = {}
    for name, values_N in measures.items():
        found = estimates.means_by(rows, "bucket", values_N)
        means |= {
            name: [e.value for e in found],
            f"{name}_lower": [e.lower for e in found],
            f"{name}_upper": [e.upper for e in found],
        }
    return (
        queries.buckets(rows)
        .select(
            pl.lit(model.name).alias("model"),
            pl.lit(model.params, pl.Int64).alias("params"),
            pl.all(),
        )
        .with_columns(pl.Series(name, values) for name, values in means.items())
        .join(sizes, on="bucket", how="left", maintain_order="left")
    )


def sample(rows: pl.DataFrame) -> str:
    """How many windows, in words.

    Example:
      >>> sample(pl.DataFrame({"window_id": [1, 2, 2], "cluster": [5, 5, 5]}))
      '2 windows in 1 clusters'
    """
    windows, clusters = (rows[name].n_unique() for name in ("window_id", "cluster"))
    return f"{windows:,} windows in {clusters:,} clusters"
