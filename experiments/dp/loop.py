"""The training loop: from the last checkpoint to the last step."""

import math
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import tqdm

from dpjax import accounting
from experiments import run_folder
from experiments.checkpoints import Checkpoints, Progress
from experiments.dp import sampling
from experiments.dp.plan import Plan
from experiments.dp.steps import ClippedSums, Data, make_evaluate


class Loop:
    """The moving parts of one run.

    Everything that a step does is a function of the plan, the seed and the state, so
    steps that a crash undid are taken again with the same batches and the same noise.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        plan: Plan,
        checkpoints: Checkpoints,
        progress: Progress,
    ):
        """Starts a run or restores it.

        Args:
          folder: The run folder; its rows after the checkpoint are dropped.
          plan: What to do.
          checkpoints: If it holds none yet, the state before the first step is saved.
          progress: Where to go on.

        Raises:
          RunError: The checkpoint is damaged or belongs to another program.
        """
        dataset = plan.dataset
        self._folder, self._plan, self._checkpoints = folder, plan, checkpoints
        self._seed = progress.seed
        self._step = progress.step
        self._ledger = accounting.Ledger.from_json(progress.ledger)
        self._data = Data(
            jnp.asarray(dataset.train_inputs_N),
            jnp.asarray(dataset.train_labels_N),
        )
        self._test_data = Data(
            jnp.asarray(dataset.test_inputs_N), jnp.asarray(dataset.test_labels_N)
        )
        self._evaluate = make_evaluate(plan.model)
        self._private_step = plan.private_step(self._seed)
        self._state = self._private_step.init(plan.init_params(self._seed))
        if checkpoints.latest_step() is None:
            self._save()
        else:
            self._state = checkpoints.restore(self._state)
        run_folder.truncate_metrics(folder, self._step)

    def finish(self) -> None:
        """Takes the steps that are left."""
        config, logged = self._plan.config, self._step
        with tqdm.tqdm(
            total=config.num_steps, initial=self._step, unit="step"
        ) as progress_bar:
            timer = time.perf_counter()
            while self._step < config.num_steps:
                sums = self._take_step()
                is_last = self._step == config.num_steps
                if is_last or self._step % config.log_interval == 0:
                    jax.block_until_ready(self._state)
                    seconds = time.perf_counter() - timer
                    row = self._row(sums, (self._step - logged) / seconds)
                    run_folder.append_metrics(self._folder, row)
                    progress_bar.set_postfix_str(_summary(row), refresh=False)
                    progress_bar.update(self._step - logged)
                    logged, timer = self._step, time.perf_counter()
                if is_last or self._step % config.checkpoint_interval == 0:
                    self._save()

    def _take_step(self) -> ClippedSums:
        plan = self._plan
        indices = sampling.poisson_batch(
            self._seed, self._step, plan.dataset.num_train, plan.sampling_probability
        )
        parts = sampling.physical_batches(indices, plan.physical_batch_size)
        self._state, sums = self._private_step(self._state, self._data, parts)
        self._ledger = self._ledger.compose(
            noise_multiplier=plan.noise_multiplier,
            sampling_probability=plan.sampling_probability,
        )
        self._step += 1
        return sums

    def _row(self, sums: ClippedSums, steps_per_second: float) -> dict[str, Any]:
        """One row of metrics.jsonl; null stands for infinite and for undefined."""
        config = self._plan.config
        count = int(sums.num_examples)

        def mean(total: jax.Array) -> float | None:
            return _finite(float(total) / count) if count else None

        return {
            "step": self._step,
            "loss": mean(sums.loss),
            "train_accuracy": mean(sums.num_correct),
            "test_accuracy": self._evaluate(self._state.params, self._test_data),
            "epsilon": _finite(self._ledger.epsilon(config.delta)),
            "clipped_fraction": mean(sums.num_clipped),
            "examples_per_second": steps_per_second * config.batch_size,
        }

    def _save(self) -> None:
        progress = Progress(self._step, self._seed, self._ledger.to_json())
        self._checkpoints.save(progress, self._state)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _summary(row: dict[str, Any]) -> str:
    loss = "-" if row["loss"] is None else f"{row['loss']:.3f}"
    epsilon = "inf" if row["epsilon"] is None else f"{row['epsilon']:.3f}"
    return (
        f"loss={loss} accuracy={row['test_accuracy']:.3f} epsilon={epsilon} "
        f"examples/s={row['examples_per_second']:.0f}"
    )
