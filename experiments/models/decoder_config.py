"""What a decoder-only language model is made of: the one place where families differ.

- gpt2: learned positions; attention, then the MLP; biases; the head is the embedding.
- gpt_neo: the same, but attention is not scaled, every other layer sees the last 256
  tokens alone, and queries, keys and values have no bias.
- gpt_j: interleaved rotary positions; attention and MLP side by side behind one norm;
  no biases in attention; a head of its own, with a bias.
- gpt_neox (Pythia too): half-split rotary positions; attention and MLP side by side,
  each behind its own norm; biases; a head of its own, without.
"""

import dataclasses
from typing import Literal

Family = Literal["gpt2", "gpt_neo", "gpt_j", "gpt_neox"]
Rotary = Literal["none", "interleaved", "half_split"]
Residual = Literal["sequential", "parallel_one_norm", "parallel_two_norms"]

ROTARY_BASE = 10_000.0
LAYER_NORM_EPSILON = 1e-5


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """The architecture of one model.

    Attributes:
      family: Decides the names and layouts in a checkpoint folder, nothing else.
      vocabulary_size: Rows of the embedding and columns of the head. May exceed the
        tokenizer's entries: published checkpoints are padded.
      max_positions: Longest sequence.
      num_layers: Number of layers.
      width: Size of the residual stream.
      num_heads: Attention heads; they divide the width.
      feed_forward: Width of the hidden layer in each block.
      activation: `gelu` (exact) or one of the names of its tanh approximation, such as
        `gelu_new`; see `experiments.models.decoder.ACTIVATIONS`.
      residual: `sequential`: x + attention, then + MLP of the sum. `parallel_*`: both
        read x, through one norm or through one each.
      learned_positions: Whether a table of positions is added to the embeddings.
      rotary: How queries and keys are rotated by their position; see
        `experiments.models.rotary`.
      rotary_dim: Leading dimensions of each head that are rotated; even.
      rotary_base: Wavelengths are 2 pi rotary_base^(2i / rotary_dim).
      windows: Per layer, how many tokens are attended to, the own included; None: all.
      scale_attention: Whether scores are divided by sqrt(head_dim).
      scale_attention_by_layer: Whether scores of layer i are divided by i + 1 too.
      qkv_bias: Whether queries, keys and values have a bias.
      attention_output_bias: Whether the projection after attention has one.
      tied_head: Whether the head is the embedding table.
      head_bias: Whether the head has a bias.
      layer_norm_epsilon: Added to the variance.
      bos_id: Token that starts a text, if there is one.
      eos_id: Token that ends a text, if there is one.
    """

    family: Family
    vocabulary_size: int
    max_positions: int
    num_layers: int
    width: int
    num_heads: int
    feed_forward: int
    activation: str
    residual: Residual
    learned_positions: bool
    rotary: Rotary
    rotary_dim: int
    rotary_base: float
    windows: tuple[int | None, ...]
    scale_attention: bool
    scale_attention_by_layer: bool
    qkv_bias: bool
    attention_output_bias: bool
    tied_head: bool
    head_bias: bool
    layer_norm_epsilon: float = LAYER_NORM_EPSILON
    bos_id: int | None = None
    eos_id: int | None = None

    def __post_init__(self) -> None:
        """Raises `ValueError` about sizes that do not fit each other."""
        if self.width % self.num_heads:
            raise ValueError(
                f"heads={self.num_heads} does not divide width={self.width}"
            )
        if self.rotary != "none" and (
            self.rotary_dim % 2 or not 2 <= self.rotary_dim <= self.head_dim
        ):
            raise ValueError(
                f"rotary_dim={self.rotary_dim} is not an even number from 2 to "
                f"{self.head_dim}, the size of a head"
            )
        if len(self.windows) != self.num_layers:
            raise ValueError(
                f"{len(self.windows)} layers are said to be global or local, but there "
                f"are {self.num_layers}"
            )

    @property
    def head_dim(self) -> int:
        """Size of one head's queries, keys and values."""
        return self.width // self.num_heads


def gpt2(
    vocabulary_size: int,
    max_positions: int,
    *,
    layers: int = 12,
    width: int = 768,
    heads: int = 12,
    feed_forward: int | None = None,
) -> DecoderConfig:
    """GPT-2 (Radford et al. 2019); by default of the size of the smallest, 124M."""
    return DecoderConfig(
        family="gpt2",
        vocabulary_size=vocabulary_size,
        max_positions=max_positions,
        num_layers=layers,
        width=width,
        num_heads=heads,
        feed_forward=feed_forward or 4 * width,
        activation="gelu_new",
        residual="sequential",
        learned_positions=True,
        rotary="none",
        rotary_dim=0,
        rotary_base=ROTARY_BASE,
        windows=(None,) * layers,
        scale_attention=True,
        scale_attention_by_layer=False,
        qkv_bias=True,
        attention_output_bias=True,
        tied_head=True,
        head_bias=False,
    )


def gpt_neo(
    vocabulary_size: int,
    max_positions: int,
    *,
    layers: int = 12,
    width: int = 768,
    heads: int = 12,
    feed_forward: int | None = None,
    window: int = 256,
) -> DecoderConfig:
    """GPT-Neo (Black et al. 2021): global and local layers take turns."""
    return dataclasses.replace(
        gpt2(
            vocabulary_size,
            max_positions,
            layers=layers,
            width=width,
            heads=heads,
            feed_forward=feed_forward,
        ),
        family="gpt_neo",
        windows=tuple(window if i % 2 else None for i in range(layers)),
        scale_attention=False,
        qkv_bias=False,
    )


def gpt_j(
    vocabulary_size: int,
    max_positions: int,
    *,
    layers: int = 12,
    width: int = 768,
    heads: int = 12,
    feed_forward: int | None = None,
    rotary_dim: int | None = None,
) -> DecoderConfig:
    """GPT-J (Wang & Komatsuzaki 2021); a quarter of each head is rotated by default."""
    return DecoderConfig(
        family="gpt_j",
        vocabulary_size=vocabulary_size,
        max_positions=max_positions,
        num_layers=layers,
        width=width,
        num_heads=heads,
        feed_forward=feed_forward or 4 * width,
        activation="gelu_new",
        residual="parallel_one_norm",
        learned_positions=False,
        rotary="interleaved",
        rotary_dim=rotary_dim or _quarter(width // heads),
        rotary_base=ROTARY_BASE,
        windows=(None,) * layers,
        scale_attention=True,
        scale_attention_by_layer=False,
        qkv_bias=False,
        attention_output_bias=False,
        tied_head=False,
        head_bias=True,
    )


def gpt_neox(
    vocabulary_size: int,
    max_positions: int,
    *,
    layers: int = 12,
    width: int = 768,
    heads: int = 12,
    feed_forward: int | None = None,
    rotary_dim: int | None = None,
) -> DecoderConfig:
    """GPT-NeoX (Black et al. 2022) and Pythia (Biderman et al. 2023)."""
    return dataclasses.replace(
        gpt_j(
            vocabulary_size,
            max_positions,
            layers=layers,
            width=width,
            heads=heads,
            feed_forward=feed_forward,
            rotary_dim=rotary_dim,
        ),
        family="gpt_neox",
        activation="gelu",
        residual="parallel_two_norms",
        rotary="half_split",
        qkv_bias=True,
        attention_output_bias=True,
        head_bias=False,
    )


def _quarter(head_dim: int) -> int:
    """The even number at or below a quarter of `head_dim`, at least 2."""
    return max(2, head_dim // 8 * 2)
