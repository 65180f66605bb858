"""What a model is trained to predict of the crops that visit the corpus.

- `NextToken`, of decoder-only models: each token, given those before it.
- `SpanCorruption`, of T5: the dropped tokens of a crop, given the others (Raffel et al.
  2020, arXiv 1910.10683, section 3.1.4). Blanks are drawn anew at each visit.

An objective makes a batch of crops, on the host, and gives the loss on it, on the
device. What a batch holds is a function of the seed and of the crops' place in the
training, so a run that is continued takes the batches that it would have taken.
"""

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.extraction import infilling, span_corruption
from experiments.extraction.lm_config import LmConfig
from experiments.extraction.span_corruption import Masking
from experiments.models import t5_start
from experiments.models.decoder import Decoder
from experiments.models.language_models import Model
from experiments.models.t5 import T5
from experiments.typed_config import expect

# A pytree of arrays whose first axis is B, the sequences of the batch.
Batch = Any


class Objective(Protocol):
    """What the loop knows of an objective."""

    @property
    def model(self) -> Model:
        """What is trained."""

    def start(self, variables: Any) -> Any:
        """What training starts from, made of the model's random variables."""

    def batch(self, tokens_BxL: np.ndarray, first_crop: int) -> Batch:
        """What a step needs of its crops.

        Args:
          tokens_BxL: i32[B, T + 1]: `sequence_length` tokens and the next one.
          first_crop: How many crops the training has visited before these.

        Returns:
          Arrays, of shapes that are the same in all steps.
        """

    def arguments(self, batch: Batch) -> tuple[jax.Array, ...]:
        """What `model.apply` takes beside the parameters."""

    def loss(self, params: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Sum of the cross-entropies in nats, f32[], and how many there are, f32[]."""

    def derived(self) -> dict[str, Any]:
        """What config.json says about it."""


@dataclasses.dataclass(frozen=True)
class NextToken:
    """Each token but a crop's first, given those before it.

    Attributes:
      model: A decoder-only model, or what else maps tokens_BxT to logits_BxTxV.
    """

    model: Decoder

    def start(self, variables: Any) -> Any:
        """Training starts from the variables as they are."""
        return variables

    def batch(self, tokens_BxL: np.ndarray, first_crop: int) -> np.ndarray:
        """The crops themselves."""
        del first_crop
        return tokens_BxL

    def arguments(self, batch: Batch) -> tuple[jax.Array, ...]:
        """All tokens but the last."""
        return (batch[:, :-1],)

    def loss(self, params: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Sum of the cross-entropies in nats, f32[], and how many there are, f32[]."""
        targets_BxT = batch[:, 1:]
        logits_BxTxV = self.model.apply(params, *self.arguments(batch))
        losses_BxT = optax.softmax_cross_entropy_with_integer_labels(
            logits_BxTxV, targets_BxT
        )
        return losses_BxT.sum(), jnp.float32(targets_BxT.size)

    def derived(self) -> dict[str, Any]:
        """What config.json says about it."""
        return {"max_positions": self.model.config.max_positions}


@dataclasses.dataclass(frozen=True)
class SpanCorruption:
    """15 % of a crop's tokens, given the others and where tokens are dropped.

    The targets are those that a perfect infilling is judged by: the dropped tokens, the
    sentinel of each blank and what ends the last one. The loss is the mean over them,
    whichever crop of the batch they are of.

    Attributes:
      model: A T5.
      masking: How tokens are dropped, see `experiments.extraction.span_corruption`.
      seed: Of the blanks.
    """

    model: T5
    masking: Masking
    seed: int

    def start(self, variables: Any) -> Any:
        """Training starts from variables that find blanks; see t5_start.py."""
        return t5_start.with_lookup(variables, self.model.config)

    def batch(self, tokens_BxL: np.ndarray, first_crop: int) -> infilling.Batch:
        """Crops with blanks, and what fills them, filled up to common lengths."""
        # The token after a crop is the first of the next one.
        tokens_BxT = tokens_BxL[:, :-1]
        config = self.model.config
        return infilling.make_blanks(
            tokens_BxT,
            range(first_crop, first_crop + len(tokens_BxT)),
            seed=self.seed,
            masking=self.masking,
            sentinels=config.sentinels,
            eos_id=config.eos_id,
            pad_id=config.pad_id,
        )

    def arguments(self, batch: infilling.Batch) -> tuple[jax.Array, ...]:
        """Inputs, targets, and which of the inputs are there."""
        inputs_BxS, targets_BxT = batch.inputs_NxS, batch.targets_NxT
        seen_BxS = _first(batch.num_inputs_N, inputs_BxS.shape[1])
        return jnp.asarray(inputs_BxS), jnp.asarray(targets_BxT), seen_BxS

    def loss(self, params: Any, batch: infilling.Batch) -> tuple[jax.Array, jax.Array]:
        """Sum of the cross-entropies in nats, f32[], and how many there are, f32[]."""
        targets_BxT = batch.targets_NxT
        counts_BxT = _first(batch.num_targets_N, targets_BxT.shape[1])
        logits_BxTxV = self.model.apply(params, *self.arguments(batch))
        losses_BxT = optax.softmax_cross_entropy_with_integer_labels(
            logits_BxTxV, targets_BxT
        )
        total = jnp.where(counts_BxT, losses_BxT, 0.0).sum()
        return total, counts_BxT.sum(dtype=jnp.float32)

    def derived(self) -> dict[str, Any]:
        """What config.json says about it."""
        return {"masking": self.masking}


def of(config: LmConfig, model: Model) -> Objective:
    """The objective of a model's family.

    Raises:
      UsageError: A key of the config that this family does not have, or sequences that
        have more blanks than the model can name.
    """
    if isinstance(model, Decoder):
        no_masking = f"None for a {model.config.family}, which is trained on all tokens"
        expect(config, "masking", config.masking is None, no_masking)
        return NextToken(model)
    no_limit = "None for a t5, whose positions have no limit"
    expect(config, "max_positions", config.max_positions is None, no_limit)
    masking: Masking = "iid" if config.masking == "iid" else "spans"
    expect(config, "sequence_length", config.sequence_length >= 2, "2 or more for a t5")
    blanks = span_corruption.most_blanks(masking, config.sequence_length)
    number = model.config.sentinels.number
    # What ends the last blank takes one more.
    expected = f"so few that {number - 1} blanks can be made of it, not {blanks}"
    expect(config, "sequence_length", blanks < number, expected)
    return SpanCorruption(model, masking, config.seed)


def _first(numbers_B: jax.Array | np.ndarray, length: int) -> jax.Array:
    """bool[B, length], true at the first so many places of each row."""
    return jnp.arange(length)[None] < numbers_B[:, None]
