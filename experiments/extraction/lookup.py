"""Whether token sequences occur in a corpus, and how often: by binary search.

The suffixes of the corpus that start with a query are neighbours in its suffix array.
Two searches find the first of them and the row after the last; a table over the first
tokens of some rows narrows both beforehand, and all queries of a batch take each step
together. The corpus and the array are only read at the places that are compared, so
they may be memory maps that are larger than the memory.

Comparison is by tokens, never by their bytes, and the end of the corpus comes before
every token. A query that holds the separator occurs nowhere: no document does.
"""

import dataclasses

import numpy as np

_QUERIES_AT_ONCE = 1 << 12
_MAX_TABLE_ROWS = 1 << 20
_KEY_BITS = 64
_FIRST_STRIDE = 8


@dataclasses.dataclass(frozen=True)
class Lookup:
    """A corpus that can be searched.

    Attributes:
      tokens_N: uint16[N] or uint32[N].
      eos_id: The separator, or None.
      vocabulary_size: All ids are below it.
      positions_R: int32[N] or int64[N], the suffix array: row r starts there.
      rows_S: int64[S], some rows in order, the first among them.
      keys_S: uint64[S], the first tokens of each of them, packed: see `_key`.
    """

    tokens_N: np.ndarray
    eos_id: int | None
    vocabulary_size: int
    positions_R: np.ndarray
    rows_S: np.ndarray
    keys_S: np.ndarray


def prepare(
    tokens_N: np.ndarray,
    eos_id: int | None,
    vocabulary_size: int,
    positions_R: np.ndarray,
) -> Lookup:
    """Makes a corpus searchable, given its suffix array.

    Takes 16 MB of memory at most, whatever the size of the corpus.

    Args:
      tokens_N: uint16[N] or uint32[N], N at least 1.
      eos_id: The separator; None if the corpus is one document.
      vocabulary_size: All ids are below it.
      positions_R: The suffix array of these tokens (see `stored_suffix_array`).

    Example:
      >>> tokens_N = np.array([5, 5, 5, 0, 5, 7], np.uint16)
      >>> lookup = prepare(tokens_N, 0, 8, np.array([3, 2, 1, 0, 4, 5]))
      >>> count(lookup, np.array([[5, 5], [5, 7], [7, 7], [5, 0]], np.uint32))
      array([2, 1, 0, 0])
    """
    # Plain views: indexing a memmap makes further ones, which takes time.
    tokens_N, positions_R = np.asarray(tokens_N), np.asarray(positions_R)
    stride = -(-len(positions_R) // _MAX_TABLE_ROWS)
    rows_S = np.arange(0, len(positions_R), stride)
    positions_S = positions_R[::stride].astype(np.int64)
    size = _tokens_per_key(vocabulary_size)
    keys_S = _key(_read(tokens_N, positions_S[:, None] + np.arange(size)), size)
    return Lookup(tokens_N, eos_id, vocabulary_size, positions_R, rows_S, keys_S)


def occurs(lookup: Lookup, queries_KxL: np.ndarray) -> np.ndarray:
    """Whether each query occurs within some document.

    Args:
      lookup: The corpus.
      queries_KxL: Token ids in any unsigned dtype, L at least 1; also ids that the
        corpus lacks, and sequences longer than it.

    Returns:
      bool[K].
    """
    return _counts(lookup, queries_KxL, only_first=True) > 0


def count(lookup: Lookup, queries_KxL: np.ndarray) -> np.ndarray:
    """How often each query occurs within documents, overlapping occurrences included.

    Args:
      lookup: The corpus.
      queries_KxL: As in `occurs`.

    Returns:
      int64[K].
    """
    return _counts(lookup, queries_KxL, only_first=False)


def _counts(lookup: Lookup, queries_KxL: np.ndarray, only_first: bool) -> np.ndarray:
    """The counts; with `only_first` no more than whether they are above 0."""
    if queries_KxL.ndim != 2 or not queries_KxL.shape[1]:
        raise ValueError(f"queries of shape {queries_KxL.shape}, expected [K, L >= 1]")
    if queries_KxL.dtype.kind != "u":
        raise ValueError(f"queries of {queries_KxL.dtype}, expected an unsigned dtype")
    # Ids that the corpus cannot have would not fit into a key.
    possible = (queries_KxL < lookup.vocabulary_size).all(axis=1)
    if lookup.eos_id is not None:
        possible &= (queries_KxL != lookup.eos_id).all(axis=1)
    counts_K = np.zeros(len(queries_KxL), np.int64)
    which_K = np.flatnonzero(possible)
    for start in range(0, len(which_K), _QUERIES_AT_ONCE):
        part = which_K[start : start + _QUERIES_AT_ONCE]
        counts_K[part] = _search(lookup, queries_KxL[part].astype(np.int64), only_first)
    return counts_K


def _search(lookup: Lookup, queries_KxL: np.ndarray, only_first: bool) -> np.ndarray:
    low_K, high_K = _narrowed(lookup, queries_KxL)
    first_K = _first_row(lookup, queries_KxL, low_K, high_K, at_least=0)
    last_row = len(lookup.positions_R) - 1
    found = first_K <= last_row
    rows = np.minimum(first_K, last_row)
    found[found] = _compare(lookup, rows[found], queries_KxL[found]) == 0
    if only_first:
        return found.astype(np.int64)
    counts_K = np.zeros(len(queries_KxL), np.int64)
    after = _first_row(
        lookup, queries_KxL[found], first_K[found] + 1, high_K[found], at_least=1
    )
    counts_K[found] = after - first_K[found]
    return counts_K


def _narrowed(lookup: Lookup, queries_KxL: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows between which a query's first row, and the row after its last, must lie."""
    size = _tokens_per_key(lookup.vocabulary_size)
    head_KxS = queries_KxL[:, :size]
    missing = size - head_KxS.shape[1]
    least_K = _key(np.pad(head_KxS, ((0, 0), (0, missing)), constant_values=-1), size)
    # Whatever follows a query that is shorter than a key.
    most_K = least_K + np.uint64((1 << (_KEY_BITS // size) * missing) - 1)
    below_K = np.searchsorted(lookup.keys_S, least_K, side="left")
    above_K = np.searchsorted(lookup.keys_S, most_K, side="right")
    num_rows = len(lookup.positions_R)
    rows = np.concatenate([[-1], lookup.rows_S, [num_rows]])
    return rows[below_K] + 1, rows[above_K + 1]


def _first_row(
    lookup: Lookup,
    queries_KxL: np.ndarray,
    low_K: np.ndarray,
    high_K: np.ndarray,
    at_least: int,
) -> np.ndarray:
    """The first row that compares with the query as `at_least`, between two rows."""
    low_K, high_K = low_K.copy(), high_K.copy()
    while (active := np.flatnonzero(low_K < high_K)).size:
        middle = (low_K[active] + high_K[active]) // 2
        reached = _compare(lookup, middle, queries_KxL[active]) >= at_least
        high_K[active[reached]] = middle[reached]
        low_K[active[~reached]] = middle[~reached] + 1
    return low_K


def _compare(lookup: Lookup, rows_K: np.ndarray, queries_KxL: np.ndarray) -> np.ndarray:
    """-1, 0 or 1: the suffix is before the query, starts with it, or is after it."""
    positions_K = lookup.positions_R[rows_K].astype(np.int64)
    length = queries_KxL.shape[1]
    signs_K = np.zeros(len(rows_K), np.int64)
    undecided, start, stride = np.arange(len(rows_K)), 0, _FIRST_STRIDE
    while start < length and undecided.size:
        columns = np.arange(start, min(start + stride, length))
        here = _read(lookup.tokens_N, positions_K[undecided, None] + columns)
        wanted = queries_KxL[undecided, columns[0] : columns[-1] + 1]
        differing = here != wanted
        place = np.argmax(differing, axis=1)[:, None]
        signs = np.sign(
            np.take_along_axis(here, place, 1) - np.take_along_axis(wanted, place, 1)
        )[:, 0]
        signs_K[undecided] = signs
        undecided = undecided[signs == 0]
        start, stride = start + stride, 2 * stride
    return signs_K


def _read(tokens_N: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """int64, the ids at positions; -1, which is before all ids, behind the end."""
    last = len(tokens_N) - 1
    ids = tokens_N[np.minimum(positions, last)].astype(np.int64)
    ids[positions > last] = -1
    return ids


def _tokens_per_key(vocabulary_size: int) -> int:
    # One value more than there are ids, for what lies behind the end.
    return _KEY_BITS // vocabulary_size.bit_length()


def _key(ids_KxS: np.ndarray, size: int) -> np.ndarray:
    """uint64[K] that order as the `size` ids (-1 and up) of each row do."""
    bits = np.uint64(_KEY_BITS // size)
    keys_K = np.zeros(len(ids_KxS), np.uint64)
    for column in (ids_KxS + 1).astype(np.uint64).T:
        keys_K = (keys_K << bits) | column
    return keys_K
