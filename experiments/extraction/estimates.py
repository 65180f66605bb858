"""Means over groups of windows, with intervals that take clusters as the unit."""

import dataclasses

import numpy as np
import polars as pl

from experiments.extraction import cluster_statistics
from experiments.extraction.cluster_statistics import ClusterTotals, Intervals


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A mean over windows, in [0, 1], and the ends of its 95 % interval."""

    value: float
    lower: float
    upper: float


def totals_by(rows: pl.DataFrame, column: str, values_N: np.ndarray) -> ClusterTotals:
    """What each cluster adds to each group.

    Args:
      rows: With the column `cluster`, at least one.
      column: Its different values are the groups, in ascending order.
      values_N: Of each row, in [0, 1].
    """
    names_G, groups_N = np.unique(rows[column].to_numpy(), return_inverse=True)
    return cluster_statistics.cluster_totals(
        values_N, rows["cluster"].to_numpy(), groups_N, len(names_G)
    )


def means_by(rows: pl.DataFrame, column: str, values_N: np.ndarray) -> list[Estimate]:
    """The mean of each group; the arguments are those of `totals_by`.

    Example:
      >>> rows = pl.DataFrame({"bucket": [4, 0, 4], "cluster": [1, 2, 3]})
      >>> [e.value for e in means_by(rows, "bucket", np.array([1, 0, 0]))]
      [0.0, 0.5]
    """
    return of(cluster_statistics.intervals(totals_by(rows, column, values_N)))


def of(intervals: Intervals) -> list[Estimate]:
    """The same, one by one."""
    ends = (intervals.mean_K, intervals.lower_K, intervals.upper_K)
    return [Estimate(*map(float, values)) for values in zip(*ends, strict=True)]
