"""Fractions with intervals, and log-linear fits, where windows are clustered.

Windows that lie in one repeated passage are extracted together or not at all, so a
thousand of them can say as little as ten. Whatever is computed here takes the cluster
as the unit: an interval is as wide as the number of clusters and their unlikeness make
it, and a resample draws whole clusters.

Names: N windows, G groups of windows (a model, a bucket, a length), K estimates, which
are means over groups, R resamples, P distinct rows of per-cluster totals.
"""

import dataclasses

import numpy as np
import scipy.sparse
import scipy.special

CONFIDENCE = 0.95
NUM_RESAMPLES = 1000
# Standard normal quantile of the two-sided interval.
_Z = float(scipy.special.ndtri(0.5 + CONFIDENCE / 2))
# Time of one multinomial count over that of drawing one cluster.
_MULTINOMIAL_COST = 10
# Elements of the resampling weights held at once: 32 MB.
_CHUNK = 1 << 22


@dataclasses.dataclass(frozen=True)
class ClusterTotals:
    """What each cluster adds to each group; clusters that add the same are one row.

    Attributes:
      values_PxG: float64, sum of the values of a cluster's windows in each group;
        sparse, as a cluster is in few groups.
      windows_PxG: float64, number of a cluster's windows in each group; sparse.
      clusters_P: int64, number of clusters that have this row.
    """

    values_PxG: scipy.sparse.csr_array
    windows_PxG: scipy.sparse.csr_array
    clusters_P: np.ndarray

    @property
    def num_clusters(self) -> int:
        """Number of clusters over all groups."""
        return int(self.clusters_P.sum())

    @property
    def means_G(self) -> np.ndarray:
        """Mean value of each group's windows, as [G] float64."""
        return self.clusters_P @ self.values_PxG / self.num_windows_G

    @property
    def num_windows_G(self) -> np.ndarray:
        """Number of windows in each group, as [G] float64."""
        return self.clusters_P @ self.windows_PxG

    @property
    def num_clusters_G(self) -> np.ndarray:
        """Number of clusters with a window in each group, as [G] int64."""
        return self.clusters_P @ (self.windows_PxG > 0)


@dataclasses.dataclass(frozen=True)
class Intervals:
    """Means and the ends of their intervals, each [K] float64."""

    mean_K: np.ndarray
    lower_K: np.ndarray
    upper_K: np.ndarray


@dataclasses.dataclass(frozen=True)
class LogLinearFit:
    """Least squares of a fraction on log10(x).

    Attributes:
      num_points: Number of points.
      slope: Rise of the fraction for a tenfold x.
      intercept: Fraction at x = 1.
      r_squared: Share of the fractions' variance that the line explains; 0 where the
        fractions are all equal: nothing rises, so a line explains nothing.
      slope_interval: Percentiles of the slopes of resamples. None where resampling says
        nothing: all fractions equal, fewer than two clusters, or points that rest on so
        few clusters that many resamples miss them.
    """

    num_points: int
    slope: float
    intercept: float
    r_squared: float
    slope_interval: tuple[float, float] | None = None

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """The line's fraction at each x."""
        return self.intercept + self.slope * np.log10(x)


@dataclasses.dataclass(frozen=True)
class NoFit:
    """Why there is no line."""

    reason: str


def cluster_totals(
    values_N: np.ndarray, clusters_N: np.ndarray, groups_N: np.ndarray, num_groups: int
) -> ClusterTotals:
    """Adds up each cluster's windows in each group.

    Args:
      values_N: [N] in [0, 1], such as whether a window was extracted.
      clusters_N: [N] integers, the cluster of each window.
      groups_N: [N] integers in [0, num_groups).
      num_groups: G; every group has a window.

    Raises:
      ValueError: A value outside [0, 1] or a group without a window.

    Example:
      >>> totals = cluster_totals(
      ...     np.array([1, 0, 1]), np.array([7, 7, 9]), np.array([0, 0, 0]), 1)
      >>> totals.num_windows_G, totals.num_clusters_G, totals.means_G.round(3)
      (array([3.]), array([2]), array([0.667]))
    """
    values_N = np.asarray(values_N, np.float64)
    if not np.all((values_N >= 0) & (values_N <= 1)):
        raise ValueError("a value outside [0, 1]")
    if not np.all(np.bincount(groups_N, minlength=num_groups)):
        raise ValueError("a group without a window")
    names_C, clusters_N = np.unique(clusters_N, return_inverse=True)
    cells_E, entry_N = np.unique(
        clusters_N * num_groups + groups_N, return_inverse=True
    )
    values_E, windows_E = np.bincount(entry_N, values_N), np.bincount(entry_N)
    clusters_E, groups_E = np.divmod(cells_E, num_groups)
    rows_C = _row_ids(
        clusters_E,
        _joint_ids(
            groups_E, _joint_ids(np.unique(values_E, return_inverse=True)[1], windows_E)
        ),
        len(names_C),
    )
    _, first_P, row_C, clusters_P = np.unique(
        rows_C, return_index=True, return_inverse=True, return_counts=True
    )
    kept_E = first_P[row_C[clusters_E]] == clusters_E
    where = row_C[clusters_E[kept_E]], groups_E[kept_E]
    shape = len(first_P), num_groups
    values_PxG, windows_PxG = (
        scipy.sparse.csr_array((array_E[kept_E].astype(np.float64), where), shape)
        for array_E in (values_E, windows_E)
    )
    return ClusterTotals(values_PxG, windows_PxG, clusters_P)


def _joint_ids(a_E: np.ndarray, b_E: np.ndarray) -> np.ndarray:
    """One integer for each pair of integers >= 0."""
    return np.unique(a_E * (b_E.max() + 1) + b_E, return_inverse=True)[1]


def _row_ids(
    clusters_E: np.ndarray, entries_E: np.ndarray, num_clusters: int
) -> np.ndarray:
    """An id for each cluster's sequence of entries: equal only for equal sequences.

    Args:
      clusters_E: [E] integers in ascending order; every cluster has an entry.
      entries_E: [E] integers >= 0.
      num_clusters: C.
    """
    starts_C = np.searchsorted(clusters_E, np.arange(num_clusters))
    lengths_C = np.diff(starts_C, append=len(clusters_E))
    ids_C = np.zeros(num_clusters, np.int64)
    next_id = 1
    for i in range(lengths_C.max()):
        longer_L = np.flatnonzero(lengths_C > i)
        ids_L = _joint_ids(ids_C[longer_L], entries_E[starts_C[longer_L] + i])
        # Beyond the ids of the sequences that have ended.
        ids_C[longer_L] = next_id + ids_L
        next_id += ids_L.max() + 1
    return ids_C


def intervals(totals: ClusterTotals, mix_GxK: np.ndarray | None = None) -> Intervals:
    """Means of the groups, or averages of such means, with 95 % Wilson intervals.

    Wilson's interval (1927) of a proportion, with the effective number of windows
    n / deff for n, where the design effect deff is the variance of the mean over what
    it would be were all windows independent (Kish 1965; for intervals of proportions
    Korn & Graubard 1998). The variance is the ratio estimator's, from whole clusters:
    sum over clusters of (values - mean * windows)^2 / n^2.

    That variance is 0 where no window or every window is extracted, and far too small
    where few clusters are. So deff, and it alone, is computed with z^2 / 2 made-up
    clusters added of which every window is extracted and as many of which none is, each
    of the mean cluster size that a window sees; z^2 / 2 of each is what takes a
    proportion to the centre of Wilson's interval (Agresti & Coull 1998). Without
    evidence, then, the windows of a cluster count as one; evidence to the contrary
    soon outweighs it.

    In an average over groups the unlikeness of the groups counts as variance, which
    makes its interval a little wider than it needs to be.

    Where every cluster has one window this is exactly Wilson's interval. A copy of
    every window within its cluster changes nothing. The interval of 0 ends above 0.
    In simulations with 3 to 300 clusters and true fractions of 0.3 to 40 % it held the
    truth in 91 to 100 %, percentiles of the cluster bootstrap in 2 to 98 %.

    Args:
      totals: Per-cluster totals.
      mix_GxK: Weights >= 0 of the groups in each average; each column adds up to 1. By
        default every group on its own (K = G).

    Example:
      >>> alone = cluster_totals(np.zeros(9), np.arange(9), np.zeros(9, int), 1)
      >>> together = cluster_totals(np.zeros(9), np.arange(9) // 3, np.zeros(9, int), 1)
      >>> [round(float(intervals(t).upper_K[0]), 3) for t in (alone, together)]
      [0.299, 0.561]
    """
    mix_GxK = np.eye(len(totals.means_G)) if mix_GxK is None else mix_GxK
    shares_GxK = mix_GxK / totals.num_windows_G[:, None]
    values_PxK = totals.values_PxG @ shares_GxK
    # What a cluster weighs in each average, in which all clusters weigh 1.
    weight_PxK = totals.windows_PxG @ shares_GxK
    mean_K = totals.means_G @ mix_GxK
    size_K = totals.clusters_P @ weight_PxK**2
    added = _Z**2 / 2
    total_K = 1 + 2 * added * size_K
    centre_K = (mean_K + added * size_K) / total_K
    squares_K = totals.clusters_P @ (values_PxK - centre_K * weight_PxK) ** 2
    squares_K += added * size_K**2 * ((1 - centre_K) ** 2 + centre_K**2)
    n_K = centre_K * (1 - centre_K) * total_K / squares_K
    middle_K = (mean_K + _Z**2 / (2 * n_K)) / (1 + _Z**2 / n_K)
    half_K = _Z / (1 + _Z**2 / n_K)
    # A mean of exactly 1 may come out a rounding above it.
    mean_K = np.clip(mean_K, 0, 1)
    half_K *= np.sqrt(mean_K * (1 - mean_K) / n_K + (_Z / (2 * n_K)) ** 2)
    return Intervals(
        mean_K,
        np.clip(middle_K - half_K, 0, mean_K),
        np.clip(middle_K + half_K, mean_K, 1),
    )


def resampled_means(
    totals: ClusterTotals,
    mix_GxK: np.ndarray | None = None,
    num_resamples: int = NUM_RESAMPLES,
    seed: int = 0,
) -> np.ndarray:
    """Draws clusters with replacement and takes the means again, as [R, K] float64.

    One draw serves all groups: where two models were asked about the same windows,
    their means move together, as they do from one corpus to the next. Clusters with
    equal rows are drawn together, as a multinomial count.

    An average over groups that a resample misses is taken over the others; NaN where
    there is none.
    """
    rng = np.random.default_rng(seed)
    mix_GxK = np.eye(len(totals.means_G)) if mix_GxK is None else mix_GxK
    rows = max(1, _CHUNK // len(totals.clusters_P))
    parts = []
    for start in range(0, num_resamples, rows):
        draws_RxP = _draw(rng, totals.clusters_P, min(rows, num_resamples - start))
        windows_RxG = draws_RxP @ totals.windows_PxG
        present_RxG = windows_RxG > 0
        means_RxG = draws_RxP @ totals.values_PxG / np.maximum(windows_RxG, 1)
        with np.errstate(invalid="ignore"):
            parts.append(means_RxG @ mix_GxK / (present_RxG @ mix_GxK))
    return np.concatenate(parts)


def _draw(
    rng: np.random.Generator, clusters_P: np.ndarray, num_resamples: int
) -> np.ndarray:
    """How often clusters of each row are drawn, as [R, P] float64."""
    num_rows, num_clusters = len(clusters_P), clusters_P.sum()
    if _MULTINOMIAL_COST * num_rows < num_clusters:
        shares_P = clusters_P / num_clusters
        counts_RxP = rng.multinomial(num_clusters, shares_P, num_resamples)
        return counts_RxP.astype(np.float64)
    # Many rows of few clusters each: drawing the clusters one by one is faster.
    row_C = np.repeat(np.arange(num_rows), clusters_P)
    draws_RxP = np.empty((num_resamples, num_rows))
    for draws_P in draws_RxP:
        drawn_C = row_C[rng.integers(num_clusters, size=num_clusters)]
        draws_P[:] = np.bincount(drawn_C, minlength=num_rows)
    return draws_RxP


def log_linear_fit(
    x_K: np.ndarray,
    totals: ClusterTotals,
    mix_GxK: np.ndarray | None = None,
    num_resamples: int = NUM_RESAMPLES,
    seed: int = 0,
) -> LogLinearFit | NoFit:
    """Fits the means by a line in log10(x), with a 95 % interval of its slope.

    Ordinary least squares, every point alike, as in Carlini et al. 2023 (arXiv
    2202.07646). The interval is that of the percentiles of the slopes fitted to
    `resampled_means` (Efron & Tibshirani 1993, chapter 13); x stays as it is. It is too
    narrow where only a handful of clusters have anything extracted.

    Args:
      x_K: [K] > 0, where each mean stands.
      totals: Per-cluster totals.
      mix_GxK: As for `intervals`.
      num_resamples: R.
      seed: Of the resamples.
    """
    x_K = np.asarray(x_K, np.float64)
    if len(x_K) < 2:
        return NoFit("fewer than two points")
    if len(np.unique(x_K)) < 2:
        return NoFit("all points at one x")
    means_K = intervals(totals, mix_GxK).mean_K
    line = least_squares(x_K, means_K)
    if np.ptp(means_K) <= _EQUAL or totals.num_clusters < 2:
        return line
    slopes_R = _slopes(
        np.log10(x_K), resampled_means(totals, mix_GxK, num_resamples, seed)
    )
    return dataclasses.replace(line, slope_interval=percentile_interval(slopes_R))


def percentile_interval(resampled_R: np.ndarray) -> tuple[float, float] | None:
    """The 95 % interval of percentiles (Efron & Tibshirani 1993, chapter 13).

    None if more resamples are NaN than the interval leaves out.
    """
    if np.mean(np.isnan(resampled_R)) > 1 - CONFIDENCE:
        return None
    tail = (1 - CONFIDENCE) / 2
    lower, upper = np.nanquantile(resampled_R, [tail, 1 - tail])
    return float(lower), float(upper)


# Means of different counts of windows differ by far more, equal ones by rounding.
_EQUAL = 1e-12


def least_squares(x_K: np.ndarray, y_K: np.ndarray) -> LogLinearFit:
    """The line of least squares of y on log10(x), with R^2 and without an interval.

    Args:
      x_K: [K] > 0, at least two different ones.
      y_K: [K] fractions.

    Example:
      >>> least_squares(np.array([1, 10, 100]), np.array([0.1, 0.3, 0.5])).slope
      0.2
    """
    log_K = np.log10(x_K)
    slope = float(_slopes(log_K, y_K[None])[0])
    intercept = float(y_K.mean() - slope * log_K.mean())
    if np.ptp(y_K) <= _EQUAL:
        return LogLinearFit(len(x_K), 0.0, float(y_K.mean()), 0.0)
    left_K = y_K - (intercept + slope * log_K)
    r_squared = 1 - np.sum(left_K**2) / np.sum((y_K - y_K.mean()) ** 2)
    return LogLinearFit(len(x_K), slope, intercept, max(0.0, float(r_squared)))


def _slopes(log_K: np.ndarray, y_RxK: np.ndarray) -> np.ndarray:
    """Slope of each row over the points that it has; NaN with fewer than two x."""
    has_RxK = ~np.isnan(y_RxK)
    with np.errstate(invalid="ignore", divide="ignore"):
        centre_R = (has_RxK @ log_K) / has_RxK.sum(1)
        from_centre_RxK = np.where(has_RxK, log_K - centre_R[:, None], 0)
        spread_R = np.sum(from_centre_RxK**2, axis=1)
        products_R = np.sum(from_centre_RxK * np.nan_to_num(y_RxK), axis=1)
        return np.where(spread_R > _EQUAL, products_R / spread_R, np.nan)
