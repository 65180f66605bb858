"""What a config means, settled before the first step."""

import dataclasses
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp

from dpjax import accounting
from dpjax.methods import Method
from experiments import data, seeds
from experiments.dp import optimizers, sampling
from experiments.dp.steps import PrivateStep
from experiments.dp.train_config import TrainConfig
from experiments.errors import UsageError
from experiments.models import registry

NOT_COVERED_BY_EPSILON = ("loss", "train_accuracy", "clipped_fraction")


@dataclasses.dataclass(frozen=True)
class Plan:
    """A run. All of it is public but the examples and `config.seed`.

    Attributes:
      config: As the user gave it.
      dataset: The examples.
      model: The classifier.
      num_parameters: Scalars in it.
      sampling_probability: Of each example, at each step.
      noise_multiplier: Given, or calibrated to the target epsilon.
      physical_batch_size: Examples per compiled call.
    """

    config: TrainConfig
    dataset: data.Dataset
    model: nn.Module
    num_parameters: int
    sampling_probability: float
    noise_multiplier: float
    physical_batch_size: int

    def init_params(self, seed: int) -> Any:
        """The model's variables before the first step."""
        key = seeds.key(seed, seeds.Stream.PARAMETERS)
        return jax.jit(self.model.init)(key, _blank_input(self.dataset))

    def private_step(self, seed: int) -> PrivateStep:
        """The compiled step."""
        config = self.config
        return PrivateStep(
            self.model,
            optimizers.build(config.optimizer, config.learning_rate, config.momentum),
            seeds.key(seed, seeds.Stream.NOISE),
            l2_clip_norm=config.l2_clip_norm,
            noise_multiplier=self.noise_multiplier,
            expected_batch_size=config.batch_size,
            method=cast(Method, config.method),
        )

    def public_record(self) -> dict[str, Any]:
        """What config.json holds: no seed, since it undoes the privacy of the run."""
        record = dataclasses.asdict(self.config)
        del record["out"]
        record["seed"] = "kept in checkpoints/"
        record["derived"] = {
            "num_train": self.dataset.num_train,
            "num_parameters": self.num_parameters,
            "sampling_probability": self.sampling_probability,
            "noise_multiplier": self.noise_multiplier,
            "physical_batch_size": self.physical_batch_size,
            "not_covered_by_epsilon": list(NOT_COVERED_BY_EPSILON),
        }
        return record


def make_plan(config: TrainConfig) -> Plan:
    """Loads the data and settles the model, the noise and the batch shape.

    Raises:
      UsageError: The config asks for something impossible.
      RunError: The data cannot be read.
    """
    optimizers.build(config.optimizer, config.learning_rate, config.momentum)
    dataset = data.load(config.dataset, config.sequence_length)
    if config.batch_size > dataset.num_train:
        raise UsageError(
            f"config.batch_size={config.batch_size}, expected at most the "
            f"{dataset.num_train} training examples of {config.dataset}: lower "
            "--config.batch_size"
        )
    model = _model(config, dataset)
    params = jax.eval_shape(model.init, jax.random.key(0), _blank_input(dataset))
    sampling_probability = config.batch_size / dataset.num_train
    return Plan(
        config,
        dataset,
        model,
        registry.num_parameters(params),
        sampling_probability,
        _noise_multiplier(config, sampling_probability),
        config.physical_batch_size
        or sampling.default_physical_size(dataset.num_train, config.batch_size),
    )


def _model(config: TrainConfig, dataset: data.Dataset) -> nn.Module:
    model: Any = registry.build(config.model, dataset.input_shape, dataset.num_classes)
    needed = dataset.vocabulary_size
    if needed is not None and model.vocabulary_size < needed:
        raise UsageError(
            f"config.model={config.model!r} has vocabulary_size="
            f"{model.vocabulary_size}, expected at least the {needed} token ids of "
            f"{config.dataset}: add :vocabulary_size={needed} to --config.model"
        )
    return model


def _blank_input(dataset: data.Dataset) -> jax.Array:
    """One example of zeros, for shapes: parameters must not depend on the data."""
    return jnp.zeros((1, *dataset.input_shape), dataset.train_inputs_N.dtype)


def _noise_multiplier(config: TrainConfig, sampling_probability: float) -> float:
    if config.noise_multiplier is not None:
        return config.noise_multiplier
    assert config.epsilon is not None
    try:
        return accounting.noise_multiplier(
            config.epsilon,
            delta=config.delta,
            sampling_probability=sampling_probability,
            num_steps=config.num_steps,
        )
    except ValueError as error:
        raise UsageError(
            f"config.epsilon={config.epsilon} cannot be reached ({error}): raise "
            "--config.epsilon or lower --config.num_steps"
        ) from error
