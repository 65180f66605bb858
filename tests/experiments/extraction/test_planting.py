import collections

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from experiments.errors import UsageError
from experiments.extraction import planting, token_files
from experiments.extraction.documents import Part
from experiments.extraction.planting import Planting

EOS, WINDOW, LENGTH = 0, 3, 5


@pytest.fixture(autouse=True, scope="module")
def small_blocks():
    """Blocks of a few tokens, so that windows lie across their ends."""
    before = planting._BLOCK, token_files._BLOCK
    planting._BLOCK, token_files._BLOCK = 4, 3
    yield
    planting._BLOCK, token_files._BLOCK = before


def ids_lists(largest, max_size):
    ids = st.lists(st.integers(1, largest), min_size=1, max_size=max_size)
    return st.lists(ids.map(lambda i: np.array(i, np.uint16)), min_size=1, max_size=6)


def join(documents):
    return np.concatenate(list(token_files.join(documents, EOS)))


def split(tokens_N):
    return [tuple(ids.tolist()) for ids in token_files.split(tokens_N, EOS)]


def windows(tokens_N, width):
    tokens = tokens_N.tolist()
    return collections.Counter(
        tuple(tokens[i : i + width]) for i in range(len(tokens) - width + 1)
    )


def choose_or_skip(documents, corpus_N, count, seed):
    rng = np.random.default_rng(seed)
    pairs = list(enumerate(documents))
    try:
        return planting.choose(pairs, corpus_N, count, LENGTH, rng, WINDOW)
    except UsageError:
        assume(False)
        raise


@given(
    ids_lists(40, 25),
    ids_lists(40, 12),
    st.integers(1, 3),
    st.lists(st.integers(1, 4), min_size=3, max_size=3),
    st.integers(0, 99),
)
def test_windows_of_a_passage_occur_as_often_as_it_was_planted(
    sources, kept, num_passages, copies, seed
):
    corpus_N = join(kept)
    passages = choose_or_skip(sources, corpus_N, num_passages, seed)
    copies = copies[:num_passages]
    tokens = [passage.tokens_L for passage in passages]
    rng = np.random.default_rng(seed)
    planted_N = np.concatenate(
        list(planting.insert(corpus_N, EOS, tokens, copies, rng))
    )
    for width in (WINDOW, LENGTH):
        counts = windows(planted_N, width)
        for tokens_L, expected in zip(tokens, copies, strict=True):
            for window in windows(tokens_L, width):
                assert counts[window] == expected
    # Nothing else was changed.
    added = collections.Counter(
        {tuple(t.tolist()): c for t, c in zip(tokens, copies, strict=True)}
    )
    assert collections.Counter(split(planted_N)) - added == (
        collections.Counter(split(corpus_N))
    )
    left = [document for document in split(planted_N) if document not in added]
    assert left == split(corpus_N)


@given(ids_lists(40, 25), st.integers(1, 3), st.integers(0, 99))
def test_passages_are_pieces_of_their_documents_and_do_not_overlap(
    sources, num_passages, seed
):
    passages = choose_or_skip(sources, np.array([1]), num_passages, seed)
    taken = set()
    for passage in passages:
        document = sources[passage.document]
        stop = passage.start + LENGTH
        assert passage.tokens_L.tolist() == document[passage.start : stop].tolist()
        assert len(passage.tokens_L) == LENGTH
        places = {(passage.document, i) for i in range(passage.start, stop)}
        assert not places & taken
        taken |= places


def test_a_seed_decides_everything():
    sources = [np.arange(1 + 100 * n, 100 + 100 * n) for n in range(8)]
    corpus_N = join([np.arange(1000 + n, 1009 + n) for n in range(0, 90, 9)])

    def plant(seed):
        rng = np.random.default_rng(seed)
        passages = planting.choose(list(enumerate(sources)), corpus_N, 9, 20, rng)
        tokens = [passage.tokens_L for passage in passages]
        pieces = planting.insert(corpus_N, EOS, tokens, [2] * 9, rng)
        places = [(passage.document, passage.start) for passage in passages]
        return places, np.concatenate(list(pieces)).tolist()

    assert plant(3) == plant(3)
    (places, planted), (other_places, other) = plant(3), plant(4)
    assert places != other_places
    assert planted != other


def test_copies_go_everywhere_with_equal_chance():
    corpus_N = join([np.array([n]) for n in range(1, 4)])
    rng = np.random.default_rng(0)
    pieces = planting.insert(corpus_N, EOS, [np.array([9])], [4000], rng)
    documents = [ids for (ids,) in split(np.concatenate(list(pieces)))]
    runs = "".join("x" if ids == 9 else "." for ids in documents).split(".")
    assert len(runs) == 4
    # Four places, 1,000 copies each; the standard deviation is 27.
    assert all(850 < len(run) < 1150 for run in runs)


@pytest.mark.parametrize(
    ("source", "corpus"),
    [
        # Too short; a window of the corpus, at its start or its end; one twice.
        ([1, 2, 3, 4], [9]),
        ([1, 2, 3, 4, 5], [1, 2, 3, 9]),
        ([1, 2, 3, 4, 5], [9, 9, 9, 9, 3, 4, 5]),
        ([1, 2, 1, 2, 1], [9]),
        ([1, 1, 1, 1, 1], [9]),
    ],
)
def test_passages_that_occur_elsewhere_are_ruled_out(source, corpus):
    rng = np.random.default_rng(0)
    with pytest.raises(
        UsageError, match=r"hold 0 passages of 5 tokens .* expected 1: "
    ):
        planting.choose(
            [(0, np.array(source))], np.array(corpus), 1, LENGTH, rng, WINDOW
        )
    unrelated = np.array([7, 8, 9, 10, 11])
    (passage,) = planting.choose(
        [(0, np.array(source)), (4, unrelated)],
        np.array(corpus),
        1,
        LENGTH,
        rng,
        WINDOW,
    )
    assert (passage.document, passage.start) == (4, 0)


def test_two_passages_with_a_window_in_common_are_not_both_chosen():
    sources = [(0, np.array([1, 2, 3, 4, 5])), (1, np.array([9, 8, 3, 4, 5]))]
    rng = np.random.default_rng(0)
    with pytest.raises(UsageError, match=r"hold 1 passages .* lower --plant_passages"):
        planting.choose(sources, np.array([7]), 2, LENGTH, rng, WINDOW)


@given(
    st.lists(st.integers(0, 2), max_size=30).map(lambda ids: np.array(ids, np.uint32)),
    st.integers(1, 9),
)
def test_hashes_are_equal_where_windows_are(tokens_N, width):
    hashes = planting.window_hashes(tokens_N, width).tolist()
    found = [tuple(tokens_N[i : i + width]) for i in range(len(tokens_N) - width + 1)]
    assert len(hashes) == len(found)
    assert (
        len(set(hashes)) == len(set(found)) == len(set(zip(hashes, found, strict=True)))
    )


def test_hashes_of_rows_are_those_of_each():
    tokens_BxN = np.arange(21).reshape(3, 7) % 5
    hashes_BxW = planting.window_hashes(tokens_BxN, 4)
    assert hashes_BxW.shape == (3, 4)
    for tokens_N, hashes_W in zip(tokens_BxN, hashes_BxW, strict=True):
        assert planting.window_hashes(tokens_N, 4).tolist() == hashes_W.tolist()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"counts": ()}, "give --plant_counts=1,2,4,8"),
        ({"counts": (1, 0)}, "expected numbers of copies, at least 1"),
        ({"counts": (2, 4, 2)}, "names a count twice: raise --plant_passages"),
        ({"counts": (1, 10**30)}, "expected at most 1,000,000 copies"),
        ({"passages_per_count": 0}, "expected at least 1: give --plant_passages"),
        ({"num_tokens": 49}, "expected at least 50, the shortest window"),
        ({"seed": -1}, "seed=-1, expected at least 0"),
    ],
)
def test_plans_that_cannot_be(values, message):
    with pytest.raises(UsageError, match=message):
        Planting(Part(0, 2), **values)


def test_copies_of_each_passage():
    plan = Planting(Part(0, 2), counts=(1, 4), passages_per_count=2)
    assert plan.num_passages == 4
    assert plan.copies.tolist() == [1, 1, 4, 4]
