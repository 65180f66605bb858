"""Suffix arrays over token ids: sorted, inverted, and checked.

Row r of the array is the position where the r-th smallest suffix of the corpus starts.
Suffixes are compared token by token (a byte that matches across the border of two
tokens is no match), and one that is a prefix of another comes first. Windows that are
equal start suffixes that are neighbours, which is what makes counting cheap.
"""

from collections.abc import Iterator

import numpy as np
import pydivsufsort

from experiments.errors import RunError

_BLOCK = 1 << 16


def build(tokens_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sorts the suffixes, and checks that they are sorted.

    While it runs it takes about 24 bytes per uint16 token, twice that for uint32.

    Args:
      tokens_N: uint16[N] or uint32[N], N at least 1.

    Returns:
      positions_R: int32[N] (int64 from 2 GiB of tokens on); row r starts there.
      ranks_N: Its inverse, in the same dtype.

    Raises:
      RunError: The array is wrong, which would be a defect of the sorting library.

    Example:
      >>> positions_R, ranks_N = build(np.array([7, 3, 7, 3], np.uint16))
      >>> positions_R, ranks_N
      (array([3, 1, 2, 0], dtype=int32), array([3, 1, 2, 0], dtype=int32))
    """
    positions_R = pydivsufsort.divsufsort(tokens_N)
    ranks_N = invert(positions_R)
    check_order(tokens_N, positions_R, ranks_N)
    return positions_R, ranks_N


def invert(positions_R: np.ndarray) -> np.ndarray:
    """The row of each position.

    Raises:
      RunError: The rows are no permutation of the positions.
    """
    ranks_N = np.full(len(positions_R), -1, positions_R.dtype)
    for start, stop in blocks(len(positions_R)):
        positions = positions_R[start:stop]
        if positions.min() < 0 or positions.max() >= len(positions_R):
            raise _defect("a row is no position of the corpus")
        ranks_N[positions] = np.arange(start, stop, dtype=ranks_N.dtype)
    # N rows in range that reach all N positions are a permutation.
    if ranks_N.min() < 0:
        raise _defect("a position has no row")
    return ranks_N


def check_order(
    tokens_N: np.ndarray, positions_R: np.ndarray, ranks_N: np.ndarray
) -> None:
    """Raises `RunError` unless the rows are in order, in linear time.

    They are iff for every two neighbours the first tokens rise, or are equal and the
    suffixes one token further on are in order, which their ranks tell (Burkhardt and
    Kärkkäinen 2003, "Fast lightweight suffix array construction and checking").
    """
    last = len(positions_R) - 1
    for start, stop in blocks(last):
        positions = positions_R[start : stop + 1]
        first = tokens_N[positions]
        # The end of the corpus comes before everything.
        following = np.where(
            positions < last, ranks_N[np.minimum(positions + 1, last)], -1
        )
        tied = first[:-1] == first[1:]
        in_order = (first[:-1] < first[1:]) | tied & (following[:-1] < following[1:])
        if not in_order.all():
            row = start + int(np.argmin(in_order))
            raise _defect(f"rows {row} and {row + 1} are not in order")


def shared_lengths(
    tokens_N: np.ndarray, positions_R: np.ndarray, limit: int
) -> np.ndarray:
    """How many tokens each suffix shares with the row before (LCP), up to `limit`.

    Separators are tokens like others here.

    Args:
      tokens_N: The corpus.
      positions_R: Its suffix array.
      limit: Longer matches are recorded as this long.

    Returns:
      uint16[N], or a larger unsigned dtype if `limit` needs it. The first is 0.

    Example:
      >>> tokens_N = np.array([7, 3, 7, 3], np.uint16)
      >>> shared_lengths(tokens_N, build(tokens_N)[0], limit=50)
      array([0, 1, 0, 2], dtype=uint16)
    """
    # The library refuses read-only arrays; its entry r compares rows r and r + 1.
    shared = pydivsufsort.kasai(np.array(tokens_N), positions_R)
    shared_R = np.zeros(len(positions_R), dtype_for_lengths(limit))
    for start, stop in blocks(len(positions_R) - 1):
        shared_R[start + 1 : stop + 1] = np.minimum(shared[start:stop], limit)
    return shared_R


def dtype_for_lengths(limit: int) -> np.dtype:
    """The dtype of lengths up to `limit`: uint16 if they fit, else a larger one."""
    return np.promote_types(np.min_scalar_type(limit), np.uint16)


def blocks(size: int) -> Iterator[tuple[int, int]]:
    """Cuts `range(size)` into (start, stop) that temporary arrays stay small for."""
    for start in range(0, size, _BLOCK):
        yield start, min(start + _BLOCK, size)


def _defect(what: str) -> RunError:
    return RunError(
        f"the suffix array is wrong ({what}), which is a defect of pydivsufsort: no "
        "count could be trusted, install another release of it"
    )
