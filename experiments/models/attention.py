"""Causal self-attention, over a sequence or over a cache that grows.

What may be attended to follows from positions alone, never from token ids: an id that
some tokenizer uses for padding is an ordinary token here.
"""

import math
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from experiments.models.decoder_config import DecoderConfig
from experiments.models.rotary import Rotation, rotate

KERNEL_INIT = nn.initializers.normal(0.02)  # Radford et al. 2018.


class KeysValues(NamedTuple):
    """Keys and values of one layer, f32[B, H, L, K] each.

    In this order of axes both products of attention are plain batched ones: no copy of
    the cache is made in a step.
    """

    keys_BxHxLxK: jax.Array
    values_BxHxLxK: jax.Array


def causal_mask(
    query_positions_S: jax.Array, key_positions_L: jax.Array, window: int | None
) -> jax.Array:
    """Which keys each query sees, bool[S, L]: the last `window` ones, its own included.

    Example:
      >>> positions = jnp.arange(4)
      >>> causal_mask(positions, positions, window=2).astype(int).tolist()
      [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    """
    distance_SxL = query_positions_S[:, None] - key_positions_L[None]
    if window is None:
        return distance_SxL >= 0
    return (distance_SxL >= 0) & (distance_SxL < window)


def attend(
    queries_BxHxSxK: jax.Array,
    seen: KeysValues,
    mask_SxL: jax.Array,
    scale: float,
    prompt: KeysValues | None = None,
) -> jax.Array:
    """softmax(scale q k^T) v over the unmasked keys, f32[B, H, S, K].

    Args:
      queries_BxHxSxK: f32.
      seen: Keys and values of each row.
      mask_SxL: bool, over the keys of the prompt, if there is one, and those seen.
      scale: Of the scores.
      prompt: Keys and values before those seen, of P prompts: B/P rows in a row share
        the same ones. They are read as they are, with no copy for each row.
    """
    queries_BxHxSxK = queries_BxHxSxK * scale
    scores_BxHxSxL = jnp.einsum("bhsk,bhlk->bhsl", queries_BxHxSxK, seen.keys_BxHxLxK)
    if prompt is not None:
        scores_BxHxSxC = _shared(
            "pnhsk,phck->pnhsc", queries_BxHxSxK, prompt.keys_BxHxLxK
        )
        scores_BxHxSxL = jnp.concatenate([scores_BxHxSxC, scores_BxHxSxL], axis=-1)
    scores_BxHxSxL = jnp.where(
        mask_SxL[None, None], scores_BxHxSxL, jnp.finfo(scores_BxHxSxL.dtype).min
    )
    weights_BxHxSxL = nn.softmax(scores_BxHxSxL)
    if prompt is None:
        return jnp.einsum("bhsl,bhlk->bhsk", weights_BxHxSxL, seen.values_BxHxLxK)
    context = prompt.keys_BxHxLxK.shape[2]
    weights_BxHxSxC, weights_BxHxSxL = jnp.split(weights_BxHxSxL, [context], axis=-1)
    return _shared(
        "pnhsc,phck->pnhsk", weights_BxHxSxC, prompt.values_BxHxLxK
    ) + jnp.einsum("bhsl,bhlk->bhsk", weights_BxHxSxL, seen.values_BxHxLxK)


def _shared(
    equation: str, x_BxHxSxK: jax.Array, of_prompts_PxHxCxK: jax.Array
) -> jax.Array:
    """The product of each row with the keys or values of its prompt, [B, H, S, ...]."""
    num_prompts = of_prompts_PxHxCxK.shape[0]
    grouped_PxNxHxSxK = x_BxHxSxK.reshape(num_prompts, -1, *x_BxHxSxK.shape[1:])
    product = jnp.einsum(equation, grouped_PxNxHxSxK, of_prompts_PxHxCxK)
    return product.reshape(x_BxHxSxK.shape[0], *product.shape[2:])


class Attention(nn.Module):
    """Self-attention of one layer.

    Attributes:
      config: The model's architecture.
      layer: Which layer this is, from 0.
    """

    config: DecoderConfig
    layer: int

    @nn.compact
    def __call__(
        self,
        x_BxSxD: jax.Array,
        positions_S: jax.Array,
        rotation: Rotation | None,
        cached: KeysValues | None,
        prompt: KeysValues | None = None,
    ) -> tuple[jax.Array, KeysValues]:
        """Attends from `x_BxSxD` to itself, or to the cache with itself added.

        Args:
          x_BxSxD: Normalised residual stream.
          positions_S: i32[S], consecutive.
          rotation: At these positions; None without rotary positions.
          cached: Keys and values before them; None: there are none.
          prompt: Those before the cache, see `attend`; None: there are none.

        Returns:
          f32[B, S, D], and the cache with these keys and values at `positions_S`
          (counted from the end of the prompt, if there is one), or these alone.
        """
        config = self.config
        batch_size, length, width = x_BxSxD.shape
        qkv_BxSxP = nn.Dense(
            3 * width,
            use_bias=config.qkv_bias,
            kernel_init=KERNEL_INIT,
            name="qkv",
        )(x_BxSxD)
        qkv = qkv_BxSxP.reshape(
            batch_size, length, 3, config.num_heads, config.head_dim
        )
        q_BxSxHxK, k_BxSxHxK, v_BxSxHxK = (qkv[:, :, i] for i in range(3))
        if rotation is not None:
            q_BxSxHxK = rotate(q_BxSxHxK, rotation, config.rotary)
            k_BxSxHxK = rotate(k_BxSxHxK, rotation, config.rotary)
        q_BxHxSxK, k_BxHxSxK, v_BxHxSxK = (
            jnp.swapaxes(x, 1, 2) for x in (q_BxSxHxK, k_BxSxHxK, v_BxSxHxK)
        )
        seen, key_positions_L = KeysValues(k_BxHxSxK, v_BxHxSxK), positions_S
        if cached is not None:
            context = 0 if prompt is None else prompt.keys_BxHxLxK.shape[2]
            seen = _updated(cached, seen, positions_S[0] - context)
            key_positions_L = jnp.arange(context + seen.keys_BxHxLxK.shape[2])
        mask_SxL = causal_mask(positions_S, key_positions_L, config.windows[self.layer])
        mixed_BxHxSxK = attend(q_BxHxSxK, seen, mask_SxL, self._scale(), prompt)
        mixed_BxSxD = jnp.swapaxes(mixed_BxHxSxK, 1, 2).reshape(x_BxSxD.shape)
        output_BxSxD = nn.Dense(
            width,
            use_bias=config.attention_output_bias,
            kernel_init=residual_init(config.num_layers),
            name="output",
        )(mixed_BxSxD)
        return output_BxSxD, seen

    def _scale(self) -> float:
        scale = 1.0
        if self.config.scale_attention:
            scale /= math.sqrt(self.config.head_dim)
        if self.config.scale_attention_by_layer:
            scale /= self.layer + 1
        return scale


def _updated(cached: KeysValues, added: KeysValues, start: jax.Array) -> KeysValues:
    return KeysValues(
        *(
            jax.lax.dynamic_update_slice_in_dim(old, new, start, axis=2)
            for old, new in zip(cached, added, strict=True)
        )
    )


def residual_init(num_layers: int) -> nn.initializers.Initializer:
    """`KERNEL_INIT` over sqrt(2 num_layers), as in GPT-2 (Radford et al. 2019)."""
    return nn.initializers.normal(0.02 / math.sqrt(2 * num_layers))
