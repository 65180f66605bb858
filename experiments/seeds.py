"""Independent random streams from one secret seed.

Whoever knows the seed can recompute the batches and the noise, so nothing but the
private checkpoint may hold it. The generators (PCG64 and threefry) are statistical, not
cryptographic.
"""

import enum
import secrets

import jax
import jax.numpy as jnp
import numpy as np


class Stream(enum.IntEnum):
    """What a stream is used for; streams of one seed are independent."""

    PARAMETERS = 0
    NOISE = 1
    SAMPLING = 2


def draw() -> int:
    """A seed of 128 bits from the operating system."""
    return secrets.randbits(128)


def key(seed: int, stream: Stream) -> jax.Array:
    """A typed JAX key (threefry, 64 bits)."""
    words_2 = _sequence(seed, stream).generate_state(2, np.uint32)
    return jax.random.wrap_key_data(jnp.asarray(words_2), impl="threefry2x32")


def generator(seed: int, stream: Stream, step: int) -> np.random.Generator:
    """A NumPy generator for one step of a stream."""
    return np.random.default_rng(_sequence(seed, stream, step))


def _sequence(seed: int, *path: int) -> np.random.SeedSequence:
    return np.random.SeedSequence(seed, spawn_key=tuple(int(p) for p in path))
