"""Normalisation that does not mix examples, in the place of batch normalisation.

Batch normalisation in training mode makes the loss of one example depend on the others,
so no per-example gradient exists. Its two stand-ins:

- `group`: group normalisation (Wu & He 2018, arXiv 1803.08494) with 16 channels per
  group, or the largest divisor they share with the number of channels: statistics of
  one example, a trainable scale and bias per channel, as many parameters as batch
  normalisation has.
- `frozen`: batch normalisation with constant statistics and constant scale and bias is
  a constant affine map. Without pretrained weights to take it from, that map is a
  multiplication by one number, which the caller chooses so that the network keeps the
  scale of its activations.
"""

import math
from typing import Literal

import flax.linen as nn
import jax

Norm = Literal["group", "frozen"]
CHANNELS_PER_GROUP = 16


class Normalization(nn.Module):
    """One of the two.

    Attributes:
      norm: `group` or `frozen`.
      frozen_scale: What `frozen` multiplies by.
    """

    norm: Norm
    frozen_scale: float = 1.0

    @nn.compact
    def __call__(self, x_BxHxWxC: jax.Array) -> jax.Array:
        """Returns an array like `x_BxHxWxC`."""
        if self.norm == "frozen":
            return x_BxHxWxC * self.frozen_scale
        group_size = math.gcd(CHANNELS_PER_GROUP, x_BxHxWxC.shape[-1])
        return nn.GroupNorm(num_groups=None, group_size=group_size)(x_BxHxWxC)
