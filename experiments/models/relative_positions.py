"""The buckets of relative positions in T5 (Raffel et al. 2020, section 2.1)."""

import numpy as np


def buckets(
    distance_xS: np.ndarray, *, bidirectional: bool, num_buckets: int, max_distance: int
) -> np.ndarray:
    """The bucket of each distance, from 0 to `num_buckets` - 1.

    The first half of the buckets hold one distance each, the second half ever more of
    them, in geometric progression up to `max_distance`, with the last one for all that
    lie further. With m buckets of the first kind and k of the second, a distance d >= m
    is in bucket m + min(k - 1, floor(k log(d / m) / log(max_distance / m))). That is
    decided in integers: in floating point it would be left to rounding whether a power
    of two reaches the next bucket.

    Args:
      distance_xS: Integers, key position minus query position.
      bidirectional: Whether keys after the query have buckets of their own, the upper
        half; else they share bucket 0.
      num_buckets: Number of buckets.
      max_distance: More than half of `num_buckets`.

    Returns:
      i32, of the shape of the distances.

    Example:
      >>> distance_7 = np.array([-200, -16, -15, -1, 0, 1, 16])
      >>> options = dict(num_buckets=32, max_distance=128)
      >>> buckets(distance_7, bidirectional=True, **options).tolist()
      [15, 10, 9, 1, 0, 17, 26]
      >>> buckets(distance_7, bidirectional=False, **options).tolist()
      [31, 16, 15, 1, 0, 0, 0]
    """
    if bidirectional:
        num_buckets //= 2
        offset_xS = np.where(distance_xS > 0, num_buckets, 0)
        distance_xS = np.abs(distance_xS)
    else:
        offset_xS = np.zeros_like(distance_xS)
        distance_xS = np.maximum(-distance_xS, 0)
    num_exact = num_buckets // 2
    limits = np.array(_limits(num_exact, num_buckets - num_exact, max_distance))
    coarse_xS = num_exact + np.searchsorted(limits, distance_xS, side="right")
    within_xS = np.where(distance_xS < num_exact, distance_xS, coarse_xS)
    return (offset_xS + within_xS).astype(np.int32)


def _limits(num_exact: int, num_coarse: int, max_distance: int) -> list[int]:
    """The least distance in each coarse bucket but the first."""
    limits, distance = [], num_exact
    for j in range(1, num_coarse):
        least = max_distance**j * num_exact ** (num_coarse - j)
        while distance**num_coarse < least:
            distance += 1
        limits.append(distance)
    return limits
