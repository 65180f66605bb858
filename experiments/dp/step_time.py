"""Prints the time of a private step against the non-private step of the same model.

    python -m experiments.dp.step_time --config=experiments/dp/configs/digits_mlp.py

Both steps run in this process, in turn, on the same examples: the non-private one takes
the mean gradient of the batch and the same optimizer.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from ml_collections import config_flags

from experiments import command_line, timing
from experiments.dp import optimizers, train_config
from experiments.dp.plan import Plan, make_plan
from experiments.dp.steps import Data, TrainState
from experiments.dp.train_config import TrainConfig

ROUNDS, ROUND_SECONDS = 11, 0.05


class StepTimes(NamedTuple):
    """Medians over rounds.

    Attributes:
      private: Seconds per step.
      non_private: Seconds per step.
      ratio: See `timing.paired_ratio`.
    """

    private: float
    non_private: float
    ratio: float


def main() -> None:
    """Prints one line."""
    config = train_config.parse(
        command_line.load_config(), command_line.overridden_keys()
    )
    plan = make_plan(config)
    times = measure(plan)
    print(
        f"Private step {1e3 * times.private:.2f} ms, non-private step "
        f"{1e3 * times.non_private:.2f} ms: {times.ratio:.2f} "
        f"times the non-private time ({config.model}, {plan.physical_batch_size} "
        f"examples, medians of {ROUNDS} interleaved rounds)"
    )


def measure(plan: Plan) -> StepTimes:
    """Times both steps on one full physical batch."""
    dataset, config = plan.dataset, plan.config
    data = Data(
        jnp.asarray(dataset.train_inputs_N), jnp.asarray(dataset.train_labels_N)
    )
    indices_B = np.arange(plan.physical_batch_size, dtype=np.int32) % dataset.num_train
    # No secret depends on this run, so a known seed does no harm.
    private_step = plan.private_step(seed=0)
    optimizer = optimizers.build(
        config.optimizer, config.learning_rate, config.momentum
    )
    non_private_step = _non_private_step(plan.model, optimizer)
    params = plan.init_params(seed=0)
    non_private_state = TrainState(params, jax.jit(optimizer.init)(params))
    seconds = timing.interleaved(
        {
            "private": _warmed_up(
                lambda state: private_step(state, data, [indices_B])[0],
                private_step.init(plan.init_params(seed=0)),
            ),
            "non_private": _warmed_up(
                lambda state: non_private_step(state, data, indices_B)[0],
                non_private_state,
            ),
        }
    )
    return StepTimes(
        timing.spread(seconds["private"]).median,
        timing.spread(seconds["non_private"]).median,
        timing.paired_ratio(seconds["private"], seconds["non_private"]).median,
    )


def _warmed_up(
    step: Callable[[TrainState], TrainState], state: TrainState
) -> timing.TimedStep:
    return timing.warmed_up(step, state, rounds=ROUNDS, round_seconds=ROUND_SECONDS)


def _non_private_step(
    model: nn.Module, optimizer: optax.GradientTransformation
) -> Callable[[TrainState, Data, np.ndarray], tuple[TrainState, jax.Array]]:
    def loss_fn(params: Any, batch: Data) -> jax.Array:
        logits_BxV: Any = model.apply(params, batch.inputs_N)
        return optax.softmax_cross_entropy_with_integer_labels(
            logits_BxV, batch.labels_N
        ).mean()

    def step(
        state: TrainState, data: Data, indices_B: jax.Array
    ) -> tuple[TrainState, jax.Array]:
        batch = Data(data.inputs_N[indices_B], data.labels_N[indices_B])
        loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        return TrainState(optax.apply_updates(state.params, updates), opt_state), loss

    return jax.jit(step, donate_argnums=0)


if __name__ == "__main__":
    config_flags.DEFINE_config_file(
        "config", help_string="A file of experiments/dp/configs/."
    )
    command_line.run(
        main, config_keys=[f.name for f in dataclasses.fields(TrainConfig)]
    )
