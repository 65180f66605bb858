import dataclasses
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.errors import RunError
from experiments.extraction import repeats
from tests.experiments.extraction.corpora import (
    EOS,
    corpora,
    found_windows,
    occurrences,
    repeat_start,
    small_blocks,
)

BLOCKS = st.sampled_from([1, 2, 3, 7, 1 << 16])


def by_definition(tokens_N, eos_id, length):
    return {
        window: (len(places), min(places), repeat_start(tokens_N, eos_id, places))
        for window, places in occurrences(tokens_N, eos_id, length).items()
    }


def counts(tokens, length, eos_id=EOS):
    index = repeats.build(np.array(tokens, np.uint16), eos_id, length)
    return {window: found[0] for window, found in found_windows(index, length).items()}


@given(corpora(), st.integers(1, 9), BLOCKS, st.booleans())
def test_counts_first_occurrences_and_repeats_are_those_of_the_definition(
    tokens_N, longest, block, separated
):
    eos_id = EOS if separated else None
    with small_blocks(block):
        index = repeats.build(tokens_N, eos_id, longest)
        for length in range(1, longest + 1):
            found = found_windows(index, length)
            assert found == by_definition(tokens_N, eos_id, length)


@given(corpora(), st.integers(1, 6))
def test_windows_of_all_lengths_in_one_repeat_have_its_start(tokens_N, length):
    index = repeats.build(tokens_N, EOS, length + 1)
    shorter = found_windows(index, length)
    for window, (count, _, start) in found_windows(index, length + 1).items():
        for inner in (window[:-1], window[1:]):
            if shorter[inner][0] == count:
                assert shorter[inner][2] == start


def test_overlapping_copies_count():
    assert counts([5, 5, 5, 5], 2) == {(5, 5): 3}
    assert counts([5, 5, 5, 5], 3) == {(5, 5, 5): 2}


def test_the_first_and_the_last_window_of_the_corpus_count():
    assert counts([1, 2, 3, 1, 2], 2) == {(1, 2): 2, (2, 3): 1, (3, 1): 1}


def test_windows_do_not_leave_their_document():
    assert counts([1, 2, EOS, 1, 2, 3, EOS, 2, 3], 3) == {(1, 2, 3): 1}
    assert counts([1, 2, EOS, EOS, 1, 2, EOS], 2) == {(1, 2): 2}
    assert counts([EOS, EOS, EOS], 1) == {}
    assert counts([1, 2], 3) == {}


def test_equal_text_around_separators_is_not_one_repeat():
    # The suffixes share far more than a document: `2 0 1 2 0 1 2`.
    tokens = [1, 2, EOS, 1, 2, EOS, 1, 2, EOS, 7]
    index = repeats.build(np.array(tokens, np.uint16), EOS, 5)
    assert found_windows(index, 2) == {(1, 2): (3, 0, 0)}
    assert found_windows(index, 1) == {
        (1,): (3, 0, 0),
        (2,): (3, 1, 0),
        (7,): (1, 9, 9),
    }


def test_without_a_separator_the_corpus_is_one_document():
    assert counts([EOS, 1, EOS, 1], 2, eos_id=None) == {(EOS, 1): 2, (1, EOS): 1}


def test_bytes_that_match_across_two_tokens_are_no_match():
    # As bytes: 41 41 41 41 | 00 41 41 00 41 41.
    assert counts([0x4141, 0x4141, 0x9999, 0x0041, 0x4100, 0x4141], 1)[(0x4141,)] == 3


def test_ids_above_16_bits_are_not_wrapped():
    tokens_N = np.array([70_000, 70_000 - 65_536, 70_000], np.uint32)
    index = repeats.build(tokens_N, None, 1)
    assert {w: c for w, (c, _, _) in found_windows(index, 1).items()} == {
        (70_000,): 2,
        (4464,): 1,
    }


def test_a_repeat_within_a_longer_one_with_other_counts():
    # `1 2 3` occurs three times, within `8 1 2 3 9` twice.
    tokens = [4, 8, 1, 2, 3, 9, EOS, 5, 8, 1, 2, 3, 9, EOS, 6, 1, 2, 3, 7]
    index = repeats.build(np.array(tokens, np.uint16), EOS, 3)
    found = found_windows(index, 2)
    assert found[(1, 2)] == (3, 2, 2)
    assert found[(2, 3)] == (3, 3, 2)
    assert found[(8, 1)] == (2, 1, 1)
    assert found[(3, 9)] == (2, 4, 1)


def test_long_repeats_are_walked_to_their_start():
    rng = np.random.default_rng(0)
    passage = rng.integers(1, 500, 3000)
    tokens_N = np.concatenate([[600], passage, [EOS, 601], passage]).astype(np.uint16)
    index = repeats.build(tokens_N, EOS, 50)
    windows = repeats.concatenate(list(repeats.distinct_windows(index, 50)))
    positions = repeats.first_positions(index, windows)
    last = np.flatnonzero(positions == positions[windows.counts_K == 2].max())
    alone = repeats.repeat_starts(index, windows[last], positions[last])
    assert alone.tolist() == [1]
    together = repeats.repeat_starts(index, windows, positions)
    assert set(together[windows.counts_K == 2]) == {1}


@given(corpora(), st.integers(0, 6), BLOCKS)
def test_room_ends_with_the_document(tokens_N, limit, block):
    with small_blocks(block):
        room = repeats.room(tokens_N, EOS, limit)
    ends = [*np.flatnonzero(tokens_N == EOS).tolist(), len(tokens_N)]
    expected = [
        min(limit, min(end for end in ends if end >= p) - p)
        for p in range(len(tokens_N))
    ]
    assert room.tolist() == expected
    longest = max(b - a - 1 for a, b in pairwise([-1, *ends]))
    assert repeats.longest_document(tokens_N, EOS) == longest


@pytest.mark.parametrize("change", [-1, 1])
def test_a_wrong_match_length_is_found_by_comparing_tokens(change):
    index = repeats.build(np.array([1, 2, 3, 1, 2, 4, 1, 2], np.uint16), None, 2)
    row = int(np.flatnonzero(index.shared_R == (2 if change < 0 else 0))[-1])
    shared_R = index.shared_R.copy()
    shared_R[row] = 2 + min(change, 0)
    wrong = dataclasses.replace(index, shared_R=shared_R)
    with pytest.raises(RunError, match=r"the count of the window of 2 tokens .* wrong"):
        found_windows(wrong, 2)
