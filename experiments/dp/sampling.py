"""Poisson sampling with batches of one physical shape.

The accountant assumes that every step includes every example independently with the
same probability. The batch size is then random, while a compiled step wants one shape:
batches are cut into parts of `physical_batch_size` and the last part is padded with
index -1. No example is ever dropped.
"""

import math

import numpy as np
from jax_privacy import batch_selection

from experiments import seeds


def poisson_batch(
    seed: int, step: int, num_examples: int, sampling_probability: float
) -> np.ndarray:
    """The examples of one step, a function of its arguments alone.

    Each step reads its own random stream, so a resumed run needs the step number and
    no replay. Steps stay independent because the streams are, and within a step
    jax_privacy draws the size from the binomial distribution and then a subset of that
    size uniformly, which is the law of independent inclusions (Beltran et al., Lemma 1,
    arXiv 2406.17298).

    Returns:
      Distinct indices in [0, num_examples), int, of random length (possibly 0).

    Example:
      >>> len(poisson_batch(seed=7, step=0, num_examples=100, sampling_probability=1.0))
      100
    """
    strategy = batch_selection.CyclicPoissonSampling(
        sampling_prob=sampling_probability, iterations=1
    )
    rng = seeds.generator(seed, seeds.Stream.SAMPLING, step)
    (indices,) = strategy.batch_iterator(num_examples, rng=rng)
    return indices


def physical_batches(indices: np.ndarray, size: int) -> list[np.ndarray]:
    """Cuts `indices` into parts of exactly `size`, int32, padded with -1.

    An empty batch gives one part of padding: it is still a step.

    Example:
      >>> [part.tolist() for part in physical_batches(np.arange(3), 2)]
      [[0, 1], [2, -1]]
    """
    return batch_selection.split_and_pad_global_batch(indices.astype(np.int32), size)


def default_physical_size(num_examples: int, batch_size: int) -> int:
    """A size that is exceeded by about one batch in 30,000 (four deviations).

    Example:
      >>> default_physical_size(60_000, 2048)
      2232
    """
    deviation = math.sqrt(batch_size * (1 - batch_size / num_examples))
    size = 8 * math.ceil((batch_size + 4 * deviation) / 8)
    return min(size, num_examples)
