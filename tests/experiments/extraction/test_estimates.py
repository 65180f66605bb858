import numpy as np
import polars as pl
import pytest

from experiments.extraction import cluster_statistics, estimates

ROWS = pl.DataFrame({"bucket": [4, 0, 4, 0, 0], "cluster": [1, 2, 3, 2, 5]})
VALUES = np.array([1, 0, 0, 1, 1])


def test_means_are_those_of_the_groups_in_ascending_order():
    low, high = estimates.means_by(ROWS, "bucket", VALUES)
    assert (low.value, high.value) == (pytest.approx(2 / 3), 0.5)
    totals = cluster_statistics.cluster_totals(
        VALUES, ROWS["cluster"].to_numpy(), np.array([1, 0, 1, 0, 0]), 2
    )
    intervals = cluster_statistics.intervals(totals)
    assert [low.lower, high.lower] == intervals.lower_K.tolist()
    assert [low.upper, high.upper] == intervals.upper_K.tolist()
    assert estimates.mean(ROWS, VALUES).value == pytest.approx(3 / 5)


def test_a_difference_is_taken_group_by_group():
    found = estimates.difference(
        ROWS, "bucket", VALUES, np.array([1, 1, 1, 1, 1]), seed=0
    )
    assert found.mean == pytest.approx((1 / 3 + 1 / 2) / 2)
    assert (found.largest, found.place) == (0.5, 1)


def test_the_interval_of_a_difference_is_about_windows_that_differ():
    """What both measures share says nothing of their difference."""
    clusters = np.arange(400)
    rows = pl.DataFrame({"bucket": clusters % 2, "cluster": clusters})
    ours = np.random.default_rng(0).integers(2, size=400)
    theirs = np.where(clusters % 20 < 2, 1, ours)
    found = estimates.difference(rows, "bucket", ours, theirs, seed=0)
    lower, upper = found.interval
    assert lower < found.mean < upper
    apart = estimates.mean(rows, ours)
    assert upper - lower < (apart.upper - apart.lower) / 2
    again = estimates.difference(rows, "bucket", ours, theirs, seed=0)
    other = estimates.difference(rows, "bucket", ours, theirs, seed=1)
    assert again == found != other


@pytest.mark.parametrize("num_clusters", [1, 5])
def test_no_interval_where_resampling_says_nothing(num_clusters):
    rows = pl.DataFrame({"bucket": [0] * 5, "cluster": np.arange(5) % num_clusters})
    others = VALUES if num_clusters == 5 else 1 - VALUES
    assert estimates.difference(rows, "bucket", VALUES, others, seed=0).interval is None
