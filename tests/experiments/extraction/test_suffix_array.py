import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.errors import RunError
from experiments.extraction import suffix_array
from tests.experiments.extraction.corpora import corpora, small_blocks

BLOCKS = st.sampled_from([1, 2, 3, 7, 1 << 16])


def shared(left, right):
    pairs = zip(left, right, strict=False)
    return next(
        (n for n, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right))
    )


@given(corpora(), BLOCKS)
def test_suffixes_are_sorted_by_tokens_and_know_what_they_share(tokens_N, block):
    with small_blocks(block):
        positions_R, ranks_N = suffix_array.build(tokens_N)
        shared_R = suffix_array.shared_lengths(tokens_N, positions_R, limit=5)
    suffixes = [tokens_N[p:].tolist() for p in range(len(tokens_N))]
    assert [suffixes[p] for p in positions_R] == sorted(suffixes)
    assert positions_R[ranks_N].tolist() == list(range(len(tokens_N)))
    in_order = [[], *(suffixes[p] for p in positions_R)]
    expected = [min(5, shared(*pair)) for pair in itertools.pairwise(in_order)]
    assert shared_R.tolist() == expected


@given(corpora(min_size=2), st.data())
def test_two_rows_that_changed_places_are_found(tokens_N, data):
    positions_R, _ = suffix_array.build(tokens_N)
    rows = st.integers(0, len(tokens_N) - 1)
    a, b = data.draw(rows), data.draw(rows)
    swapped = positions_R.copy()
    swapped[[a, b]] = swapped[[b, a]]
    with small_blocks(data.draw(BLOCKS)):
        ranks_N = suffix_array.invert(swapped)
        if a == b:
            suffix_array.check_order(tokens_N, swapped, ranks_N)
            return
        with pytest.raises(RunError, match=r"rows .* not in order.*pydivsufsort"):
            suffix_array.check_order(tokens_N, swapped, ranks_N)


@pytest.mark.parametrize(
    "rows", [[0, 1, 1], [0, 1, 3], [-1, 0, 1]], ids=["twice", "beyond", "negative"]
)
def test_rows_that_are_no_permutation_are_found(rows):
    with pytest.raises(RunError, match="suffix array is wrong"):
        suffix_array.invert(np.array(rows, np.int32))


def test_a_wrong_array_of_the_library_stops_the_build(monkeypatch):
    tokens_N = np.array([1, 2, 1, 3], np.uint16)
    monkeypatch.setattr(
        suffix_array.pydivsufsort, "divsufsort", lambda _: np.arange(4, dtype=np.int32)
    )
    with pytest.raises(RunError, match="no count could be trusted"):
        suffix_array.build(tokens_N)


def test_reads_a_read_only_map(tmp_path):
    np.save(tmp_path / "tokens.npy", np.array([7, 3, 7, 3, 7], np.uint32))
    tokens_N = np.load(tmp_path / "tokens.npy", mmap_mode="r")
    positions_R, _ = suffix_array.build(tokens_N)
    assert positions_R.tolist() == [3, 1, 4, 2, 0]
    assert suffix_array.shared_lengths(tokens_N, positions_R, 500).tolist() == [
        0, 2, 0, 1, 3,
    ]  # fmt: skip


def test_matches_longer_than_uint16_are_kept_if_asked_for():
    tokens_N = np.full(70_000, 9, np.uint16)
    positions_R, _ = suffix_array.build(tokens_N)
    for limit, dtype in ((500, np.uint16), (2**16, np.uint32)):
        shared_R = suffix_array.shared_lengths(tokens_N, positions_R, limit)
        assert shared_R.dtype == dtype
        assert shared_R.max() == min(limit, 69_999)
