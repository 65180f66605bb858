"""Exact counts of all windows of one length, and the repeats that windows lie in.

A window is `length` tokens in a row within one document: it holds no separator and does
not run past the end of the corpus. Its count is the number of positions where it
starts, overlapping ones included: `aaaa` holds `aa` three times.

The suffix array brings equal windows together. A *run* is a stretch of rows each of
which shares at least `length` tokens with the row before. Its rows start with the same
`length` tokens and no other row does, so its size is the count. That suffixes reach
across separators does no harm: the rows of a run agree on those tokens, so all of them
are windows or none is, and runs are dropped whole. (Whoever drops single rows first has
to join the others by the least match over the rows dropped in between.)
"""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from experiments.errors import RunError
from experiments.extraction import suffix_array
from experiments.extraction.suffix_array import blocks

_MAX_WINDOWS_AT_ONCE = 1 << 14
_MAX_STRIDE = 256


@dataclasses.dataclass(frozen=True)
class Index:
    """A corpus whose windows of up to `max_length` tokens can be counted.

    Takes 12 bytes per token beside the tokens, 20 from 2 GiB of tokens on.

    Attributes:
      tokens_N: uint16[N] or uint32[N], the corpus.
      document_starts_D: int64[D], where documents start, in order.
      positions_R: int32[N] or int64[N], the suffix array: row r starts there.
      ranks_N: Its inverse.
      shared_R: uint16[N], how many tokens a row shares with the row before, up to
        `max_length`.
      room_R: uint16[N], how many tokens there are from the row's position to the end of
        its document, up to `max_length`; 0 at a separator.
      max_length: The length of the longest windows.
    """

    tokens_N: np.ndarray
    document_starts_D: np.ndarray
    positions_R: np.ndarray
    ranks_N: np.ndarray
    shared_R: np.ndarray
    room_R: np.ndarray
    max_length: int


@dataclasses.dataclass(frozen=True)
class Windows:
    """Distinct windows of one length, as runs of rows.

    Attributes:
      rows_K: int64[K], the first row of each run.
      counts_K: int64[K], its size, which is how often the window occurs.
    """

    rows_K: np.ndarray
    counts_K: np.ndarray

    def __len__(self) -> int:
        return len(self.rows_K)

    def __getitem__(self, which: np.ndarray | slice) -> "Windows":
        return Windows(self.rows_K[which], self.counts_K[which])


def concatenate(parts: Sequence[Windows]) -> Windows:
    """The windows of all `parts`, of which there is at least one."""
    return Windows(
        np.concatenate([part.rows_K for part in parts]),
        np.concatenate([part.counts_K for part in parts]),
    )


def build(tokens_N: np.ndarray, eos_id: int | None, max_length: int) -> Index:
    """Sorts the suffixes of a corpus, checks the order, and measures what they share.

    Raises:
      RunError: The sorting library failed.

    Example:
      >>> index = build(np.array([5, 5, 5, 5, 0, 5, 5], np.uint16), 0, max_length=2)
      >>> [windows] = distinct_windows(index, length=2)
      >>> windows.counts_K, first_positions(index, windows)
      (array([4]), array([0]))
    """
    room_N = room(tokens_N, eos_id, max_length)
    positions_R, ranks_N = suffix_array.build(tokens_N)
    room_R = np.empty_like(room_N)
    for start, stop in blocks(len(tokens_N)):
        room_R[start:stop] = room_N[positions_R[start:stop]]
    return Index(
        tokens_N,
        np.append(0, separators(tokens_N, eos_id) + 1),
        positions_R,
        ranks_N,
        suffix_array.shared_lengths(tokens_N, positions_R, max_length),
        room_R,
        max_length,
    )


def separators(tokens_N: np.ndarray, eos_id: int | None) -> np.ndarray:
    """int64[S], the positions of the separator."""
    if eos_id is None:
        return np.zeros(0, np.int64)
    return np.flatnonzero(tokens_N == eos_id)


def longest_document(tokens_N: np.ndarray, eos_id: int | None) -> int:
    """The number of tokens of the longest document.

    Example:
      >>> longest_document(np.array([0, 7, 7, 0, 0, 7]), eos_id=0)
      2
    """
    ends = np.append(separators(tokens_N, eos_id), len(tokens_N))
    return int(np.diff(ends, prepend=-1).max()) - 1


def room(tokens_N: np.ndarray, eos_id: int | None, limit: int) -> np.ndarray:
    """Tokens from each position to the end of its document, up to `limit`.

    Returns:
      uint16[N], or a larger unsigned dtype if `limit` needs it.

    Example:
      >>> room(np.array([7, 7, 7, 0, 7, 7]), eos_id=0, limit=50)
      array([3, 2, 1, 0, 2, 1], dtype=uint16)
    """
    room_N = np.empty(len(tokens_N), suffix_array.dtype_for_lengths(limit))
    end = len(tokens_N)
    for start, stop in reversed(list(blocks(len(tokens_N)))):
        positions = np.arange(start, stop)
        ends = np.full(len(positions), end)
        here = separators(tokens_N[start:stop], eos_id)
        ends[here] = positions[here]
        ends = np.minimum.accumulate(ends[::-1])[::-1]
        room_N[start:stop] = np.minimum(ends - positions, limit)
        end = ends[0]
    return room_N


def distinct_windows(index: Index, length: int) -> Iterator[Windows]:
    """All distinct windows of `length` tokens with their counts, piece by piece.

    Args:
      index: The corpus.
      length: From 1 to `index.max_length`.

    Yields:
      Windows in the order of their rows, each exactly once over all pieces.
    """
    num_rows = len(index.positions_R)
    open_row = 0
    for start, stop in blocks(num_rows):
        starts = start + np.flatnonzero(index.shared_R[start:stop] < length)
        # A run goes on across the border of two blocks: row 0 always starts one, and
        # the last one of a block stays open.
        bounds = np.append(open_row, starts if start else starts[1:])
        if stop == num_rows:
            bounds = np.append(bounds, num_rows)
        open_row = bounds[-1]
        rows, counts = bounds[:-1], np.diff(bounds)
        inside = index.room_R[rows] >= length
        yield Windows(rows[inside], counts[inside])


def first_positions(index: Index, windows: Windows) -> np.ndarray:
    """int64[K], where each window occurs first.

    Args:
      index: The corpus.
      windows: In the order of their rows.
    """
    if not len(windows):
        return np.zeros(0, np.int64)
    # Every second stretch is a run, and the others lie in between; the last run ends
    # the array if nothing follows.
    bounds = np.stack([windows.rows_K, windows.rows_K + windows.counts_K], 1).ravel()
    if bounds[-1] == len(index.positions_R):
        bounds = bounds[:-1]
    least = np.minimum.reduceat(index.positions_R, bounds)
    return least[::2].astype(np.int64)


def check_counts(index: Index, windows: Windows, length: int) -> None:
    """Compares tokens: proves each count, given that the suffixes are in order.

    The first and the last row of a run must agree on `length` tokens, and the rows
    before and after it must not agree with them.

    Raises:
      RunError: A count is wrong, which would be a defect of the LCP array.
    """
    last_row = len(index.positions_R) - 1
    for start in range(0, len(windows), _MAX_WINDOWS_AT_ONCE):
        part = windows[start : start + _MAX_WINDOWS_AT_ONCE]
        first, last = part.rows_K, part.rows_K + part.counts_K - 1
        before, after = np.maximum(first - 1, 0), np.minimum(last + 1, last_row)
        more_before = (before < first) & _agree(index, before, first, length)
        more_after = (last < after) & _agree(index, last, after, length)
        right = _agree(index, first, last, length) & ~more_before & ~more_after
        if not right.all():
            row = int(first[np.argmin(right)])
            raise RunError(
                f"the count of the window of {length} tokens at row {row} is wrong, "
                "which is a defect of pydivsufsort: install another release of it"
            )


def repeat_starts(
    index: Index, windows: Windows, positions_K: np.ndarray
) -> np.ndarray:
    """Where the maximal repeat around each window occurs first.

    The maximal repeat of a window is the longest string that contains it and occurs
    exactly as often, within documents: the window, extended to the left and to the
    right for as long as all its occurrences go on alike. All windows of all lengths
    that have the same maximal repeat have the same start, and so have a repeat and a
    longer, rarer one that begins with it, unless the shorter one came earlier. For a
    window that occurs once this is the start of its document.

    Args:
      index: The corpus.
      windows: Windows of one length.
      positions_K: Their first occurrences.

    Returns:
      int64[K].
    """
    documents = np.searchsorted(index.document_starts_D, positions_K, side="right") - 1
    starts_K = index.document_starts_D[documents]
    repeated = np.flatnonzero(windows.counts_K > 1)
    # Of two windows with the same count, the earlier one's repeat holds the later one
    # iff that can be extended back to it: then both strings start at the same place,
    # and whichever is longer occurs as often as the other. So nobody walks further.
    order = repeated[np.lexsort((positions_K[repeated], windows.counts_K[repeated]))]
    positions, counts = positions_K[order], windows.counts_K[order]
    gaps = np.diff(positions, prepend=-1)
    gaps[np.diff(counts, prepend=0) != 0] = len(index.tokens_N)
    reach = np.minimum(gaps, positions - starts_K[order])
    steps = _extension_to_the_left(index, windows[order], reach)
    joined = steps == gaps
    heads = np.maximum.accumulate(np.where(joined, 0, np.arange(len(order))))
    starts_K[order] = (positions - steps)[heads]
    return starts_K


def _extension_to_the_left(
    index: Index, windows: Windows, reach_K: np.ndarray
) -> np.ndarray:
    """How many tokens to the left, up to `reach_K`, all occurrences have in common."""
    first = index.positions_R[windows.rows_K].astype(np.int64)
    last = index.positions_R[windows.rows_K + windows.counts_K - 1].astype(np.int64)
    low_K = np.zeros(len(windows), np.int64)
    high_K = _shared_to_the_left(index.tokens_N, first, last, reach_K)
    # Occurrences that share what precedes them keep their order among the suffixes that
    # start there. So all of them do iff the first and the last one do and are as far
    # apart as before.
    while (low_K < high_K).any():
        middle = (low_K + high_K + 1) // 2
        spread = index.ranks_N[last - middle] - index.ranks_N[first - middle]
        shared = spread == windows.counts_K - 1
        low_K = np.where(shared, middle, low_K)
        high_K = np.where(shared, high_K, middle - 1)
    return low_K


def _shared_to_the_left(
    tokens_N: np.ndarray, left_K: np.ndarray, right_K: np.ndarray, reach_K: np.ndarray
) -> np.ndarray:
    """How many tokens before the two positions are the same, up to `reach_K`."""
    shared_K = np.zeros(len(reach_K), np.int64)
    for start in range(0, len(reach_K), _MAX_WINDOWS_AT_ONCE):
        active = np.arange(start, min(start + _MAX_WINDOWS_AT_ONCE, len(reach_K)))
        stride = 1
        while active.size:
            steps = shared_K[active, None] + np.arange(1, stride + 1)
            within = steps <= reach_K[active, None]
            steps = np.where(within, steps, 0)
            equal = within & (
                tokens_N[left_K[active, None] - steps]
                == tokens_N[right_K[active, None] - steps]
            )
            agreed = np.where(equal.all(axis=1), stride, np.argmin(equal, axis=1))
            shared_K[active] += agreed
            active = active[agreed == stride]
            stride = min(2 * stride, _MAX_STRIDE)
    return shared_K


def _agree(
    index: Index, rows_K: np.ndarray, other_rows_K: np.ndarray, length: int
) -> np.ndarray:
    """Whether two suffixes start with the same `length` tokens."""
    positions = index.positions_R[rows_K].astype(np.int64)
    others = index.positions_R[other_rows_K].astype(np.int64)
    end = len(index.tokens_N) - length
    long_enough = (positions <= end) & (others <= end)
    offsets = np.arange(length)
    equal = (
        index.tokens_N[np.minimum(positions, end)[:, None] + offsets]
        == index.tokens_N[np.minimum(others, end)[:, None] + offsets]
    )
    return long_enough & equal.all(axis=1)
