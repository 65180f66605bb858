"""Repeated substrings of a corpus, as ranges of tokens to remove.

A window of L tokens within one document that occurred before, starting anywhere earlier
in the corpus, is a later copy. Removed is every token that some later copy covers (Lee
et al. 2022, arXiv 2107.06499, section 4.1, on token ids and keeping the first copy).

What holds of the rest:

- A stretch of L tokens that was in one piece in the corpus and still is, is the first
  of its kind: no two of them are equal.
- Every removed token is a copy of an earlier one, and in the end of one that is kept.
- A first copy is not always kept whole: another window that begins in it may be a later
  copy. Of `a a a a` with L = 2 one `a` is left.
- Where something was removed, what was before and behind it become neighbours. Windows
  across such a joint are new, and may occur several times.
"""

from collections.abc import Iterator

import numpy as np

from experiments.extraction import repeats, token_files
from experiments.extraction.repeats import Index, Windows


def removed_ranges(tokens_N: np.ndarray, eos_id: int | None, length: int) -> np.ndarray:
    """The ranges of tokens that later copies of windows cover.

    Takes about 24 bytes of memory per uint16 token, twice that for uint32.

    Args:
      tokens_N: uint16[N] or uint32[N], N at least 1.
      eos_id: The separator, which no range holds; None if there is one document.
      length: Tokens of a window, at least 1.

    Returns:
      int64[S, 2], start and end of each range: rising, apart from each other, each
      within one document.

    Raises:
      RunError: The sorting library failed.

    Example:
      >>> tokens_N = np.array([1, 2, 3, 0, 9, 1, 2, 3, 8], np.uint16)
      >>> removed_ranges(tokens_N, 0, length=2)
      array([[5, 8]])
    """
    if length > len(tokens_N):
        return np.zeros((0, 2), np.int64)
    index = repeats.build(tokens_N, eos_id, length)
    is_later_N = np.zeros(len(tokens_N), bool)
    for windows in repeats.distinct_windows(index, length):
        repeated = windows[windows.counts_K > 1]
        repeats.check_counts(index, repeated, length)
        is_later_N[_positions(index, repeated)] = True
        is_later_N[repeats.first_positions(index, repeated)] = False
    later_P = np.flatnonzero(is_later_N)
    # A copy that starts within or right behind the one before goes on with its range.
    starts_anew = np.diff(later_P, prepend=-length - 1) > length
    starts_S = later_P[starts_anew]
    ends_S = later_P[np.append(starts_anew[1:], True)[: len(later_P)]] + length
    return np.stack([starts_S, ends_S], axis=1)


def remainders(
    ranges_Sx2: np.ndarray, tokens_N: np.ndarray, eos_id: int | None
) -> Iterator[np.ndarray]:
    """What is left of each document, in order; of some it is nothing.

    Example:
      >>> tokens_N = np.array([1, 2, 3, 0, 9, 1, 2, 3, 8], np.uint16)
      >>> [kept.tolist() for kept in remainders(np.array([[5, 8]]), tokens_N, 0)]
      [[1, 2, 3], [9, 8]]
    """
    is_kept_N = np.ones(len(tokens_N), bool)
    for start, end in ranges_Sx2:
        is_kept_N[start:end] = False
    start = 0
    for ids in token_files.split(tokens_N, eos_id):
        yield ids[is_kept_N[start : start + len(ids)]]
        start += len(ids) + 1


def num_whole_documents(
    ranges_Sx2: np.ndarray, tokens_N: np.ndarray, eos_id: int | None
) -> int:
    """The number of documents of which nothing is left, though they had tokens.

    Example:
      >>> tokens_N = np.array([1, 2, 0, 1, 2, 0, 3], np.uint16)
      >>> num_whole_documents(removed_ranges(tokens_N, 0, length=2), tokens_N, 0)
      1
    """
    starts_S, ends_S = ranges_Sx2.T
    last = len(tokens_N) - 1
    from_start = (starts_S == 0) | (tokens_N[np.maximum(starts_S - 1, 0)] == eos_id)
    to_end = (ends_S > last) | (tokens_N[np.minimum(ends_S, last)] == eos_id)
    return int((from_start & to_end).sum())


def _positions(index: Index, windows: Windows) -> np.ndarray:
    """Where windows occur: all occurrences of all."""
    before = np.cumsum(windows.counts_K) - windows.counts_K
    offsets = np.repeat(windows.rows_K - before, windows.counts_K)
    return index.positions_R[offsets + np.arange(len(offsets))]
