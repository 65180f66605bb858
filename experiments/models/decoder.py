"""A decoder-only language model: GPT-2, GPT-Neo, GPT-J, GPT-NeoX and Pythia.

Layers are unrolled and each has arrays of its own, so that no weight is copied when one
token is decoded.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from experiments.errors import UsageError
from experiments.models.attention import (
    KERNEL_INIT,
    Attention,
    KeysValues,
    residual_init,
)
from experiments.models.decoder_config import DecoderConfig
from experiments.models.rotary import Rotation, rotation

_tanh_gelu = functools.partial(nn.gelu, approximate=True)
# The names that Hugging Face configs use.
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": functools.partial(nn.gelu, approximate=False),
    "gelu_new": _tanh_gelu,
    "gelu_fast": _tanh_gelu,
    "gelu_pytorch_tanh": _tanh_gelu,
}


class Cache(NamedTuple):
    """What decoding remembers.

    Attributes:
      position: i32 scalar, the number of tokens that it holds.
      layers: Keys and values of each layer; those from `position` on are unused.
    """

    position: jax.Array
    layers: tuple[KeysValues, ...]


def with_room(cache: Cache, num_tokens: int) -> Cache:
    """The cache with room for so many tokens more.

    Example:
      >>> empty_BxHxLxK = jnp.zeros((1, 2, 0, 4))
      >>> cache = Cache(jnp.int32(0), (KeysValues(empty_BxHxLxK, empty_BxHxLxK),))
      >>> with_room(cache, 3).layers[0].keys_BxHxLxK.shape
      (1, 2, 3, 4)
    """
    padding = ((0, 0), (0, 0), (0, num_tokens), (0, 0))
    return cache._replace(
        layers=jax.tree.map(lambda x: jnp.pad(x, padding), cache.layers)
    )


class Decoder(nn.Module):
    """Embeddings, layers, a norm and the head.

    Attributes:
      config: The architecture.
    """

    config: DecoderConfig

    def setup(self) -> None:
        """Makes the submodules; their names are those of the parameters."""
        config = self.config
        table = functools.partial(
            nn.Embed, features=config.width, embedding_init=KERNEL_INIT
        )
        self.embedding = table(config.vocabulary_size)
        if config.learned_positions:
            self.position_embedding = table(config.max_positions)
        self.layers = [Layer(config, i) for i in range(config.num_layers)]
        self.final_norm = _norm(config)
        if not config.tied_head:
            self.head = nn.Dense(
                config.vocabulary_size,
                use_bias=config.head_bias,
                kernel_init=KERNEL_INIT,
            )

    def __call__(self, tokens_BxT: jax.Array) -> jax.Array:
        """Returns logits_BxTxV, f32; those at t are of the token at t + 1.

        An id outside the vocabulary makes all of its sequence NaN.

        Raises:
          UsageError: More than `max_positions` tokens.
        """
        return self.logits(self.hidden(tokens_BxT))

    def hidden(self, tokens_BxT: jax.Array) -> jax.Array:
        """What the head reads: the residual stream after the last norm, f32[B, T, D].

        Raises:
          UsageError: More than `max_positions` tokens.
        """
        _expect_at_most("tokens", tokens_BxT.shape[1], self.config.max_positions)
        start = jnp.zeros((), jnp.int32)
        nothing = (None,) * self.config.num_layers
        x_BxTxD, _ = self._run(tokens_BxT, start, nothing, nothing)
        return x_BxTxD

    def logits(self, x_BxSxD: jax.Array) -> jax.Array:
        """The head, f32[B, S, V], for as many positions as are asked for."""
        if self.config.tied_head:
            return self.embedding.attend(x_BxSxD)
        return self.head(x_BxSxD)

    def extend(
        self, tokens_BxS: jax.Array, cache: Cache, prompts: Cache | None = None
    ) -> tuple[jax.Array, Cache]:
        """Appends S tokens to those in the cache.

        Args:
          tokens_BxS: One token or many, a whole prompt for example.
          cache: From `init_cache` or from the last call.
          prompts: A full cache of P prompts, which the tokens in `cache` continue: rows
            0 to B/P - 1 the first prompt, and so on. However many continuations there
            are, this cache is kept once and read as it is.

        Returns:
          What `hidden` returns, for these S tokens, and the cache with them. Tokens
          beyond the cache's length would overwrite others, so then all is NaN, as it is
          if the cache of the prompts is not full.

        Raises:
          UsageError: S alone exceeds the cache's length, or prompts and cache exceed
            the positions there are.
        """
        length, num_tokens = _length(cache), tokens_BxS.shape[1]
        _expect_at_most("tokens in a cache", num_tokens, length)
        end = cache.position + num_tokens
        is_valid = end <= length
        context = 0
        shared: tuple[KeysValues | None, ...] = (None,) * self.config.num_layers
        if prompts is not None:
            context, shared = _length(prompts), prompts.layers
            _expect_at_most(
                "tokens of prompt and cache",
                context + length,
                self.config.max_positions,
            )
            is_valid &= prompts.position == context
        x_BxSxD, layers = self._run(
            tokens_BxS, context + cache.position, cache.layers, shared
        )
        return jnp.where(is_valid, x_BxSxD, jnp.nan), Cache(end, layers)

    @nn.nowrap
    def init_cache(self, batch_size: int, length: int) -> Cache:
        """An empty cache for `length` tokens of each of `batch_size` sequences.

        Raises:
          UsageError: `length` is more than `max_positions`.
        """
        config = self.config
        _expect_at_most("tokens in a cache", length, config.max_positions)
        shape = (batch_size, config.num_heads, length, config.head_dim)
        layers = tuple(
            KeysValues(jnp.zeros(shape), jnp.zeros(shape))
            for _ in range(config.num_layers)
        )
        return Cache(jnp.zeros((), jnp.int32), layers)

    def _run(
        self,
        tokens_BxS: jax.Array,
        start: jax.Array,
        cached: tuple[KeysValues | None, ...],
        prompts: tuple[KeysValues | None, ...],
    ) -> tuple[jax.Array, tuple[KeysValues, ...]]:
        config = self.config
        positions_S = start + jnp.arange(tokens_BxS.shape[1])
        # Ids beyond the table give NaN, but negative ones would count from its end.
        ids_BxS = jnp.asarray(tokens_BxS, jnp.int32)
        ids_BxS = jnp.where(ids_BxS < 0, config.vocabulary_size, ids_BxS)
        x_BxSxD = self.embedding(ids_BxS)
        if config.learned_positions:
            x_BxSxD = x_BxSxD + self.position_embedding(positions_S)[None]
        turn = None
        if config.rotary != "none":
            turn = rotation(positions_S, config.rotary_dim, config.rotary_base)
        extended = []
        for layer, before, prompt in zip(self.layers, cached, prompts, strict=True):
            x_BxSxD, after = layer(x_BxSxD, positions_S, turn, before, prompt)
            extended.append(after)
        return self.final_norm(x_BxSxD), tuple(extended)


class Layer(nn.Module):
    """Attention and an MLP, each added to the residual stream.

    Attributes:
      config: The model's architecture.
      layer: Which layer this is, from 0.
    """

    config: DecoderConfig
    layer: int

    def setup(self) -> None:
        """Makes the submodules; their names are those of the parameters."""
        config = self.config
        self.attention_norm = _norm(config)
        self.attention = Attention(config, self.layer)
        if config.residual != "parallel_one_norm":
            self.mlp_norm = _norm(config)
        self.mlp_input = nn.Dense(config.feed_forward, kernel_init=KERNEL_INIT)
        self.mlp_output = nn.Dense(
            config.width, kernel_init=residual_init(config.num_layers)
        )

    def __call__(
        self,
        x_BxSxD: jax.Array,
        positions_S: jax.Array,
        rotation: Rotation | None,
        cached: KeysValues | None,
        prompt: KeysValues | None,
    ) -> tuple[jax.Array, KeysValues]:
        """Takes what `Attention` takes; returns f32[B, S, D] and the cache."""
        normed_BxSxD = self.attention_norm(x_BxSxD)
        attended_BxSxD, cached = self.attention(
            normed_BxSxD, positions_S, rotation, cached, prompt
        )
        if self.config.residual == "sequential":
            x_BxSxD = x_BxSxD + attended_BxSxD
            return x_BxSxD + self._mlp(self.mlp_norm(x_BxSxD)), cached
        if self.config.residual == "parallel_two_norms":
            normed_BxSxD = self.mlp_norm(x_BxSxD)
        return x_BxSxD + attended_BxSxD + self._mlp(normed_BxSxD), cached

    def _mlp(self, x_BxSxD: jax.Array) -> jax.Array:
        activation = ACTIVATIONS[self.config.activation]
        return self.mlp_output(activation(self.mlp_input(x_BxSxD)))


def _norm(config: DecoderConfig) -> nn.LayerNorm:
    # The mean of squares less the square of the mean loses digits where the mean is
    # large, as it is in a trained residual stream.
    return nn.LayerNorm(epsilon=config.layer_norm_epsilon, use_fast_variance=False)


def _length(cache: Cache) -> int:
    return cache.layers[0].keys_BxHxLxK.shape[2]


def _expect_at_most(what: str, given: int, limit: int) -> None:
    if given > limit:
        raise UsageError(
            f"{given} {what}, expected at most {limit}, the positions there are: "
            "shorten the sequence"
        )
