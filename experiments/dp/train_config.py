"""The keys of a training config: their types, defaults and limits."""

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Set
from typing import Any

import ml_collections
from ml_collections import config_dict

from dpjax.clipping import Method
from experiments.errors import UsageError

METHODS = typing.get_args(Method)


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """What one run does. Set exactly one of `epsilon` and `noise_multiplier`.

    Attributes:
      dataset: `digits`, `idx:DIR` or `tfds:NAME`.
      model: `mlp`, `cnn` or `tempered_cnn`.
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
    config = ml_collections.ConfigDict()
    for field in dataclasses.fields(TrainConfig):
        config[field.name] = (
            config_dict.placeholder(_plain_type(field.name))
            if field.default is None
            else field.default
        )
    config.update(values)
    return config


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
    _check_keys(values)
    for ours, other in _EXCLUSIVE:
        if ours in overridden and other not in overridden:
            values[other] = None
    parsed = TrainConfig(**{k: _checked_type(k, v) for k, v in values.items()})
    _check_privacy(parsed)
    _check_ranges(parsed)
    return parsed


_EXCLUSIVE = (
    ("epsilon", "noise_multiplier"),
    ("noise_multiplier", "epsilon"),
)


def _plain_type(name: str) -> type:
    annotation = typing.get_type_hints(TrainConfig)[name]
    if isinstance(annotation, types.UnionType):
        return next(t for t in typing.get_args(annotation) if t is not type(None))
    return annotation


def _check_keys(values: dict[str, Any]) -> None:
    known = [field.name for field in dataclasses.fields(TrainConfig)]
    for name in values:
        if name in known:
            continue
        close = difflib.get_close_matches(name, known, n=2)
        hint = f"did you mean {' or '.join(close)}? " if close else ""
        raise UsageError(
            f"config key {name!r} is unknown: {hint}the keys are {', '.join(known)}"
        )
    missing = [name for name in known if name not in values]
    if missing:
        raise UsageError(
            f"the config lacks {', '.join(missing)}: start it from "
            "experiments.dp.train_config.make()"
        )


def _checked_type(name: str, value: Any) -> Any:
    expected = _plain_type(name)
    default = getattr(TrainConfig, name)
    if value is None and default is None:
        return None
    if expected is float and type(value) is int:
        return float(value)
    if type(value) is not expected:
        raise UsageError(
            f"config.{name}={value!r} is {type(value).__name__}, expected "
            f"{expected.__name__}: set --config.{name} to one"
        )
    return value


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
    _expect(config, "delta", 0 < config.delta < 1, "0 < delta < 1")
    if config.epsilon is not None:
        ok = config.epsilon > 0 and math.isfinite(config.epsilon)
        _expect(config, "epsilon", ok, "a finite number > 0")
    if config.noise_multiplier is not None:
        ok = config.noise_multiplier >= 0 and math.isfinite(config.noise_multiplier)
        _expect(config, "noise_multiplier", ok, "a finite number >= 0")
    for name in ("l2_clip_norm", "learning_rate"):
        value = getattr(config, name)
        _expect(config, name, 0 < value < math.inf, "a finite number > 0")
    _expect(config, "momentum", 0 <= config.momentum < 1, "0 <= momentum < 1")
    for name in ("batch_size", "num_steps", "log_interval", "checkpoint_interval"):
        _expect(config, name, getattr(config, name) >= 1, "an integer >= 1")
    if config.physical_batch_size is not None:
        ok = config.physical_batch_size >= 1
        _expect(config, "physical_batch_size", ok, "an integer >= 1")
    if config.seed is not None:
        _expect(config, "seed", config.seed >= 0, "an integer >= 0")
    _expect(config, "method", config.method in METHODS, f"one of {', '.join(METHODS)}")


def _expect(config: TrainConfig, name: str, ok: bool, expected: str) -> None:
    if not ok:
        raise UsageError(
            f"config.{name}={getattr(config, name)!r}, expected {expected}: change "
            f"--config.{name}"
        )
