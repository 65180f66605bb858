"""What a language model's training config means, settled before the first step."""

import dataclasses
from typing import Any

import jax
import numpy as np
import optax

from experiments import models, seeds
from experiments.errors import UsageError
from experiments.extraction import lm_batches, lm_objectives, lm_step
from experiments.extraction.corpus import Corpus
from experiments.extraction.lm_config import LmConfig
from experiments.extraction.lm_objectives import Objective
from experiments.models import registry
from experiments.models.language_models import Model


@dataclasses.dataclass(frozen=True)
class LmPlan:
    """A run.

    Attributes:
      config: As the user gave it.
      corpus: The tokens.
      objective: What the model is trained to predict of them.
      num_parameters: Scalars in the model.
    """

    config: LmConfig
    corpus: Corpus
    objective: Objective
    num_parameters: int

    @property
    def model(self) -> Model:
        """The language model."""
        return self.objective.model

    @property
    def warmup_steps(self) -> int:
        """As configured, or by default a tenth of the steps, at most 100."""
        if self.config.warmup_steps is None:
            return min(100, self.config.num_steps // 10)
        return self.config.warmup_steps

    @property
    def microbatch_size(self) -> int:
        """As configured, or what suits the device."""
        config = self.config
        return config.microbatch_size or lm_step.default_microbatch_size(
            config.batch_size, config.sequence_length, jax.default_backend()
        )

    @property
    def crops_per_epoch(self) -> int:
        """Sequences that visit the corpus once."""
        return lm_batches.crops_per_epoch(
            len(self.corpus.tokens_N), self.config.sequence_length
        )

    def epoch(self, step: int) -> float:
        """How often `step` steps have visited the corpus."""
        return step * self.config.batch_size / self.crops_per_epoch

    def init_params(self) -> Any:
        """The model's variables before the first step."""
        key = seeds.key(self.config.seed, seeds.Stream.PARAMETERS)
        variables = jax.jit(self.model.init)(
            key, *_arguments(self.config, self.objective)
        )
        return self.objective.start(variables)

    def learning_rates(self) -> optax.Schedule:
        """Of each step, counted from 0."""
        config = self.config
        return lm_step.learning_rates(
            config.learning_rate, self.warmup_steps, config.num_steps
        )

    def optimizer(self) -> optax.GradientTransformation:
        """With all settings of the config."""
        return lm_step.adamw(
            self.learning_rates(),
            weight_decay=self.config.weight_decay,
            gradient_clip_norm=self.config.gradient_clip_norm,
        )

    def derived(self) -> dict[str, Any]:
        """What config.json says beside the config: a changed corpus changes it."""
        corpus = self.corpus
        return {
            "corpus_sha256": corpus.sha256,
            "num_tokens": len(corpus.tokens_N),
            "eos_id": corpus.eos_id,
            "vocabulary_size": corpus.vocabulary_size,
            "tokenizer_fingerprint": corpus.tokenizer_fingerprint,
            **self.objective.derived(),
            "num_parameters": self.num_parameters,
            "warmup_steps": self.warmup_steps,
            "crops_per_epoch": self.crops_per_epoch,
            "epochs": self.epoch(self.config.num_steps),
        }


def make_objective(
    config: LmConfig, vocabulary_size: int, eos_id: int | None
) -> Objective:
    """The model that `config` asks for, and what it is trained to predict.

    Raises:
      UsageError: There is none.
    """
    model = models.build_language_model(
        config.model,
        vocabulary_size,
        config.max_positions or config.sequence_length,
        eos_id=eos_id,
    )
    return lm_objectives.of(config, model)


def make_plan(config: LmConfig, corpus: Corpus) -> LmPlan:
    """Fits the model to the corpus.

    Raises:
      UsageError: The config asks for something impossible.
    """
    length = config.sequence_length + 1
    if len(corpus.tokens_N) < length:
        raise UsageError(
            f"config.corpus={config.corpus!r} has {len(corpus.tokens_N)} tokens, "
            f"expected at least config.sequence_length + 1 = {length}: give a larger "
            "--config.corpus or lower --config.sequence_length"
        )
    objective = make_objective(config, corpus.vocabulary_size, corpus.eos_id)
    arguments = _arguments(config, objective)
    params = jax.eval_shape(objective.model.init, jax.random.key(0), *arguments)
    return LmPlan(config, corpus, objective, registry.num_parameters(params))


def _arguments(config: LmConfig, objective: Objective) -> tuple[jax.Array, ...]:
    """What the model is applied to, for one sequence of no meaning."""
    tokens_1xL = np.zeros((1, config.sequence_length + 1), np.int32)
    return objective.arguments(objective.batch(tokens_1xL, 0))
