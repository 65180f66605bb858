"""Finds the largest batch whose program fits a memory budget, by few compilations."""

from collections.abc import Callable

# Of the batch found: no batch that is larger by this fraction is known to fit.
RESOLUTION = 0.03


def largest_batch(
    bytes_for: Callable[[int], int], budget_bytes: float, *, start: int, most: int
) -> int:
    """Returns a batch size that fits while one a little larger does not.

    `bytes_for` is slow (it compiles), and nearly affine, so the search interpolates;
    every fourth guess halves what is left, which bounds the number of calls for any
    function that does not decrease.

    Args:
      bytes_for: Memory for a batch size.
      budget_bytes: What it may be at most.
      start: The first batch size to try, at least 1.
      most: Where the search ends.

    Returns:
      A batch size that `bytes_for` was asked about and that fits; 0 if 1 does not.
      Either it is `most`, or one that is larger by at most `RESOLUTION` (or by 1) was
      asked about and does not fit.

    Example:
      >>> largest_batch(lambda n: 100 + 10 * n, 450, start=2, most=1000)
      35
    """
    known: dict[int, int] = {}

    def fits(batch_size: int) -> bool:
        known[batch_size] = bytes_for(batch_size)
        return known[batch_size] <= budget_bytes

    low, high, guess = 0, most + 1, min(start, most)
    while True:
        if fits(guess):
            low = guess
        else:
            high = guess
        step = max(1, int(low * RESOLUTION))
        if low == most or (high in known and high - low <= step):
            return low
        guess = _next(known, low, high, step, budget_bytes)


def _next(
    known: dict[int, int], low: int, high: int, step: int, budget_bytes: float
) -> int:
    """A batch size strictly between `low` and `high`."""
    if len(known) % 4 == 0:
        # Far from a bound, halve the ratio and not the distance.
        return _between(int((max(low, 1) * high) ** 0.5), low, high)
    if len(known) == 1:
        # As if nothing were fixed, which is not far above the budget, nor far below.
        ((batch_size, num_bytes),) = known.items()
        return _between(int(batch_size * budget_bytes / max(num_bytes, 1)), low, high)
    crossing = _crossing(known, low, high, budget_bytes)
    if low and abs(crossing - low) < step:
        # Just above what fits, to show that it does not.
        return _between(low + step, low, high)
    return _between(crossing, low, high)


def _crossing(known: dict[int, int], low: int, high: int, budget_bytes: float) -> int:
    """Where the line through the two known sizes nearest to the budget meets it."""
    pair = [low, high] if low in known and high in known else sorted(known)
    # With only one side known, the two nearest to it.
    first, second = pair[-2:] if low in known else pair[:2]
    slope = (known[second] - known[first]) / (second - first)
    if slope <= 0:
        return high
    return int(first + (budget_bytes - known[first]) / slope)


def _between(guess: int, low: int, high: int) -> int:
    return min(max(guess, low + 1), high - 1)
