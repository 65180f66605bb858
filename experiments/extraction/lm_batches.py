"""The order in which training visits a corpus.

An *epoch* cuts the corpus into crops of `sequence_length` predicted tokens, from a
random offset on, and visits them in a random order: each token is predicted once per
epoch, so a passage that the corpus holds c times is met c times per epoch, neither more
nor less. (Crops at independent random places would make that a Poisson variable.)
The corpus is a ring: its first token follows its last one, as one document follows
another. What a whole number of crops leaves over, less than one crop, is left out at
the random offset, elsewhere in each epoch.

Crops run across separators, as in packed pretraining: documents are neither padded nor
masked from each other.
"""

import itertools
from collections.abc import Iterator

import numpy as np

from experiments import seeds


def crops_per_epoch(num_tokens: int, sequence_length: int) -> int:
    """Number of crops, each token being predicted at most once.

    Example:
      >>> crops_per_epoch(1000, sequence_length=256)
      3
    """
    return num_tokens // sequence_length


def epoch_starts(
    seed: int, epoch: int, *, num_tokens: int, sequence_length: int
) -> np.ndarray:
    """Where the crops of an epoch start, in the order in which they are visited.

    Args:
      seed: Of the run.
      epoch: From 0 on; with the seed it decides everything.
      num_tokens: N, of the corpus; at least `sequence_length`.
      sequence_length: T.

    Returns:
      starts_M, i64[N // T] below N: `sequence_length` apart on the ring once sorted.
    """
    generator = seeds.generator(seed, seeds.Stream.SAMPLING, epoch)
    offset = generator.integers(num_tokens)
    order_M = generator.permutation(crops_per_epoch(num_tokens, sequence_length))
    return (offset + order_M * sequence_length) % num_tokens


def crops(tokens_N: np.ndarray, starts_B: np.ndarray, length: int) -> np.ndarray:
    """Reads crops off the ring.

    Returns:
      tokens_BxL, i32[B, length].

    Example:
      >>> crops(np.array([7, 8, 9], np.uint16), np.array([0, 2]), length=2)
      array([[7, 8],
             [9, 7]], dtype=int32)
    """
    positions_BxL = (starts_B[:, None] + np.arange(length)) % len(tokens_N)
    return np.asarray(tokens_N[positions_BxL], np.int32)


def batches(
    tokens_N: np.ndarray,
    *,
    sequence_length: int,
    batch_size: int,
    seed: int,
    first_step: int,
) -> Iterator[np.ndarray]:
    """The batches of step `first_step`, of the next step, and so on without end.

    The batch of a step is a function of the seed and the step alone, so a run that is
    continued takes the batches that it would have taken.

    Args:
      tokens_N: The corpus; may be a memory map, of which only the crops are read.
      sequence_length: T.
      batch_size: B; the last batch of an epoch is filled up from the next one.
      seed: Of the run.
      first_step: From 0 on.

    Yields:
      tokens_BxL, i32[B, T + 1]: inputs and, one further, targets.
    """
    starts = _starts_from(first_step * batch_size, seed, len(tokens_N), sequence_length)
    while True:
        starts_B = np.fromiter(
            itertools.islice(starts, batch_size), np.int64, batch_size
        )
        yield crops(tokens_N, starts_B, sequence_length + 1)


def _starts_from(
    crop: int, seed: int, num_tokens: int, sequence_length: int
) -> Iterator[int]:
    """Where the crop number `crop` of the whole training starts, and all later ones."""
    epoch, done = divmod(crop, crops_per_epoch(num_tokens, sequence_length))
    while True:
        starts_M = epoch_starts(
            seed, epoch, num_tokens=num_tokens, sequence_length=sequence_length
        )
        yield from starts_M[done:]
        epoch, done = epoch + 1, 0
