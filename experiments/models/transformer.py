"""The Transformer encoder of Lee & Kifer 2021, a classifier of token sequences.

With the defaults and two classes it has 483,002 trainable parameters, as the paper's
code has, and 482,600 more per further layer. Differences from that code:

- Its residual branches are added to the branch's own output, so that nothing is
  skipped; here they are added to the input (Vaswani et al. 2017, arXiv 1706.03762, with
  the normalisation after the sum).
- Its embeddings are GloVe vectors, which have to be downloaded. Here each entry is a
  standard normal number, drawn once from a public seed: a constant, as GloVe is. With
  `embeddings=trained` the table is a parameter that starts there.
- It has dropout of 0.1. Here there is none: the noise of private training is
  regularisation enough, and inputs then determine the loss.
- The padding id 0 is masked: it is not attended to, and the mean over positions leaves
  it out. The paper's code averages over padding too.

Two options change memory and compile time alone, neither the logits nor the number of
parameters. With `scan=true` the layers are one loop over stacked parameters, `layers`
in place of `layer_0`, `layer_1`, ...: the program holds one layer however many there
are. With `remat=true` each layer keeps its input alone for the backward pass, which
computes the layer again. On a CPU remat takes `scan=true` as well: among layers one
after another, XLA finds that what is computed again equals what was computed before
(common subexpression elimination) and keeps the first; across the two loops of a scan
it cannot.
"""

import math
from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from experiments.data.tokenizer import PADDING_ID, VOCABULARY_SIZE

EMBEDDING_SEED = 0
Embeddings = Literal["frozen", "trained"]


class Transformer(nn.Module):
    """Embeddings and positions, encoder layers, the mean over tokens, a dense layer.

    Attributes:
      num_classes: Width of the output.
      layers: Encoder layers.
      width: Of the embeddings and the residual stream.
      heads: Attention heads; they divide the width.
      feed_forward: Width of the hidden layer in each encoder layer.
      vocabulary_size: Token ids lie in [0, vocabulary_size), 0 being padding.
      embeddings: `frozen` random vectors, or `trained` ones.
      scan: Whether the layers are one loop, their parameters stacked along axis 0.
      remat: Whether the backward pass computes each layer again from its input.
    """

    num_classes: int
    layers: int = 1
    width: int = 200
    heads: int = 8
    feed_forward: int = 800
    vocabulary_size: int = VOCABULARY_SIZE
    embeddings: Embeddings = "frozen"
    scan: bool = False
    remat: bool = False

    @nn.compact
    def __call__(self, ids_BxT: jax.Array) -> jax.Array:
        """Returns logits_BxV."""
        is_token_BxT = ids_BxT != PADDING_ID
        x_BxTxD = self._embedded(ids_BxT)
        x_BxTxD = x_BxTxD + jnp.asarray(positions(ids_BxT.shape[1], self.width))[None]
        x_BxTxD = self._encoded(x_BxTxD, is_token_BxT)
        x_BxTxD = jnp.where(is_token_BxT[..., None], x_BxTxD, 0)
        counts_B = jnp.sum(is_token_BxT, axis=1)
        mean_BxD = x_BxTxD.sum(axis=1) / jnp.maximum(counts_B, 1)[:, None]
        return nn.Dense(self.num_classes, name="head")(mean_BxD)

    def _embedded(self, ids_BxT: jax.Array) -> jax.Array:
        table_VxD = random_embeddings(self.vocabulary_size, self.width)
        if self.embeddings == "trained":
            trained_VxD = self.param("embedding", lambda _: jnp.asarray(table_VxD))
            return trained_VxD[ids_BxT]
        return jnp.asarray(table_VxD)[ids_BxT]

    def _encoded(self, x_BxTxD: jax.Array, is_token_BxT: jax.Array) -> jax.Array:
        encoder_layer = EncoderLayer
        if self.remat:
            # A scan needs no barriers against common subexpressions.
            encoder_layer = nn.remat(EncoderLayer, prevent_cse=not self.scan)
        if not self.scan:
            for i in range(self.layers):
                layer = encoder_layer(self.heads, self.feed_forward, name=f"layer_{i}")
                x_BxTxD = layer(x_BxTxD, is_token_BxT)
            return x_BxTxD

        def step(
            layer: nn.Module, x_BxTxD: jax.Array, is_token_BxT: jax.Array
        ) -> tuple[jax.Array, None]:
            return layer(x_BxTxD, is_token_BxT), None

        scanned = nn.scan(
            step,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=nn.broadcast,
            length=self.layers,
        )
        layers = encoder_layer(self.heads, self.feed_forward, name="layers")
        return scanned(layers, x_BxTxD, is_token_BxT)[0]


class EncoderLayer(nn.Module):
    """Self-attention and two dense layers, each added to its input and normalised.

    Attributes:
      heads: Attention heads.
      feed_forward: Width of the hidden layer.
    """

    heads: int
    feed_forward: int

    @nn.compact
    def __call__(self, x_BxTxD: jax.Array, is_token_BxT: jax.Array) -> jax.Array:
        """Returns f32[B, T, D]."""
        width = x_BxTxD.shape[-1]
        attended_BxTxD = self._attention(x_BxTxD, is_token_BxT)
        x_BxTxD = nn.LayerNorm(name="attention_norm")(x_BxTxD + attended_BxTxD)
        hidden_BxTxF = nn.relu(nn.Dense(self.feed_forward, name="hidden")(x_BxTxD))
        output_BxTxD = nn.Dense(width, name="output")(hidden_BxTxF)
        return nn.LayerNorm(name="output_norm")(x_BxTxD + output_BxTxD)

    def _attention(self, x_BxTxD: jax.Array, is_token_BxT: jax.Array) -> jax.Array:
        batch_size, length, width = x_BxTxD.shape
        size = width // self.heads
        # One product for queries, keys and values of all heads.
        qkv = nn.Dense(3 * width, name="qkv")(x_BxTxD)
        qkv = qkv.reshape(batch_size, length, 3, self.heads, size)
        q_BxTxHxK, k_BxTxHxK, v_BxTxHxK = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
        scores_BxHxTxS = jnp.einsum("bthk,bshk->bhts", q_BxTxHxK, k_BxTxHxK)
        scores_BxHxTxS = jnp.where(
            is_token_BxT[:, None, None, :],
            scores_BxHxTxS / math.sqrt(size),
            jnp.finfo(scores_BxHxTxS.dtype).min,
        )
        weights_BxHxTxS = nn.softmax(scores_BxHxTxS)
        mixed_BxTxHxK = jnp.einsum("bhts,bshk->bthk", weights_BxHxTxS, v_BxTxHxK)
        mixed_BxTxD = mixed_BxTxHxK.reshape(batch_size, length, width)
        return nn.Dense(width, name="projection")(mixed_BxTxD)


def positions(length: int, width: int) -> np.ndarray:
    """Sines and cosines of geometrically spaced frequencies, f32[length, width].

    Entry (t, 2i) is sin(t / 10000^(2i / width)), entry (t, 2i + 1) its cosine (Vaswani
    et al. 2017).

    Example:
      >>> positions(2, 2).round(2).tolist()
      [[0.0, 1.0], [0.8399999737739563, 0.5400000214576721]]
    """
    exponents_K = np.arange(0, width, 2) / width
    angles_TxK = np.arange(length)[:, None] / 10_000.0 ** exponents_K[None]
    waves_TxKx2 = np.stack([np.sin(angles_TxK), np.cos(angles_TxK)], axis=-1)
    return waves_TxKx2.reshape(length, -1)[:, :width].astype(np.float32)


def random_embeddings(vocabulary_size: int, width: int) -> np.ndarray:
    """A public random table of standard normal numbers, f32[vocabulary_size, width]."""
    generator = np.random.default_rng(EMBEDDING_SEED)
    return generator.standard_normal((vocabulary_size, width), np.float32)


def transformer(
    input_shape: tuple[int],
    num_classes: int,
    *,
    layers: int = 1,
    width: int = 200,
    heads: int = 8,
    feed_forward: int | None = None,
    vocabulary_size: int = VOCABULARY_SIZE,
    embeddings: Embeddings = "frozen",
    scan: bool = False,
    remat: bool = False,
) -> Transformer:
    """The Transformer of Lee & Kifer 2021; `feed_forward` is 4 * `width` by default.

    Raises:
      ValueError: The heads do not divide the width.
    """
    del input_shape
    if width % heads:
        raise ValueError(f"heads={heads} does not divide width={width}")
    return Transformer(
        num_classes,
        layers,
        width,
        heads,
        feed_forward or 4 * width,
        vocabulary_size,
        embeddings,
        scan,
        remat,
    )
