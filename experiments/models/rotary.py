"""Rotary positions (Su et al. 2021, arXiv 2104.09864) of a part of each head.

A pair of dimensions (a, b) of a query or key at position p is turned by the angle
p base^(-2i / R): (a cos - b sin, b cos + a sin), i = 0 .. R/2 - 1. Which dimensions
make pair i is a convention, and taking the wrong one gives garbage without an error:

- `interleaved` (GPT-J): 2i and 2i + 1;
- `half_split` (GPT-NeoX): i and i + R/2.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.models.decoder_config import Rotary


class Rotation(NamedTuple):
    """Cosines and sines of all pairs at all positions, f32[S, R/2] each."""

    cos_SxP: jax.Array
    sin_SxP: jax.Array


def rotation(positions_S: jax.Array, rotary_dim: int, base: float) -> Rotation:
    """The rotation at `positions_S` i32[S].

    Example:
      >>> cos_SxP, sin_SxP = rotation(jnp.array([0, 1]), rotary_dim=4, base=100.0)
      >>> [[f"{x:.4f}" for x in row] for row in cos_SxP.tolist()]
      [['1.0000', '1.0000'], ['0.5403', '0.9950']]
    """
    # All in float32, as the reference has it: at position 2,048 the last bit of a
    # frequency is worth 1e-4 radians.
    exponents_P = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
    frequencies_P = np.float32(1) / np.float32(base) ** exponents_P
    angles_SxP = positions_S[:, None].astype(jnp.float32) * frequencies_P[None]
    return Rotation(jnp.cos(angles_SxP), jnp.sin(angles_SxP))


def rotate(x_BxSxHxK: jax.Array, by: Rotation, rotary: Rotary) -> jax.Array:
    """Turns the first R dimensions of every head, and keeps the others.

    Example:
      >>> quarter_turn = Rotation(jnp.zeros((1, 2)), jnp.ones((1, 2)))
      >>> x_BxSxHxK = jnp.arange(5.0).reshape(1, 1, 1, 5)
      >>> rotate(x_BxSxHxK, quarter_turn, "interleaved").ravel().tolist()
      [-1.0, 0.0, -3.0, 2.0, 4.0]
      >>> rotate(x_BxSxHxK, quarter_turn, "half_split").ravel().tolist()
      [-2.0, -3.0, 0.0, 1.0, 4.0]
    """
    num_pairs = by.cos_SxP.shape[-1]
    turned_BxSxHxR = x_BxSxHxK[..., : 2 * num_pairs]
    kept = x_BxSxHxK[..., 2 * num_pairs :]
    # With the two numbers of a pair along an axis of their own, only its place differs.
    axis = -1 if rotary == "interleaved" else -2
    pairs = (num_pairs, 2) if rotary == "interleaved" else (2, num_pairs)
    split = turned_BxSxHxR.reshape(*x_BxSxHxK.shape[:-1], *pairs)
    a, b = jnp.moveaxis(split, axis, 0)
    cos, sin = by.cos_SxP[None, :, None], by.sin_SxP[None, :, None]
    turned = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=axis)
    return jnp.concatenate([turned.reshape(turned_BxSxHxR.shape), kept], axis=-1)
