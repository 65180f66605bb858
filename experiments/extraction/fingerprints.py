"""A second way to count windows, without a suffix array.

Every position of the corpus gets a 64-bit fingerprint of the window that starts there,
and positions with the fingerprint of a window asked for are compared with that window,
token by token. Equal windows have equal fingerprints, so none is missed, and the
comparison is exact, so none is counted in error. Nothing here is shared with
`suffix_array` or `repeats`: each can testify for the other.
"""

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from experiments.errors import RunError

_BLOCK = 1 << 16
_ROWS_AT_ONCE = 1 << 12
_TABLE_BITS = 22


def fingerprints(tokens: np.ndarray, length: int) -> np.ndarray:
    """Fingerprints of all windows of `length` tokens along the last axis.

    Those of windows of 1, 2, 4, ... tokens are joined from those of their halves; a
    window of any other length is joined from such windows side by side.

    Args:
      tokens: uint[..., N].
      length: From 1 to N.

    Returns:
      uint64[..., N - length + 1].

    Example:
      >>> one, two, three = fingerprints(np.array([4, 7, 4, 7], np.uint16), 2)
      >>> bool(one == three), bool(one == two)
      (True, False)
    """
    num_windows = tokens.shape[-1] - length + 1
    whole = _mixed(tokens.astype(np.uint64))
    joined, covered, width = np.zeros((), np.uint64), 0, 1
    while covered < length:
        if length & width:
            joined = _joined(joined, whole[..., covered : covered + num_windows])
            covered += width
        whole = _joined(whole[..., :-width], whole[..., width:])
        width *= 2
    return joined


def count(
    tokens_N: np.ndarray, windows_KxL: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """How often windows occur in the corpus, overlaps included, and where first.

    Args:
      tokens_N: uint16[N] or uint32[N], the corpus. A separator is a token like others:
        windows without one only ever occur within documents.
      windows_KxL: uint[K, L], distinct or not.

    Returns:
      counts_K: int64[K].
      positions_K: int64[K]; N for a window that does not occur.

    Raises:
      RunError: Two different windows have the same fingerprint, which no more than one
        run in a million meets.

    Example:
      >>> tokens_N = np.array([5, 5, 5, 5, 0, 5, 5], np.uint16)
      >>> count(tokens_N, np.array([[5, 5], [5, 7]], np.uint16))
      (array([4, 0]), array([0, 7]))
    """
    num_tokens, length = len(tokens_N), windows_KxL.shape[1]
    wanted_U, chosen_U, which_K = _distinct(windows_KxL)
    counts_U = np.zeros(len(wanted_U), np.int64)
    positions_U = np.full(len(wanted_U), num_tokens)
    # A small table rules out nearly all positions before the search.
    shift = np.uint64(64 - _TABLE_BITS)
    table = np.zeros(1 << _TABLE_BITS, bool)
    table[wanted_U >> shift] = True
    for start in range(0, num_tokens - length + 1, _BLOCK):
        block = np.asarray(tokens_N[start : start + _BLOCK + length - 1])
        found = fingerprints(block, length)
        places = np.flatnonzero(table[found >> shift])
        found = found[places]
        which = np.minimum(np.searchsorted(wanted_U, found), len(wanted_U) - 1)
        alike = wanted_U[which] == found
        places, which = places[alike], which[alike]
        here = sliding_window_view(block, length)
        equal = _equal_rows(here, places, windows_KxL, chosen_U[which])
        places, which = places[equal], which[equal]
        counts_U += np.bincount(which, minlength=len(wanted_U))
        np.minimum.at(positions_U, which, start + places)
    return counts_U[which_K], positions_U[which_K]


def _distinct(windows_KxL: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Distinct fingerprints in order, a window with each, and which each window has."""
    num_windows, length = windows_KxL.shape
    fingerprints_K = np.zeros(num_windows, np.uint64)
    for part in _parts(num_windows):
        fingerprints_K[part] = fingerprints(windows_KxL[part], length)[:, 0]
    wanted_U, chosen_U, which_K = np.unique(
        fingerprints_K, return_index=True, return_inverse=True
    )
    rows = np.arange(num_windows)
    if not _equal_rows(windows_KxL, rows, windows_KxL, chosen_U[which_K]).all():
        raise RunError(
            f"two different windows of {length} tokens have the same fingerprint: "
            "sample other windows, with another --seed"
        )
    return wanted_U, chosen_U, which_K


def _equal_rows(
    left_AxL: np.ndarray, a_K: np.ndarray, right_BxL: np.ndarray, b_K: np.ndarray
) -> np.ndarray:
    """Whether rows `a_K` of one array are rows `b_K` of the other."""
    equal_K = np.zeros(len(a_K), bool)
    for part in _parts(len(a_K)):
        equal_K[part] = (left_AxL[a_K[part]] == right_BxL[b_K[part]]).all(axis=1)
    return equal_K


def _parts(size: int) -> list[slice]:
    return [
        slice(start, start + _ROWS_AT_ONCE) for start in range(0, size, _ROWS_AT_ONCE)
    ]


def _joined(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """The fingerprint of two windows side by side."""
    return _mixed(left * _ODD + right)


def _mixed(values: np.ndarray) -> np.ndarray:
    """The finalizer of MurmurHash3 (a bijection), moved off its fixed point 0."""
    values = values + _ODD
    values ^= values >> _HALF
    values *= np.uint64(0xFF51AFD7ED558CCD)
    values ^= values >> _HALF
    values *= np.uint64(0xC4CEB9FE1A85EC53)
    values ^= values >> _HALF
    return values


_ODD = np.uint64(0x9E3779B97F4A7C15)
_HALF = np.uint64(33)
