import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.extraction import exact_deduplication
from tests.experiments.extraction.corpora import EOS, corpora, occurrences, small_blocks

BLOCKS = st.sampled_from([1, 2, 7, 1 << 16])


def kept_places(tokens_N, eos_id, length):
    """Brute force: the positions, in order, that no later copy covers."""
    removed = {
        place + step
        for places in occurrences(tokens_N, eos_id, length).values()
        for place in sorted(places)[1:]
        for step in range(length)
    }
    return [p for p in range(len(tokens_N)) if p not in removed]


def remainders(tokens, length, eos_id=EOS):
    tokens_N = np.asarray(tokens)
    if tokens_N.dtype.kind != "u":
        tokens_N = tokens_N.astype(np.uint16)
    ranges = exact_deduplication.removed_ranges(tokens_N, eos_id, length)
    left = exact_deduplication.remainders(ranges, tokens_N, eos_id)
    return [ids.tolist() for ids in left]


@given(corpora(), st.integers(1, 9), BLOCKS, st.booleans())
def test_what_later_copies_cover_is_removed_and_nothing_else(
    tokens_N, length, block, separated
):
    eos_id = EOS if separated else None
    with small_blocks(block):
        ranges = exact_deduplication.removed_ranges(tokens_N, eos_id, length)
    kept = np.ones(len(tokens_N), bool)
    for start, end in ranges:
        assert length <= end - start
        kept[start:end] = False
    expected = kept_places(tokens_N, eos_id, length)
    assert np.flatnonzero(kept).tolist() == expected
    # Rising, with something between two.
    flat = ranges.ravel().tolist()
    assert flat == sorted(set(flat))
    left = exact_deduplication.remainders(ranges, tokens_N, eos_id)
    if separated:
        left = list(itertools.chain(*([*ids, EOS] for ids in left)))[:-1]
    else:
        (left,) = left
    assert list(left) == tokens_N[expected].tolist()


@given(corpora(), st.integers(1, 9))
def test_of_stretches_that_stay_in_one_piece_no_two_are_equal(tokens_N, length):
    kept = set(kept_places(tokens_N, EOS, length))
    ranges = exact_deduplication.removed_ranges(tokens_N, EOS, length)
    assert kept.isdisjoint(p for start, end in ranges for p in range(start, end))
    for places in occurrences(tokens_N, EOS, length).values():
        whole = [p for p in places if kept.issuperset(range(p, p + length))]
        assert whole in ([], [min(places)])


@given(corpora(), st.integers(1, 9))
def test_every_id_is_still_there(tokens_N, length):
    left = itertools.chain(*remainders(tokens_N, length))
    assert {*left, EOS} == {*tokens_N.tolist(), EOS}


@given(corpora(), st.integers(1, 6))
def test_documents_of_which_nothing_is_left_are_counted(tokens_N, length):
    ranges = exact_deduplication.removed_ranges(tokens_N, EOS, length)
    before = remainders(tokens_N, len(tokens_N) + 1)
    after = remainders(tokens_N, length)
    vanished = sum(map(bool, before)) - sum(map(bool, after))
    count = exact_deduplication.num_whole_documents(ranges, tokens_N, EOS)
    assert count == vanished


def test_a_corpus_without_repeats_stays_as_it_is():
    assert remainders([1, 2, EOS, 3, 4, 5], 2) == [[1, 2], [3, 4, 5]]
    assert remainders([1, 2, EOS, 1, 2], 3) == [[1, 2], [1, 2]]


@pytest.mark.parametrize("length", [5, 2**31, 10**30])
def test_windows_longer_than_the_corpus_occur_nowhere(length):
    tokens_N = np.array([1, 1, 1, 1], np.uint16)
    assert exact_deduplication.removed_ranges(tokens_N, 0, length).shape == (0, 2)


def test_copies_do_not_reach_across_documents():
    assert remainders([1, 2, EOS, 3, 1, 2, EOS, 3], 3) == [[1, 2], [3, 1, 2], [3]]


def test_the_second_copy_goes_with_the_whole_document_around_it():
    tokens = [1, 2, 3, EOS, 1, 2, 3, EOS, 4, 1, 2, 3, 5]
    assert remainders(tokens, 3) == [[1, 2, 3], [], [4, 5]]


def test_a_repeat_that_overlaps_itself_keeps_its_beginning_only():
    assert remainders([7] * 6, 2) == [[7]]
    assert remainders([1, 2, 1, 2, 1, 2, 1], 2) == [[1, 2]]


def test_a_first_copy_may_begin_in_a_later_one():
    # `2 3` occurs first in the second document, but its 2 ends a copy of `1 2`.
    assert remainders([1, 2, EOS, 1, 2, 3, EOS, 2, 3], 2) == [[1, 2], [3], []]


def test_joints_may_make_new_repeats():
    # `8 9` was nowhere, and then is in two documents.
    tokens = [1, 2, EOS, 3, 4, EOS, 8, 1, 2, 9, EOS, 8, 3, 4, 9]
    assert remainders(tokens, 2) == [[1, 2], [3, 4], [8, 9], [8, 9]]
