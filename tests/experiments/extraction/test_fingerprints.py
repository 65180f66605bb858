import pathlib
import sysconfig

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.errors import RunError
from experiments.extraction import buckets, fingerprints, repeats, window_sampling
from tests.experiments.extraction.corpora import EOS, corpora, occurrences

BLOCKS = st.sampled_from([1, 2, 3, 7, 1 << 16])


@pytest.fixture(scope="module")
def library_sources():
    """A real corpus: sources of the standard library, byte by byte."""
    folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(folder.glob("encodings/*.py")) + sorted(folder.glob("json/*.py"))
    documents = [np.frombuffer(path.read_bytes(), np.uint8) for path in paths]
    return np.concatenate([[256, *document] for document in documents]).astype(
        np.uint16
    )


@given(corpora(), st.integers(1, 9), BLOCKS, st.integers(0, 3))
def test_counts_are_those_of_the_definition(tokens_N, length, block, num_absent):
    expected = occurrences(tokens_N, None, length)
    absent = [(9,) * length, (60_000,) * length, (1,) * (length - 1) + (8,)]
    windows = [*expected, *expected, *absent[:num_absent]]
    windows_KxL = np.array(windows, np.uint32).reshape(-1, length)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fingerprints, "_BLOCK", block)
        patch.setattr(fingerprints, "_ROWS_AT_ONCE", block)
        counts_K, positions_K = fingerprints.count(tokens_N, windows_KxL)
    found = [expected.get(window, []) for window in windows]
    assert counts_K.tolist() == [len(places) for places in found]
    assert positions_K.tolist() == [
        min(places, default=len(tokens_N)) for places in found
    ]


@pytest.mark.parametrize("length", [40, 50, 97])
def test_two_counters_agree_on_every_window_of_a_real_corpus(library_sources, length):
    tokens_N = library_sources
    index = repeats.build(tokens_N, 256, length)
    windows = repeats.concatenate(list(repeats.distinct_windows(index, length)))
    positions = repeats.first_positions(index, windows)
    # All windows at once, by their fingerprints alone.
    within = repeats.room(tokens_N, 256, length)[: len(tokens_N) - length + 1] >= length
    found = fingerprints.fingerprints(tokens_N, length)[within]
    _, first, counts = np.unique(found, return_index=True, return_counts=True)
    order = np.argsort(positions)
    by_position = np.argsort(first)
    assert (
        positions[order].tolist() == np.flatnonzero(within)[first[by_position]].tolist()
    )
    assert windows.counts_K[order].tolist() == counts[by_position].tolist()
    assert counts.max() > 50


def test_two_counters_agree_on_a_sample_of_a_real_corpus(library_sources):
    length = 60
    index = repeats.build(library_sources, 256, length)
    grid = buckets.quarter_powers(len(library_sources))
    windows = window_sampling.by_count(index, length, grid, 50, seed=0).windows
    windows = windows[np.argsort(windows.rows_K)]
    positions = repeats.first_positions(index, windows)
    tokens = library_sources[positions[:, None] + np.arange(length)]
    counts_K, positions_K = fingerprints.count(library_sources, tokens)
    assert counts_K.tolist() == windows.counts_K.tolist()
    assert positions_K.tolist() == positions.tolist()


def test_windows_with_the_fingerprint_of_another_are_not_counted(monkeypatch):
    monkeypatch.setattr(fingerprints, "_mixed", lambda values: values & np.uint64(1))
    tokens_N = np.array([1, 3, 5, 1, 3], np.uint16)
    counts_K, positions_K = fingerprints.count(tokens_N, np.array([[1, 3]], np.uint16))
    assert (counts_K.tolist(), positions_K.tolist()) == ([2], [0])
    with pytest.raises(RunError, match=r"same fingerprint.*--seed"):
        fingerprints.count(tokens_N, np.array([[1, 3], [3, 5]], np.uint16))


def test_nothing_asked_for():
    counts_K, _ = fingerprints.count(np.array([EOS, 1], np.uint16), np.zeros((0, 2)))
    assert counts_K.shape == (0,)
