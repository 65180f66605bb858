"""What a T5 encoder-decoder is made of (Raffel et al. 2020, arXiv 1910.10683)."""

import dataclasses
from typing import ClassVar, Literal

from experiments.models.sentinels import T5_SENTINELS, Sentinels

Activation = Literal["gated_gelu", "relu"]

# Padding, </s> and the sentinels.
NUM_OWN_TOKENS = 2 + T5_SENTINELS.number


@dataclasses.dataclass(frozen=True)
class T5Config:
    """The architecture of one model: T5 v1.1, or the first T5.

    Attributes:
      vocabulary_size: Rows of the embedding and columns of the head. May exceed the
        tokenizer's entries: published checkpoints have 32,128 rows for 32,100 tokens.
      num_layers: Layers of the encoder.
      num_decoder_layers: Layers of the decoder.
      width: Size of the residual stream.
      num_heads: Attention heads.
      head_dim: Size of one head's queries, keys and values; heads need not fill the
        width.
      feed_forward: Width of the hidden layer in each block.
      activation: `gated_gelu` (v1.1): gelu(x W) * (x V), with the tanh approximation
        (Shazeer 2020, arXiv 2002.05202); `relu` (the first T5): relu(x W).
      tied_head: Whether the head is the embedding table, which then reads the stream
        times width^-0.5: so in the first T5, but not in v1.1.
      num_buckets: Rows of the table of position biases.
      max_distance: From this distance on, all share the last bucket.
      layer_norm_epsilon: Added to the mean square.
      pad_id: The token that other programs fill up sequences with; it masks nothing.
      eos_id: The token that ends inputs and targets.
      start_id: What the decoder reads before the first target.
      sentinels: The tokens that stand for blanks, which the architecture does not
        depend on: a T5 of another vocabulary than the published one has its own.
    """

    family: ClassVar[str] = "t5"

    vocabulary_size: int
    num_layers: int
    num_decoder_layers: int
    width: int
    num_heads: int
    head_dim: int
    feed_forward: int
    activation: Activation
    tied_head: bool
    num_buckets: int = 32
    max_distance: int = 128
    layer_norm_epsilon: float = 1e-6
    pad_id: int = 0
    eos_id: int = 1
    start_id: int = 0
    sentinels: Sentinels = T5_SENTINELS

    def __post_init__(self) -> None:
        """Raises `ValueError` about sizes that do not fit each other."""
        if self.num_buckets < 4:
            raise ValueError(f"{self.num_buckets} position buckets, expected 4 or more")
        if self.max_distance <= self.num_buckets // 2:
            raise ValueError(
                f"positions share a bucket from distance {self.max_distance} on, "
                f"expected more than half of the {self.num_buckets} buckets"
            )
        for name in ("pad_id", "eos_id", "start_id"):
            token = getattr(self, name)
            if not 0 <= token < self.vocabulary_size:
                raise ValueError(
                    f"{name}={token} is not one of the {self.vocabulary_size} tokens"
                )


def t5_v1_1(
    vocabulary_size: int,
    *,
    layers: int = 12,
    width: int = 768,
    heads: int = 12,
    head_dim: int = 64,
    feed_forward: int = 2048,
) -> T5Config:
    """T5 v1.1 with equally many layers in both halves; the defaults are those of base.

    Example:
      >>> t5_v1_1(32_128).num_decoder_layers
      12
    """
    return T5Config(
        vocabulary_size=vocabulary_size,
        num_layers=layers,
        num_decoder_layers=layers,
        width=width,
        num_heads=heads,
        head_dim=head_dim,
        feed_forward=feed_forward,
        activation="gated_gelu",
        tied_head=False,
    )


def for_a_corpus(config: T5Config) -> T5Config:
    """Makes the last `NUM_OWN_TOKENS` ids of the vocabulary T5's own, and no others.

    In this order they are the padding, with which the decoder starts too, </s> and the
    sentinels, of which the last id is the first, as in T5's own vocabulary. All ids
    below are those of a corpus. So what separates its documents is a token like any
    other.

    Args:
      config: With a vocabulary of both.

    Example:
      >>> config = for_a_corpus(t5_v1_1(2048 + NUM_OWN_TOKENS))
      >>> config.vocabulary_size, config.pad_id, config.eos_id, config.sentinels
      (2150, 2048, 2049, Sentinels(first=2149, number=100))
    """
    last = config.vocabulary_size - 1
    pad_id = config.vocabulary_size - NUM_OWN_TOKENS
    return dataclasses.replace(
        config,
        pad_id=pad_id,
        eos_id=pad_id + 1,
        start_id=pad_id,
        sentinels=Sentinels(first=last, number=T5_SENTINELS.number),
    )
