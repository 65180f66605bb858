from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.extraction import lookup, suffix_array
from tests.experiments.extraction.corpora import EOS, corpora, occurrences


def prepared(tokens, eos_id=EOS, table_rows=4, vocabulary_size=None):
    tokens_N = np.asarray(tokens)
    if tokens_N.dtype.kind != "u":
        tokens_N = tokens_N.astype(np.uint16)
    with mock.patch.object(lookup, "_MAX_TABLE_ROWS", table_rows):
        return lookup.prepare(
            tokens_N,
            eos_id,
            vocabulary_size or int(tokens_N.max()) + 1,
            suffix_array.build(tokens_N)[0],
        )


def counts(found, queries):
    """Counts that agree with `occurs`."""
    queries = np.asarray(queries, np.uint32)
    answer = lookup.count(found, queries)
    assert lookup.occurs(found, queries).tolist() == (answer > 0).tolist()
    return answer.tolist()


@given(
    corpora(),
    st.integers(1, 9),
    st.booleans(),
    st.sampled_from([1, 3, 10, 1 << 20]),
    st.sampled_from([1, 2, 1 << 12]),
    st.data(),
)
def test_counts_are_those_of_the_definition(
    tokens_N, length, separated, table_rows, at_once, data
):
    eos_id = EOS if separated else None
    expected = {w: len(p) for w, p in occurrences(tokens_N, eos_id, length).items()}
    others = st.lists(
        st.sampled_from([*sorted({*tokens_N.tolist(), EOS}), 3, 2**32 - 1]),
        min_size=length,
        max_size=length,
    ).map(tuple)
    queries = [*expected, *data.draw(st.lists(others, max_size=20))]
    with mock.patch.object(lookup, "_QUERIES_AT_ONCE", at_once):
        found = prepared(tokens_N, eos_id, table_rows)
        if queries:
            answer = counts(found, queries)
            assert answer == [expected.get(query, 0) for query in queries]


def test_long_windows_of_a_corpus_with_long_repeats():
    rng = np.random.default_rng(0)
    passage = rng.integers(1, 200, 150)
    copies = [[*passage, EOS, *rng.integers(1, 200, n), EOS] for n in (7, 80, 300)]
    tokens_N = np.concatenate(copies).astype(np.uint16)
    expected = occurrences(tokens_N, EOS, 100)
    queries = np.array([*expected], np.uint32)
    near_misses = queries.copy()
    near_misses[:, 99] ^= 1
    assert 3 in counts(prepared(tokens_N), queries)
    assert counts(prepared(tokens_N), np.concatenate([queries, near_misses])) == [
        len(expected.get(tuple(query), []))
        for query in [*queries.tolist(), *near_misses.tolist()]
    ]


def test_before_all_suffixes_and_after_all_suffixes():
    found = prepared([4, 6, 5, 6], vocabulary_size=10)
    assert counts(found, [[1, 9, 9], [4, 6, 4], [6, 9, 9], [9, 9, 9]]) == [0, 0, 0, 0]


def test_the_last_window_of_the_corpus():
    found = prepared([1, 2, 3, 1, 2])
    assert counts(found, [[3, 1, 2]]) == [1]
    assert counts(found, [[2]]) == [2]
    # The suffix at the end is shorter than what it is compared with.
    assert counts(found, [[1, 2, 1], [1, 2, 3]]) == [0, 1]


def test_longer_than_the_corpus():
    assert counts(prepared([1, 2]), [[1, 2, 1], [1, 2, 2]]) == [0, 0]


def test_ids_that_the_corpus_lacks():
    found = prepared([1, 2, 1], vocabulary_size=4)
    assert counts(found, [[3, 1], [1, 3], [4, 1], [1, 2**32 - 1]]) == [0, 0, 0, 0]
    # 65,537 is 1 in 16 bits.
    assert counts(found, [[65_537, 2], [1, 2]]) == [0, 1]


def test_ids_of_32_bits():
    tokens_N = np.array([2**32 - 1, 5, 2**32 - 1, 2**31], np.uint32)
    found = prepared(tokens_N, eos_id=None)
    assert counts(found, [[2**32 - 1], [5], [2**31]]) == [2, 1, 1]
    assert counts(found, [[2**32 - 1, 5], [5, 2**31]]) == [1, 0]


def test_a_query_with_the_separator_occurs_nowhere():
    tokens = [1, EOS, 2, EOS]
    assert counts(prepared(tokens), [[1, EOS], [EOS, 2]]) == [0, 0]
    assert counts(prepared(tokens, eos_id=None), [[1, EOS], [EOS, 2]]) == [1, 1]
    assert counts(prepared(tokens), [[1, 2]]) == [0]


def test_overlapping_occurrences_count():
    assert counts(prepared([5, 5, 5, 5]), [[5, 5], [5, 6]]) == [3, 0]


def test_bytes_that_match_across_tokens_are_no_match():
    found = prepared([0x4141, 0x0041, 0x4100, 0x0041])
    assert counts(found, [[0x4141], [0x4100]]) == [1, 1]
    assert counts(found, [[0x4141, 0x4141], [0x4141, 0x0041]]) == [0, 1]


def test_no_queries():
    found = prepared([1, 2])
    assert lookup.count(found, np.zeros((0, 5), np.uint32)).tolist() == []


@pytest.mark.parametrize(
    "queries", [np.zeros((2, 0), np.uint32), np.zeros(2, np.uint32), np.zeros((2, 2))]
)
def test_what_is_no_query(queries):
    with pytest.raises(ValueError, match="queries of"):
        lookup.occurs(prepared([1, 2]), queries)
