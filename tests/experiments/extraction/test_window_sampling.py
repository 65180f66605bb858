from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.extraction import buckets, repeats, window_sampling
from tests.experiments.extraction.corpora import (
    EOS,
    corpora,
    occurrences,
    repeat_start,
    small_blocks,
)

BLOCKS = st.sampled_from([1, 2, 3, 7, 1 << 16])
GRID = buckets.quarter_powers(100)


def tokens_of(index, sample, length):
    """The chosen windows by their tokens, in order of the sample."""
    positions = index.positions_R[sample.windows.rows_K]
    return [tuple(index.tokens_N[p : p + length].tolist()) for p in positions]


def by_bucket(windows_of_counts, bucket_list):
    """Windows by the place of their bucket."""
    found = [set() for _ in bucket_list]
    for window, places in windows_of_counts.items():
        for place, bucket in enumerate(bucket_list):
            if bucket.low <= len(places) < bucket.high:
                found[place].add(window)
    return found


@given(corpora(), st.integers(1, 4), st.integers(1, 5), BLOCKS, st.booleans())
def test_a_bucket_gives_as_many_distinct_windows_as_asked_for_or_all(
    tokens_N, length, per_bucket, block, coarse
):
    bucket_list = buckets.from_edges([1, 3, 6]) if coarse else GRID
    index = repeats.build(tokens_N, EOS, length)
    with small_blocks(block):
        sample = window_sampling.by_count(
            index, length, bucket_list, per_bucket, seed=0
        )
    windows = tokens_of(index, sample, length)
    expected = occurrences(tokens_N, EOS, length)
    assert sample.windows.counts_K.tolist() == [len(expected[w]) for w in windows]
    available = by_bucket(expected, bucket_list)
    assert sample.available_B.tolist() == [len(found) for found in available]
    assert sample.places_K.tolist() == sorted(sample.places_K.tolist())
    for place, found in enumerate(available):
        chosen = [
            w for w, p in zip(windows, sample.places_K, strict=True) if p == place
        ]
        assert len(set(chosen)) == len(chosen) == min(per_bucket, len(found))
        assert set(chosen) <= found


@given(corpora(), st.integers(1, 4), st.integers(1, 5), st.integers(0, 99), BLOCKS)
def test_the_choice_is_the_start_of_a_larger_one_whatever_the_buckets(
    tokens_N, length, per_bucket, seed, block
):
    index = repeats.build(tokens_N, EOS, length)
    longer = repeats.build(tokens_N, EOS, 2 * length)
    with small_blocks(block):
        sample = window_sampling.by_count(index, length, GRID, per_bucket, seed)
    again = window_sampling.by_count(longer, length, GRID, 100, seed)
    fewer_buckets = window_sampling.by_count(index, length, GRID[1:3], per_bucket, seed)
    whole = tokens_of(longer, again, length)
    windows = tokens_of(index, sample, length)
    for place in range(len(GRID)):
        mine = [w for w, p in zip(windows, sample.places_K, strict=True) if p == place]
        all_of = [w for w, p in zip(whole, again.places_K, strict=True) if p == place]
        assert mine == all_of[:per_bucket]
        if place in (1, 2):
            places = fewer_buckets.places_K
            few = tokens_of(index, fewer_buckets, length)
            assert mine == [
                w for w, p in zip(few, places, strict=True) if p == place - 1
            ]


@given(corpora(), st.integers(1, 4), st.integers(1, 5), BLOCKS, st.booleans())
def test_one_window_of_each_repeat(tokens_N, length, per_bucket, block, coarse):
    bucket_list = buckets.from_edges([1, 3, 6]) if coarse else GRID
    index = repeats.build(tokens_N, EOS, length)
    with small_blocks(block):
        sample = window_sampling.by_count(
            index, length, bucket_list, per_bucket, seed=0, one_per_repeat=True
        )
    expected = occurrences(tokens_N, EOS, length)
    units = {
        w: repeat_start(tokens_N, EOS, places) if len(places) > 1 else w
        for w, places in expected.items()
    }
    windows = tokens_of(index, sample, length)
    for place, found in enumerate(by_bucket(expected, bucket_list)):
        chosen = [
            units[w]
            for w, p in zip(windows, sample.places_K, strict=True)
            if p == place
        ]
        available = {units[w] for w in found}
        assert len(set(chosen)) == len(chosen) == min(per_bucket, len(available))
        assert set(chosen) <= available


@given(corpora(), st.integers(1, 4), st.integers(1, 70), BLOCKS)
def test_positions_are_drawn_without_replacement(tokens_N, length, num_windows, block):
    index = repeats.build(tokens_N, EOS, length)
    with small_blocks(block):
        sample = window_sampling.by_position(index, length, GRID, num_windows, seed=0)
    again = window_sampling.by_position(index, length, GRID, 100, seed=0)
    start = again.windows[:num_windows]
    assert sample.windows.rows_K.tolist() == start.rows_K.tolist()
    expected = occurrences(tokens_N, EOS, length)
    drawn = Counter(tokens_of(index, sample, length))
    num_positions = sum(map(len, expected.values()))
    assert drawn.total() == min(num_windows, num_positions)
    assert all(times <= len(expected[w]) for w, times in drawn.items())
    for window, count, place in zip(
        tokens_of(index, sample, length),
        sample.windows.counts_K,
        sample.places_K,
        strict=True,
    ):
        assert count == len(expected[window])
        assert GRID[place].low <= count < GRID[place].high
    available = by_bucket(expected, GRID)
    assert sample.available_B.tolist() == [len(found) for found in available]


# Chosen over many seeds, which are fixed: five standard deviations hold for good.
NUM_SEEDS = 3000


def assert_shares(times, expected):
    assert times.keys() <= expected.keys()
    for key, share in expected.items():
        spread = np.sqrt(NUM_SEEDS * share * (1 - share))
        assert abs(times[key] - NUM_SEEDS * share) < 5 * spread + 1e-9, key


@pytest.fixture(scope="module")
def index():
    # One passage of nine tokens twice and one of three tokens twice: as windows of
    # three tokens, seven of a repeat and one of another; and `40 40 40` six times.
    long, short = list(range(1, 10)), [20, 21, 22]
    documents = [long, [30, *long], short, [31, *short], [40] * 8]
    tokens = [token for document in documents for token in (*document, EOS)]
    return repeats.build(np.array(tokens, np.uint16), EOS, 3)


def chosen(index, **kwargs):
    """How often each window with two occurrences is chosen, over many seeds."""
    times = Counter()
    twice = buckets.from_edges([2, 3])
    for seed in range(NUM_SEEDS):
        sample = window_sampling.by_count(index, 3, twice, seed=seed, **kwargs)
        times.update(tokens_of(index, sample, 3))
    return times


def test_all_windows_of_a_bucket_are_equally_likely(index):
    times = chosen(index, per_bucket=3)
    windows = [(n, n + 1, n + 2) for n in (*range(1, 8), 20)]
    assert_shares(times, dict.fromkeys(windows, 3 / 8))


def test_all_repeats_are_equally_likely_and_so_are_the_windows_of_one(index):
    times = chosen(index, per_bucket=1, one_per_repeat=True)
    shares = {(n, n + 1, n + 2): 1 / 14 for n in range(1, 8)}
    assert_shares(times, shares | {(20, 21, 22): 1 / 2})


def test_all_positions_are_equally_likely(index):
    times = Counter()
    for seed in range(NUM_SEEDS):
        sample = window_sampling.by_position(index, 3, GRID, 1, seed)
        times.update(tokens_of(index, sample, 3))
    # 7 + 8 + 1 + 2 + 6 positions where windows start.
    assert_shares(
        times,
        {(n, n + 1, n + 2): 2 / 24 for n in (*range(1, 8), 20)}
        | {(30, 1, 2): 1 / 24, (31, 20, 21): 1 / 24, (40, 40, 40): 6 / 24},
    )


def test_keys_of_other_streams_are_others():
    numbers = np.arange(1000)
    streams = [(0, 50), (1, 50), (0, 100), (0, 50, "repeat")]
    keys = np.concatenate([window_sampling.random_keys(s, numbers) for s in streams])
    assert len(np.unique(keys)) == 4000
