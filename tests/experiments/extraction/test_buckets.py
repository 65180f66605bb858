import itertools

import numpy as np
import pytest

from experiments.errors import UsageError
from experiments.extraction import buckets
from experiments.extraction.buckets import Bucket


def test_every_count_is_in_the_bucket_that_its_fourth_power_says():
    grid = buckets.quarter_powers(5000)
    counts = np.arange(1, 5001)
    for count, place in zip(counts.tolist(), buckets.places(grid, counts), strict=True):
        bucket = grid[place]
        assert 2**bucket.number <= count**4 < 2 ** (bucket.number + 1)
        assert bucket.low <= count < bucket.high


def test_buckets_without_an_integer_are_left_out():
    numbers = [bucket.number for bucket in buckets.quarter_powers(1000)]
    assert [n for n in range(40) if n not in numbers] == [1, 2, 3, 5, 7]
    assert numbers == sorted(set(numbers))
    assert buckets.quarter_powers(1) == [Bucket(0, 1, 2)]


def test_powers_of_two_open_their_buckets_however_large():
    # As a float, the bounds of counts this large are off by thousands.
    grid = buckets.quarter_powers(2**62)
    powers = 2 ** np.arange(63, dtype=np.int64)
    assert [grid[p].number for p in buckets.places(grid, powers)] == list(
        range(0, 249, 4)
    )
    before = [grid[p].number for p in buckets.places(grid, powers[2:] - 1)]
    assert before[0] == 6
    assert before[1:] == list(range(11, 248, 4))
    assert all(a.high == b.low for a, b in itertools.pairwise(grid))


def test_given_edges_are_half_open():
    given = buckets.from_edges([2, 5, 6])
    assert given == [Bucket(0, 2, 5), Bucket(1, 5, 6)]
    counts = np.array([1, 2, 4, 5, 6, 10**12])
    assert buckets.places(given, counts).tolist() == [-1, 0, 0, 1, -1, -1]


def test_edges_beyond_all_counts():
    given = buckets.from_edges([1, 2, 10**30, 10**31])
    counts = np.array([1, 2, 2**62])
    assert buckets.places(given, counts).tolist() == [0, 1, 1]


@pytest.mark.parametrize("edges", [[], [3], [0, 2], [2, 2], [5, 4, 9]])
def test_edges_that_do_not_rise_are_refused(edges):
    with pytest.raises(UsageError, match="two or more rising integers >= 1"):
        buckets.from_edges(edges)
