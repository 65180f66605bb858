"""How a step is timed here: against others, in turns, in one process.

How fast a machine is changes from second to second with the other work on it and with
its clock. So the steps to be compared take turns, in rounds and in a shuffled order,
and a comparison is the *median over rounds of the ratio within a round*
(`paired_ratio`), not the ratio of two medians: what slows a whole round down cancels
in its ratio, and what hits a part of one round spoils that ratio alone, which a median
ignores.
"""

import dataclasses
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

MOST_STEPS_PER_ROUND = 1000


class StepFailed(Exception):
    """The step called `name` raised the exception that caused this one."""

    def __init__(self, name: str):
        """Args: `name`: the key of the step."""
        super().__init__(name)
        self.name = name


@dataclasses.dataclass
class TimedStep:
    """A step that takes turns with others.

    Attributes:
      step: Maps a state to the next one, which it may compute asynchronously; the state
        given may be donated.
      state: The latest state.
      rounds: In how many rounds it takes part.
      steps_per_round: Steps in a row that are timed as one.
    """

    step: Callable[[Any], Any]
    state: Any
    rounds: int
    steps_per_round: int

    def seconds_per_step(self) -> float:
        """Runs the steps of one round, waits for them and returns the mean time."""
        jax.block_until_ready(self.state)
        start = time.perf_counter()
        for _ in range(self.steps_per_round):
            self.state = self.step(self.state)
        jax.block_until_ready(self.state)
        return (time.perf_counter() - start) / self.steps_per_round


def warmed_up(
    step: Callable[[Any], Any], state: Any, *, rounds: int, round_seconds: float
) -> TimedStep:
    """Takes a few untimed steps, and fits the rounds to the time that one takes.

    Args:
      step: See `TimedStep`.
      state: The first state.
      rounds: In how many rounds the step takes part.
      round_seconds: A round repeats the step for about so long.
    """
    timed = TimedStep(step, state, rounds, steps_per_round=1)
    seconds = timed.seconds_per_step()
    if seconds > 10 * round_seconds:
        # Much longer than a round: however warm, one step fills it.
        return timed
    seconds = min(timed.seconds_per_step() for _ in range(2))
    steps = math.ceil(round_seconds / max(seconds, 1e-9))
    return dataclasses.replace(
        timed, steps_per_round=min(max(steps, 1), MOST_STEPS_PER_ROUND)
    )


def interleaved(
    steps: Mapping[str, TimedStep],
    on_measured: Callable[[str], None] = lambda name: None,
) -> dict[str, np.ndarray]:
    """Times steps in turns.

    Args:
      steps: They are warm. One that takes part in fewer rounds than another sits out
        rounds at even distances.
      on_measured: Called with the name of a step after each of its rounds.

    Returns:
      seconds_R for each step: the mean time of a step in each of the R rounds, NaN
      where it sat out. R is the largest number of rounds of any step.

    Raises:
      StepFailed: A step raised an exception.
    """
    num_rounds = max(step.rounds for step in steps.values())
    seconds = {name: np.full(num_rounds, np.nan) for name in steps}
    for round_index, name in _turns(steps, num_rounds):
        try:
            seconds[name][round_index] = steps[name].seconds_per_step()
        except Exception as error:
            raise StepFailed(name) from error
        on_measured(name)
    return seconds


def _turns(
    steps: Mapping[str, TimedStep], num_rounds: int
) -> Iterator[tuple[int, str]]:
    # A fixed order would give each step the same predecessor's caches every time.
    generator = random.Random(0)
    for i in range(num_rounds):
        names = [
            name
            for name, step in steps.items()
            if (i + 1) * step.rounds // num_rounds > i * step.rounds // num_rounds
        ]
        generator.shuffle(names)
        for name in names:
            yield i, name


class Spread(NamedTuple):
    """Median and quartiles."""

    median: float
    lower: float
    upper: float


def spread(values_R: np.ndarray) -> Spread:
    """Returns the quartiles of the values that are not NaN.

    Example:
      >>> spread(np.array([1.0, np.nan, 3.0, 5.0, 2.0, 4.0]))
      Spread(median=3.0, lower=2.0, upper=4.0)
    """
    lower, median, upper = np.nanquantile(values_R, [0.25, 0.5, 0.75])
    return Spread(float(median), float(lower), float(upper))


def paired_ratio(seconds_R: np.ndarray, baseline_seconds_R: np.ndarray) -> Spread:
    """Returns the quartiles of the ratio within each round that both took part in.

    Example:
      >>> paired_ratio(np.array([2.0, 20.0, np.nan]), np.array([1.0, 10.0, 1.0]))
      Spread(median=2.0, lower=2.0, upper=2.0)
    """
    return spread(seconds_R / baseline_seconds_R)
