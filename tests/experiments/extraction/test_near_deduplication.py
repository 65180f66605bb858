import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.extraction import near_deduplication
from experiments.extraction.near_deduplication import NONE


def text(seed, length=200):
    return np.random.default_rng(seed).integers(1, 5000, length).astype(np.uint16)


def changed(ids, *places):
    """A copy with another token at each of the places: up to 5 grams each."""
    ids = ids.copy()
    ids[list(places)] += 7000
    return ids


def similarity(left, right):
    """The Jaccard index, by definition."""
    sets = [
        {tuple(ids[i : i + 5].tolist()) for i in range(max(1, len(ids) - 4))}
        for ids in (left, right)
    ]
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


def originals(documents, threshold=0.8):
    return near_deduplication.near_duplicates(documents, threshold).tolist()


def test_copies_near_copies_and_others():
    documents = [text(0), text(1), text(0), changed(text(1), 20, 120), text(2)]
    assert similarity(documents[1], documents[3]) == 186 / 206
    assert originals(documents) == [NONE, NONE, 0, 1, NONE]
    assert originals(documents, threshold=1) == [NONE, NONE, 0, NONE, NONE]


def test_the_threshold_is_on_the_exact_index():
    # Of 5 n + 5 tokens, 5 n + 1 grams; one changed token in the middle spoils 5.
    original = text(0, 54)
    near = changed(original, 25)
    assert similarity(original, near) == 45 / 55
    assert originals([original, near], 45 / 55) == [NONE, 0]
    assert originals([original, near], np.nextafter(45 / 55, 1)) == [NONE, NONE]


def test_a_chain_does_not_vanish_into_its_first():
    """Each is like the one before (0.83), and less and less like the first."""
    chain = [text(0)]
    for step in range(8):
        chain.append(changed(chain[-1], *range(20 * step + 5, 20 * step + 20)))
    neighbours = [similarity(*pair) for pair in itertools.pairwise(chain)]
    assert min(neighbours) > 0.8
    found = originals(chain)
    assert found == [NONE, 0, NONE, 2, NONE, 4, NONE, 6, NONE]


def test_the_first_of_several_that_are_similar_is_named():
    assert originals([text(0), text(0), changed(text(0), 9), text(0)]) == [
        NONE, 0, 0, 0,
    ]  # fmt: skip


def test_short_documents_are_one_gram():
    documents = [np.array(ids, np.uint16) for ids in ([3], [3], [3, 4], [3, 4], [4, 3])]
    assert originals(documents) == [NONE, 0, NONE, 2, NONE]


def test_a_gram_counts_once_however_often_it_occurs():
    once = np.tile(text(0, 30), 3)
    again = np.tile(text(0, 30), 5)
    assert similarity(once, again) == 1
    assert originals([once, again]) == [NONE, 0]


def test_bytes_that_match_across_tokens_are_no_match():
    first = np.tile(np.array([0x4142, 0x4344], np.uint16), 20)
    assert originals([first, np.frombuffer(first.tobytes()[1:-1], np.uint16)]) == [
        NONE, NONE,
    ]  # fmt: skip


def test_ids_of_32_bits_and_large_documents(monkeypatch):
    monkeypatch.setattr(near_deduplication, "_GRAMS_AT_ONCE", 7)
    document = text(0).astype(np.uint32) + 2**31
    wrapped = text(0).astype(np.uint32)
    assert originals([document, wrapped, document]) == [NONE, NONE, 0]


def test_no_documents():
    assert originals([]) == []


@settings(max_examples=25)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.lists(st.integers(0, 199), max_size=12)),
        max_size=7,
    ),
    st.sampled_from([0.5, 0.8, 1.0]),
)
def test_each_is_close_to_a_kept_one_or_kept(plan, threshold):
    documents = [changed(text(seed), *places) for seed, places in plan]
    found = originals(documents, threshold)
    for document, original in enumerate(found):
        if original != NONE:
            assert original < document
            assert found[original] == NONE
            assert similarity(documents[document], documents[original]) >= threshold
            continue
        # Pairs much closer than the threshold are not overlooked.
        kept = [d for d in range(document) if found[d] == NONE]
        for other in kept:
            index = similarity(documents[document], documents[other])
            assert index < max(threshold, 0.8)


@pytest.mark.parametrize(("left", "right", "index"), [([1], [2], 0), ([1], [], 0)])
def test_jaccard(left, right, index):
    assert near_deduplication.jaccard(np.array(left), np.array(right)) == index
