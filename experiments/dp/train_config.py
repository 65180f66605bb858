"""The keys of a training config: their types, defaults and limits."""

import dataclasses
import math
import typing
from collections.abc import Set
from typing import Any

import ml_collections

from dpjax.methods import Method
from experiments import typed_config
from experiments.errors import UsageError
from experiments.typed_config import expect

METHODS = typing.get_args(Method)


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """What one run does. Set exactly one of `epsilon` and `noise_multiplier`.

    Attributes:
      dataset: `digits`, `stdlib`, `idx:DIR` or `tfds:NAME`.
      model: A spec of `experiments.models.registry`, such as `mlp`, `lstm`,
        `transformer:layers=2` or `resnet18:width=16:stem=small`.
      sequence_length: Tokens per text, 256 by default; only for data sets of texts.
      epsilon: Target; the noise multiplier is calibrated so that `num_steps` stay
        within it.
      delta: The delta of (epsilon, delta); keep it well below 1 / number of examples.
      noise_multiplier: Standard deviation of the noise over `l2_clip_norm`; epsilon is
        then reported.
      l2_clip_norm: Bound on the L2 norm of each example's gradient.
      batch_size: Expected number of examples per step; each example is drawn with
        probability `batch_size / number of examples`, independently. Also the divisor.
      physical_batch_size: Examples processed at once; a larger batch is processed in
        several parts. None takes a size that nearly every batch fits in.
      num_steps: Number of optimizer updates.
      method: How per-example gradients are clipped; see `dpjax.clipped_grad`.
      optimizer: Name of an optax optimizer.
      learning_rate: Constant learning rate.
      momentum: Momentum, for the optimizers that have one.
      seed: SECRET. Whoever knows it can recompute the noise and the batches, and no
        privacy is left; set it only to reproduce a run on data that need no protection.
        None draws one from the operating system.
      log_interval: Steps between two rows of metrics.jsonl.
      checkpoint_interval: Steps between two checkpoints.
      out: The run folder; empty makes a new one under runs/.
    """

    dataset: str = "digits"
    model: str = "mlp"
    sequence_length: int | None = None
    epsilon: float | None = None
    delta: float = 1e-5
    noise_multiplier: float | None = None
    l2_clip_norm: float = 1.0
    batch_size: int = 128
    physical_batch_size: int | None = None
    num_steps: int = 1000
    method: str = "auto"
    optimizer: str = "sgd"
    learning_rate: float = 0.1
    momentum: float = 0.0
    seed: int | None = None
    log_interval: int = 20
    checkpoint_interval: int = 100
    out: str = ""


def make(**values: Any) -> ml_collections.ConfigDict:
    """The `ConfigDict` of `TrainConfig(**values)`, for the files in configs/.

    Example:
      >>> make(num_steps=5).num_steps
      5
    """
    return typed_config.make(TrainConfig, **values)


def parse(
    config: ml_collections.ConfigDict, overridden: Set[str] = frozenset()
) -> TrainConfig:
    """Checks every key and value.

    Args:
      config: As the config file and the command line made it.
      overridden: Keys set on the command line. One of `epsilon` and `noise_multiplier`
        there replaces the other one in the file.

    Raises:
      UsageError: Names the key, its value, what was expected and the remedy.
    """
    values = config.to_dict()
    typed_config.check_keys(TrainConfig, values)
    for ours, other in _EXCLUSIVE:
        if ours in overridden and other not in overridden:
            values[other] = None
    parsed = typed_config.parse(TrainConfig, values)
    _check_privacy(parsed)
    _check_ranges(parsed)
    return parsed


_EXCLUSIVE = (
    ("epsilon", "noise_multiplier"),
    ("noise_multiplier", "epsilon"),
)


def _check_privacy(config: TrainConfig) -> None:
    if (config.epsilon is None) == (config.noise_multiplier is None):
        state = "neither is" if config.epsilon is None else "both are"
        raise UsageError(
            f"config.epsilon={config.epsilon} and config.noise_multiplier="
            f"{config.noise_multiplier}: {state} set, expected exactly one: set "
            "--config.epsilon to calibrate the noise, or --config.noise_multiplier to "
            "have epsilon reported"
        )


def _check_ranges(config: TrainConfig) -> None:
    expect(config, "delta", 0 < config.delta < 1, "0 < delta < 1")
    if config.epsilon is not None:
        ok = config.epsilon > 0 and math.isfinite(config.epsilon)
        expect(config, "epsilon", ok, "a finite number > 0")
    if config.noise_multiplier is not None:
        ok = config.noise_multiplier >= 0 and math.isfinite(config.noise_multiplier)
        expect(config, "noise_multiplier", ok, "a finite number >= 0")
    for name in ("l2_clip_norm", "learning_rate"):
        value = getattr(config, name)
        expect(config, name, 0 < value < math.inf, "a finite number > 0")
    expect(config, "momentum", 0 <= config.momentum < 1, "0 <= momentum < 1")
    for name in ("batch_size", "num_steps", "log_interval", "checkpoint_interval"):
        expect(config, name, getattr(config, name) >= 1, "an integer >= 1")
    for name in ("physical_batch_size", "sequence_length"):
        value = getattr(config, name)
        expect(config, name, value is None or value >= 1, "an integer >= 1")
    if config.seed is not None:
        expect(config, "seed", config.seed >= 0, "an integer >= 0")
    expect(config, "method", config.method in METHODS, f"one of {', '.join(METHODS)}")
