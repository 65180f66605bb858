"""Buckets of counts, decided in integers.

Bucket n of Carlini et al. 2023 (arXiv 2202.07646, section 3.2) holds the windows that
occur between 2^(n/4) and 2^((n+1)/4) times. Here its lower end belongs to it and its
upper end does not, so every count is in exactly one bucket. Five of the first eight
(n = 1, 2, 3, 5 and 7) hold no integer and are left out.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np

from experiments.errors import UsageError

OUTSIDE = -1


@dataclasses.dataclass(frozen=True)
class Bucket:
    """The counts from `low` to `high - 1`.

    Attributes:
      number: n in 2^(n/4), or the place among edges that were given.
      low: The least count of the bucket, at least 1.
      high: One more than its largest count.
    """

    number: int
    low: int
    high: int


def quarter_powers(max_count: int) -> list[Bucket]:
    """The buckets [2^(n/4), 2^((n+1)/4)) that hold integers up to `max_count`.

    A count c is in bucket n iff 2^n <= c^4 < 2^(n+1).

    Example:
      >>> [(b.number, b.low, b.high) for b in quarter_powers(8)]
      [(0, 1, 2), (4, 2, 3), (6, 3, 4), (8, 4, 5), (9, 5, 6), (10, 6, 7), (11, 7, 8), (12, 8, 10)]
    """  # noqa: E501
    buckets: list[Bucket] = []
    for number in itertools.count():
        low, high = _fourth_root(2**number), _fourth_root(2 ** (number + 1))
        if low > max_count:
            return buckets
        if low < high:
            buckets.append(Bucket(number, low, high))
    raise AssertionError


def from_edges(edges: Sequence[int]) -> list[Bucket]:
    """The buckets [edges[0], edges[1]), [edges[1], edges[2]), ...

    Raises:
      UsageError: There are fewer than two edges, or they do not rise from at least 1.

    Example:
      >>> from_edges([2, 10, 100])
      [Bucket(number=0, low=2, high=10), Bucket(number=1, low=10, high=100)]
    """
    pairs = list(itertools.pairwise(edges))
    if not pairs or edges[0] < 1 or any(low >= high for low, high in pairs):
        raise UsageError(
            f"edges={','.join(map(str, edges))}, expected two or more rising integers "
            ">= 1: give --edges=1,2,10,100 for the counts 1, 2 to 9 and 10 to 99"
        )
    return [Bucket(number, *pair) for number, pair in enumerate(pairs)]


def places(buckets: Sequence[Bucket], counts_K: np.ndarray) -> np.ndarray:
    """The place in `buckets` of each count, or `OUTSIDE`.

    Args:
      buckets: Adjacent buckets in rising order, as the functions above return them.
      counts_K: Integers.

    Returns:
      int64[K].

    Example:
      >>> places(from_edges([2, 10, 100]), np.array([1, 2, 9, 10, 100]))
      array([-1,  0,  0,  1, -1])
    """
    # No count is larger than an int64, and an edge may be.
    largest = np.iinfo(np.int64).max
    edges = np.array(
        [min(e, largest) for e in (*(b.low for b in buckets), buckets[-1].high)]
    )
    places_K = np.searchsorted(edges, counts_K, side="right") - 1
    return np.where(places_K < len(buckets), places_K, OUTSIDE)


def _fourth_root(power: int) -> int:
    """The least integer whose fourth power is at least `power`."""
    root = math.isqrt(math.isqrt(power))
    return root if root**4 == power else root + 1
