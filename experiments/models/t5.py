"""T5: an encoder that reads inputs, and a decoder that predicts targets from them.

The decoder starts with `start_id` (the id of padding, 0, in published models) and reads
each target after it has predicted it: the model takes the targets as they are and
shifts them right itself. What may be attended to follows from positions and from an
explicit mask, never from token ids: an id that is used for padding elsewhere is an
ordinary token here.

Differences from the language models of `experiments.models.decoder`: norms divide by
the root mean square and have no bias (Zhang & Sennrich 2019, arXiv 1910.07467); no
layer has a bias; scores are not scaled; and positions enter as a number added to each
score, which depends on head and distance, and is the same in all layers of the encoder,
and in all of the decoder.

Names of axes: B sequences, S inputs, T targets, L what is attended to, D width, H
heads, K size of a head, V vocabulary.
"""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from experiments.models import relative_positions
from experiments.models.attention import causal_mask
from experiments.models.t5_config import T5Config


class T5(nn.Module):
    """Embeddings, encoder, decoder and the head.

    Attributes:
      config: The architecture.
    """

    config: T5Config

    def setup(self) -> None:
        """Makes the submodules; their names are those of the parameters."""
        config = self.config
        self.embedding = nn.Embed(
            config.vocabulary_size,
            config.width,
            embedding_init=nn.initializers.normal(1.0),
        )
        self.encoder = Stack(config, is_decoder=False)
        self.decoder = Stack(config, is_decoder=True)
        if not config.tied_head:
            self.head = _dense(config.vocabulary_size, config.width)

    def __call__(
        self,
        inputs_BxS: jax.Array,
        targets_BxT: jax.Array,
        input_mask_BxS: jax.Array | None = None,
    ) -> jax.Array:
        """Predicts each target from the inputs and from the targets before it.

        Args:
          inputs_BxS: Token ids; an id outside the vocabulary makes all of its sequence
            NaN.
          targets_BxT: Token ids, not shifted.
          input_mask_BxS: bool, which inputs are there; None: all. The others do not
            show in the result, whichever tokens of the vocabulary they are, but the
            inputs' positions are counted with them.

        Returns:
          logits_BxTxV, f32; those at t are of the target at t.
        """
        return self.logits(self.hidden(inputs_BxS, targets_BxT, input_mask_BxS))

    def hidden(
        self,
        inputs_BxS: jax.Array,
        targets_BxT: jax.Array,
        input_mask_BxS: jax.Array | None = None,
    ) -> jax.Array:
        """What the head reads, f32[B, T, D]; takes what `__call__` takes."""
        encoded_BxSxD = self.encode(inputs_BxS, input_mask_BxS)
        start_Bx1 = jnp.full_like(targets_BxT[:, :1], self.config.start_id)
        read_BxT = jnp.concatenate([start_Bx1, targets_BxT[:, :-1]], axis=1)
        return self.decoder(self._embed(read_BxT), encoded_BxSxD, input_mask_BxS)

    def encode(
        self, inputs_BxS: jax.Array, input_mask_BxS: jax.Array | None = None
    ) -> jax.Array:
        """What the decoder reads of the inputs, f32[B, S, D]."""
        x_BxSxD = self._embed(inputs_BxS)
        return self.encoder(x_BxSxD, None, input_mask_BxS)

    def logits(self, x_BxTxD: jax.Array) -> jax.Array:
        """The head, f32[B, T, V], for as many positions as are asked for."""
        if self.config.tied_head:
            return self.embedding.attend(x_BxTxD * self.config.width**-0.5)
        return self.head(x_BxTxD)

    def _embed(self, tokens_BxT: jax.Array) -> jax.Array:
        # Ids beyond the table give NaN, but negative ones would count from its end.
        ids_BxT = jnp.asarray(tokens_BxT, jnp.int32)
        ids_BxT = jnp.where(ids_BxT < 0, self.config.vocabulary_size, ids_BxT)
        return self.embedding(ids_BxT)


class Stack(nn.Module):
    """The layers of the encoder or of the decoder.

    Attributes:
      config: The model's architecture.
      is_decoder: Whether a position sees itself and those before it alone, and the
        encoder's output besides.
    """

    config: T5Config
    is_decoder: bool

    def setup(self) -> None:
        """Makes the submodules; their names are those of the parameters."""
        config = self.config
        self.position_bias = nn.Embed(
            config.num_buckets,
            config.num_heads,
            embedding_init=nn.initializers.normal(config.width**-0.5),
        )
        num_layers = config.num_decoder_layers if self.is_decoder else config.num_layers
        self.layers = [Layer(config, self.is_decoder) for _ in range(num_layers)]
        self.final_norm = _norm(config)

    def __call__(
        self,
        x_BxTxD: jax.Array,
        encoded_BxSxD: jax.Array | None,
        input_mask_BxS: jax.Array | None,
    ) -> jax.Array:
        """Runs the layers.

        Args:
          x_BxTxD: Embeddings.
          encoded_BxSxD: The encoder's output; None in the encoder.
          input_mask_BxS: bool, which inputs are there; None: all.

        Returns:
          f32[B, T, D].
        """
        length = x_BxTxD.shape[1]
        distance_TxT = np.arange(length)[None] - np.arange(length)[:, None]
        buckets_TxT = relative_positions.buckets(
            distance_TxT,
            bidirectional=not self.is_decoder,
            num_buckets=self.config.num_buckets,
            max_distance=self.config.max_distance,
        )
        bias_1xHxTxT = jnp.moveaxis(self.position_bias(buckets_TxT), -1, 0)[None]
        input_mask = None
        if input_mask_BxS is not None:
            input_mask = jnp.asarray(input_mask_BxS, bool)[:, None, None]
        own_mask = input_mask
        if self.is_decoder:
            positions_T = jnp.arange(length)
            own_mask = causal_mask(positions_T, positions_T, None)[None, None]
        for layer in self.layers:
            x_BxTxD = layer(x_BxTxD, bias_1xHxTxT, own_mask, encoded_BxSxD, input_mask)
        return self.final_norm(x_BxTxD)


class Layer(nn.Module):
    """Attention, in the decoder to the inputs too, and an MLP, added to the stream.

    Attributes:
      config: The model's architecture.
      is_decoder: Whether it attends to the encoder's output.
    """

    config: T5Config
    is_decoder: bool

    def setup(self) -> None:
        """Makes the submodules; their names are those of the parameters."""
        config = self.config
        self.attention_norm = _norm(config)
        self.attention = Attention(config)
        if self.is_decoder:
            self.cross_attention_norm = _norm(config)
            self.cross_attention = Attention(config)
        self.mlp_norm = _norm(config)
        if config.activation == "gated_gelu":
            self.mlp_gate = _dense(config.feed_forward, config.width)
        self.mlp_input = _dense(config.feed_forward, config.width)
        self.mlp_output = _dense(config.width, config.feed_forward)

    def __call__(
        self,
        x_BxTxD: jax.Array,
        bias_1xHxTxT: jax.Array,
        own_mask: jax.Array | None,
        encoded_BxSxD: jax.Array | None,
        input_mask: jax.Array | None,
    ) -> jax.Array:
        """Masks are bool and broadcast to [B, H, T, L]; returns f32[B, T, D]."""
        normed_BxTxD = self.attention_norm(x_BxTxD)
        x_BxTxD = x_BxTxD + self.attention(
            normed_BxTxD, normed_BxTxD, bias_1xHxTxT, own_mask
        )
        if encoded_BxSxD is not None:
            normed_BxTxD = self.cross_attention_norm(x_BxTxD)
            x_BxTxD = x_BxTxD + self.cross_attention(
                normed_BxTxD, encoded_BxSxD, None, input_mask
            )
        return x_BxTxD + self._mlp(self.mlp_norm(x_BxTxD))

    def _mlp(self, x_BxTxD: jax.Array) -> jax.Array:
        if self.config.activation == "relu":
            return self.mlp_output(nn.relu(self.mlp_input(x_BxTxD)))
        gate_BxTxF = nn.gelu(self.mlp_gate(x_BxTxD), approximate=True)
        return self.mlp_output(gate_BxTxF * self.mlp_input(x_BxTxD))


class Attention(nn.Module):
    """softmax(q k^T + bias) v: scores are not divided by sqrt(head_dim).

    Attributes:
      config: The model's architecture.
    """

    config: T5Config

    @nn.compact
    def __call__(
        self,
        x_BxTxD: jax.Array,
        memory_BxLxD: jax.Array,
        bias_1xHxTxL: jax.Array | None,
        mask: jax.Array | None,
    ) -> jax.Array:
        """Attends from `x_BxTxD` to `memory_BxLxD`; returns f32[B, T, D].

        Args:
          x_BxTxD: Normalised residual stream.
          memory_BxLxD: The same, or the encoder's output.
          bias_1xHxTxL: Added to the scores; None: nothing is.
          mask: bool, broadcasts to [B, H, T, L]; None: all is attended to.
        """
        config = self.config
        inner = config.num_heads * config.head_dim

        def heads(name: str, y_BxLxD: jax.Array, scale: float) -> jax.Array:
            init = nn.initializers.normal(scale * config.width**-0.5)
            y_BxLxP = nn.Dense(inner, use_bias=False, kernel_init=init, name=name)(
                y_BxLxD
            )
            y_BxLxHxK = y_BxLxP.reshape(
                *y_BxLxP.shape[:2], config.num_heads, config.head_dim
            )
            return jnp.swapaxes(y_BxLxHxK, 1, 2)

        # Scores are not scaled, so queries start the smaller.
        q_BxHxTxK = heads("query", x_BxTxD, config.head_dim**-0.5)
        k_BxHxLxK = heads("key", memory_BxLxD, 1.0)
        v_BxHxLxK = heads("value", memory_BxLxD, 1.0)
        scores_BxHxTxL = jnp.einsum("bhtk,bhlk->bhtl", q_BxHxTxK, k_BxHxLxK)
        if bias_1xHxTxL is not None:
            scores_BxHxTxL = scores_BxHxTxL + bias_1xHxTxL
        if mask is not None:
            least = jnp.finfo(scores_BxHxTxL.dtype).min
            scores_BxHxTxL = jnp.where(mask, scores_BxHxTxL, least)
        weights_BxHxTxL = nn.softmax(scores_BxHxTxL)
        mixed_BxHxTxK = jnp.einsum("bhtl,bhlk->bhtk", weights_BxHxTxL, v_BxHxLxK)
        mixed_BxTxP = jnp.swapaxes(mixed_BxHxTxK, 1, 2).reshape(
            *x_BxTxD.shape[:2], inner
        )
        init = nn.initializers.normal(1 / math.sqrt(inner))
        return nn.Dense(config.width, use_bias=False, kernel_init=init, name="output")(
            mixed_BxTxP
        )


def _norm(config: T5Config) -> nn.RMSNorm:
    return nn.RMSNorm(epsilon=config.layer_norm_epsilon)


def _dense(features: int, fan_in: int) -> nn.Dense:
    return nn.Dense(
        features, use_bias=False, kernel_init=nn.initializers.normal(fan_in**-0.5)
    )
