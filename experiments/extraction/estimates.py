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


def mean(rows: pl.DataFrame, values_N: np.ndarray) -> Estimate:
    """The mean over all rows, at least one; the arguments are those of `totals_by`."""
    return means_by(rows.with_columns(_all=0), "_all", values_N)[0]


@dataclasses.dataclass(frozen=True)
class Difference:
    """How much higher one measure of the same windows is than another.

    Attributes:
      mean: Mean over the groups of the difference of their means.
      interval: Its 95 % interval; None where resampling says nothing.
      largest: The largest difference of a group's means.
      place: Which group has it, by its place; the first of several.
    """

    mean: float
    interval: tuple[float, float] | None
    largest: float
    place: int


def difference(
    rows: pl.DataFrame,
    column: str,
    values_N: np.ndarray,
    others_N: np.ndarray,
    seed: int,
) -> Difference:
    """By how much the means of `others_N` exceed those of `values_N`, group by group.

    The interval is that of the percentiles of resampled clusters, drawn once for both
    measures. There is none where no window differs, or all are in one cluster.

    Args:
      rows: See `totals_by`.
      column: See `totals_by`.
      values_N: See `totals_by`.
      others_N: Likewise.
      seed: Of the resamples.

    Example:
      >>> rows = pl.DataFrame({"bucket": [0, 0, 4, 4], "cluster": [1, 2, 3, 4]})
      >>> found = difference(
      ...     rows, "bucket", np.array([0, 1, 0, 1]), np.array([0, 1, 1, 1]), seed=0)
      >>> found.mean, found.largest, found.place
      (0.25, 0.5, 1)
    """
    names_G, groups_N = np.unique(rows[column].to_numpy(), return_inverse=True)
    num_groups = len(names_G)
    totals = cluster_statistics.cluster_totals(
        np.concatenate([values_N, others_N]),
        np.tile(rows["cluster"].to_numpy(), 2),
        np.concatenate([groups_N, num_groups + groups_N]),
        2 * num_groups,
    )
    differences_G = totals.means_G[num_groups:] - totals.means_G[:num_groups]
    place = int(np.argmax(differences_G))
    mix_2Gx2 = np.kron(np.eye(2), np.full((num_groups, 1), 1 / num_groups))
    interval = None
    if np.any(np.asarray(values_N) != others_N) and totals.num_clusters > 1:
        first_R, second_R = cluster_statistics.resampled_means(
            totals, mix_2Gx2, seed=seed
        ).T
        interval = cluster_statistics.percentile_interval(second_R - first_R)
    return Difference(
        float(differences_G.mean()), interval, float(differences_G[place]), place
    )


def of(intervals: Intervals) -> list[Estimate]:
    """The same, one by one."""
    ends = (intervals.mean_K, intervals.lower_K, intervals.upper_K)
    return [Estimate(*map(float, values)) for values in zip(*ends, strict=True)]
