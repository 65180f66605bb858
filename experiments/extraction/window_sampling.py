"""Which windows go into an evaluation set: uniform samples that nothing else sways.

Every window gets a random key, and a sample is the windows with the least keys. A key
depends on the seed, the length and the window's row in the suffix array alone. So the
choice is the same whatever other lengths, bucket edges or sample sizes are asked for (a
smaller sample is the start of a larger one), and one pass over the windows is enough.
"""

import dataclasses
import hashlib
from collections.abc import Sequence

import numpy as np

from experiments.extraction import buckets, repeats
from experiments.extraction.buckets import Bucket
from experiments.extraction.repeats import Index, Windows
from experiments.extraction.suffix_array import blocks


@dataclasses.dataclass(frozen=True)
class Sample:
    """Windows of one length.

    Attributes:
      windows: The chosen ones in random order: the first ones are a sample themselves.
        A sample by count has bucket after bucket, and only each bucket is in random
        order.
      places_K: int64[K], the bucket of each one, as its place in the list of buckets.
      available_B: int64[B], how many distinct windows each bucket has.
    """

    windows: Windows
    places_K: np.ndarray
    available_B: np.ndarray


def by_count(
    index: Index,
    length: int,
    bucket_list: Sequence[Bucket],
    per_bucket: int,
    seed: int,
    one_per_repeat: bool = False,
) -> Sample:
    """Draws up to `per_bucket` distinct windows of each bucket, without replacement.

    Args:
      index: The corpus.
      length: Of the windows, in tokens.
      bucket_list: Adjacent buckets of counts.
      per_bucket: All windows of a bucket are equally likely; all are taken if there are
        no more than this.
      seed: An integer >= 0.
      one_per_repeat: At most one window of each maximal repeat (equal
        `repeats.repeat_starts`) in a bucket. Then all repeats with a window in the
        bucket are equally likely, and so are the windows of one repeat. A window that
        occurs once is no repeat and stands for itself.
    """
    available_B = np.zeros(len(bucket_list), np.int64)
    chosen = _Candidates.none()
    repeated = []
    for piece in repeats.distinct_windows(index, length):
        places = buckets.places(bucket_list, piece.counts_K)
        within = places != buckets.OUTSIDE
        available_B += np.bincount(places[within], minlength=len(bucket_list))
        if one_per_repeat:
            repeated.append(piece[within & (piece.counts_K > 1)])
            within &= piece.counts_K == 1
        windows = piece[within]
        keys = random_keys((seed, length), windows.rows_K)
        new = _Candidates(places[within], keys, windows)
        chosen = _least(chosen, new, per_bucket)
    if one_per_repeat:
        windows = repeats.concatenate(repeated)
        places = buckets.places(bucket_list, windows.counts_K)
        new = _one_per_repeat(index, length, windows, places, seed)
        chosen = _least(chosen, new, per_bucket)
    return Sample(chosen.windows, chosen.places_K, available_B)


def by_position(
    index: Index,
    length: int,
    bucket_list: Sequence[Bucket],
    num_windows: int,
    seed: int,
) -> Sample:
    """Draws positions where a window starts, without replacement, all equally likely.

    A window that occurs often is drawn often, and maybe more than once, as in the
    random sample of Carlini et al. 2023 (arXiv 2202.07646, section 4.5).

    Args:
      index: The corpus.
      length: Of the windows, in tokens.
      bucket_list: Adjacent buckets that cover all counts.
      num_windows: All positions are taken if there are no more than this.
      seed: An integer >= 0.
    """
    # Positions are drawn as rows: each one has one.
    drawn = _Candidates.none()
    for start, stop in blocks(len(index.room_R)):
        rows = start + np.flatnonzero(index.room_R[start:stop] >= length)
        keys = random_keys((seed, length), rows)
        new = _Candidates(np.zeros_like(rows), keys, Windows(rows, np.ones_like(rows)))
        drawn = _least(drawn, new, num_windows)
    windows, available_B = _windows_around(
        index, length, drawn.windows.rows_K, bucket_list
    )
    places = buckets.places(bucket_list, windows.counts_K)
    return Sample(windows, places, available_B)


def random_keys(stream: tuple[int | str, ...], numbers_K: np.ndarray) -> np.ndarray:
    """A random key for each number; different numbers have different keys.

    Args:
      stream: What the keys are for; another stream has other keys.
      numbers_K: Integers >= 0.

    Returns:
      uint64[K].
    """
    digest = hashlib.sha256(repr(stream).encode()).digest()
    return splitmix64(int.from_bytes(digest[:8], "little"), numbers_K)


def splitmix64(seed: int, numbers_K: np.ndarray) -> np.ndarray:
    """Outputs of the generator SplitMix64 at the given places of its stream.

    Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators". The
    place of an output is all that it depends on, and no two outputs are the same.

    Args:
      seed: From 0 to 2^64 - 1.
      numbers_K: Integers >= 0, of any integer dtype.

    Returns:
      uint64[K].

    Example:
      >>> [hex(key) for key in splitmix64(0, np.arange(2))]
      ['0xe220a8397b1dcdaf', '0x6e789e6aa1b965f4']
    """
    keys = (numbers_K.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    keys += np.uint64(seed)
    keys ^= keys >> np.uint64(30)
    keys *= np.uint64(0xBF58476D1CE4E5B9)
    keys ^= keys >> np.uint64(27)
    keys *= np.uint64(0x94D049BB133111EB)
    keys ^= keys >> np.uint64(31)
    return keys


@dataclasses.dataclass(frozen=True)
class _Candidates:
    """Windows with their buckets and keys."""

    places_K: np.ndarray
    keys_K: np.ndarray
    windows: Windows

    @classmethod
    def none(cls) -> "_Candidates":
        empty = np.zeros(0, np.int64)
        return cls(empty, np.zeros(0, np.uint64), Windows(empty, empty))

    def __getitem__(self, which: np.ndarray) -> "_Candidates":
        return _Candidates(
            self.places_K[which], self.keys_K[which], self.windows[which]
        )


def _least(kept: _Candidates, new: _Candidates, size: int) -> _Candidates:
    """Of both, those with the `size` least keys of each bucket, in order of keys.

    Args:
      kept: What this function returned before, or none.
      new: Others.
      size: At most so many per bucket.
    """
    # Nearly all of a later piece is above the limit of a bucket that is full.
    num_buckets = 1 + max(kept.places_K.max(initial=0), new.places_K.max(initial=0))
    kept_B = np.bincount(kept.places_K, minlength=num_buckets)
    limits_B = np.full(num_buckets, 2**64 - 1, np.uint64)
    full = kept_B >= size
    limits_B[full] = kept.keys_K[np.cumsum(kept_B)[full] - 1]
    new = new[new.keys_K <= limits_B[new.places_K]]

    places = np.concatenate([kept.places_K, new.places_K])
    keys = np.concatenate([kept.keys_K, new.keys_K])
    windows = repeats.concatenate([kept.windows, new.windows])
    order = np.lexsort((keys, places))
    places = places[order]
    rank = np.arange(len(places)) - np.searchsorted(places, places)
    order = order[rank < size]
    return _Candidates(places[rank < size], keys[order], windows[order])


def _one_per_repeat(
    index: Index, length: int, windows: Windows, places_K: np.ndarray, seed: int
) -> _Candidates:
    """One random window of each maximal repeat and bucket, with the repeat's key."""
    positions = repeats.first_positions(index, windows)
    starts = repeats.repeat_starts(index, windows, positions)
    keys = random_keys((seed, length, "window"), windows.rows_K)
    order = np.lexsort((keys, starts, places_K))
    starts, places = starts[order], places_K[order]
    first = np.ones(len(order), bool)
    first[1:] = (starts[1:] != starts[:-1]) | (places[1:] != places[:-1])
    return _Candidates(
        places[first],
        random_keys((seed, length, "repeat"), starts[first]),
        windows[order[first]],
    )


def _windows_around(
    index: Index, length: int, rows_K: np.ndarray, bucket_list: Sequence[Bucket]
) -> tuple[Windows, np.ndarray]:
    """The windows whose runs the rows lie in, and how many windows each bucket has."""
    around = Windows(np.zeros_like(rows_K), np.zeros_like(rows_K))
    available_B = np.zeros(len(bucket_list), np.int64)
    for piece in repeats.distinct_windows(index, length):
        places = buckets.places(bucket_list, piece.counts_K)
        available_B += np.bincount(places, minlength=len(bucket_list))
        if not len(piece):
            continue
        run = np.searchsorted(piece.rows_K, rows_K, side="right") - 1
        inside = (run >= 0) & (rows_K < piece.rows_K[run] + piece.counts_K[run])
        around.rows_K[inside] = piece.rows_K[run[inside]]
        around.counts_K[inside] = piece.counts_K[run[inside]]
    return around, available_B
