"""Small corpora full of repeats, and windows counted by the definition alone."""

import collections
import contextlib
from unittest import mock

import numpy as np
from hypothesis import strategies as st

from experiments.extraction import repeats, suffix_array

EOS = 0
# Pairs of ids whose bytes match when they are shifted by one, and ids of 17 bits.
PLAIN, SHIFTED, LARGE = (1, 2), (0x4141, 0x4100), (0x41, 70_000)


@st.composite
def corpora(draw, min_size=1, max_size=60):
    """uint16[N] or uint32[N] of few ids, with copies, and separators anywhere."""
    letters = draw(st.sampled_from([PLAIN, SHIFTED, LARGE]))
    small = st.lists(st.sampled_from([EOS, *letters, *letters]), max_size=max_size // 4)
    parts = draw(st.lists(small, max_size=4))
    order = draw(st.lists(st.sampled_from(parts), max_size=8)) if parts else []
    tokens = [token for part in order for token in part][:max_size]
    tokens += [letters[0]] * (min_size - len(tokens))
    return np.array(tokens, np.uint32 if letters is LARGE else np.uint16)


def occurrences(tokens_N, eos_id, length):
    """The positions of every window, by its tokens."""
    found = collections.defaultdict(list)
    for position in range(len(tokens_N) - length + 1):
        window = tuple(tokens_N[position : position + length].tolist())
        if eos_id not in window:
            found[window].append(position)
    return found


def repeat_start(tokens_N, eos_id, positions):
    """Where the maximal repeat of the window at `positions` occurs first."""
    steps = 0
    while min(positions) > steps:
        before = {int(tokens_N[p - steps - 1]) for p in positions}
        if len(before) > 1 or eos_id in before:
            break
        steps += 1
    return min(positions) - steps


def found_windows(index, length):
    """{tokens: (count, first position, start of the repeat)} of all windows."""
    pieces = list(repeats.distinct_windows(index, length))
    windows = repeats.concatenate(pieces)
    positions = repeats.first_positions(index, windows)
    starts = repeats.repeat_starts(index, windows, positions)
    repeats.check_counts(index, windows, length)
    found = {}
    for count, position, start in zip(windows.counts_K, positions, starts, strict=True):
        key = tuple(index.tokens_N[position : position + length].tolist())
        assert key not in found
        found[key] = (int(count), int(position), int(start))
    return found


@contextlib.contextmanager
def small_blocks(size):
    with (
        mock.patch.object(suffix_array, "_BLOCK", size),
        mock.patch.object(repeats, "_MAX_WINDOWS_AT_ONCE", size),
    ):
        yield
