"""Optax optimizers by name."""

import difflib
import inspect

import optax

from experiments.errors import UsageError

NAMES = (
    "adabelief",
    "adagrad",
    "adam",
    "adamax",
    "adamw",
    "lamb",
    "lion",
    "nadam",
    "rmsprop",
    "sgd",
    "yogi",
)


def build(
    name: str, learning_rate: float, momentum: float
) -> optax.GradientTransformation:
    """Returns `optax.NAME(learning_rate)`, with momentum where it has one.

    Raises:
      UsageError: No such optimizer, or momentum for one that has none.
    """
    if name not in NAMES:
        close = difflib.get_close_matches(name, NAMES, n=2)
        hint = f" (did you mean {' or '.join(close)}?)" if close else ""
        raise UsageError(
            f"config.optimizer={name!r} is unknown{hint}: expected one of "
            f"{', '.join(NAMES)}"
        )
    factory = getattr(optax, name)
    if not momentum:
        return factory(learning_rate)
    if "momentum" not in inspect.signature(factory).parameters:
        raise UsageError(
            f"config.momentum={momentum} but optimizer {name} has no momentum: set "
            "--config.momentum=0"
        )
    return factory(learning_rate, momentum=momentum)
