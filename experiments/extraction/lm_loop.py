"""The training loop of a language model: from the last checkpoint to the last step."""

import math
import pathlib
import time
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import tqdm

from experiments import run_folder
from experiments.checkpoints import Checkpoints, Progress
from experiments.errors import RunError
from experiments.extraction import lm_batches, lm_step
from experiments.extraction.lm_plan import LmPlan


class LmLoop:
    """The moving parts of one run.

    Everything that a step does is a function of the plan and the state, so steps that a
    crash undid are taken again to the same bits.
    """

    def __init__(self, folder: pathlib.Path, plan: LmPlan, checkpoints: Checkpoints):
        """Starts a run or restores it.

        Args:
          folder: The run folder; its rows after the checkpoint are dropped.
          plan: What to do.
          checkpoints: If it holds none yet, the state before the first step is saved.

        Raises:
          RunError: The checkpoint is damaged or belongs to another program.
        """
        self._folder, self._plan, self._checkpoints = folder, plan, checkpoints
        optimizer = plan.optimizer()
        self._step = lm_step.make_step(
            plan.objective.loss, optimizer, plan.microbatch_size
        )
        self._learning_rates = plan.learning_rates()
        self._state = lm_step.init_state(plan.init_params(), optimizer)
        if checkpoints.latest_step() is None:
            self.num_steps = 0
            self._save()
        else:
            self.num_steps = checkpoints.progress().step
            self._state = checkpoints.restore(self._state)
        run_folder.truncate_metrics(folder, self.num_steps)

    @property
    def params(self) -> Any:
        """The model's variables after the steps taken."""
        return self._state.params

    def finish(self) -> None:
        """Takes the steps that are left.

        Raises:
          RunError: The loss is no longer a finite number.
        """
        config = self._plan.config
        if self.num_steps == config.num_steps:
            return
        batches = self._batches()
        batch = next(batches)
        print("Compiling the step", flush=True)
        compiled = self._step.lower(self._state, batch).compile()
        timer, timed_from = time.perf_counter(), self.num_steps
        with tqdm.tqdm(
            total=config.num_steps, initial=self.num_steps, unit="step"
        ) as progress_bar:
            while self.num_steps < config.num_steps:
                self._state = compiled(self._state, batch)
                self.num_steps += 1
                batch = next(batches)
                is_last = self.num_steps == config.num_steps
                if is_last or self.num_steps % config.log_interval == 0:
                    self._check_finite()
                    seconds = time.perf_counter() - timer
                    row = self._row((self.num_steps - timed_from) / seconds)
                    run_folder.append_metrics(self._folder, row)
                    self._state = self._state._replace(loss_sum=jnp.zeros(()))
                    progress_bar.set_postfix_str(_summary(row), refresh=False)
                    progress_bar.update(self.num_steps - progress_bar.n)
                    timer, timed_from = time.perf_counter(), self.num_steps
                if is_last or self.num_steps % config.checkpoint_interval == 0:
                    self._check_finite()
                    paused = time.perf_counter()
                    self._save()
                    timer += time.perf_counter() - paused

    def _batches(self) -> Iterator[Any]:
        """Those of the steps that are left, and of steps after them."""
        config, objective = self._plan.config, self._plan.objective
        crops = lm_batches.batches(
            self._plan.corpus.tokens_N,
            sequence_length=config.sequence_length,
            batch_size=config.batch_size,
            seed=config.seed,
            first_step=self.num_steps,
        )
        for step, tokens_BxL in enumerate(crops, self.num_steps):
            yield objective.batch(tokens_BxL, step * config.batch_size)

    def _check_finite(self) -> None:
        """Waits for the steps taken; a state that is lost must not be saved."""
        if math.isfinite(float(self._state.loss_sum)):
            return
        raise RunError(
            f"the loss or its gradient is no finite number any more at step "
            f"{self.num_steps}: lower config.learning_rate="
            f"{self._plan.config.learning_rate:g} or raise config.warmup_steps="
            f"{self._plan.warmup_steps}, in another --config.out (the state of step "
            f"{self._checkpoints.latest_step()} is kept in {self._folder})"
        )

    def _row(self, steps_per_second: float) -> dict[str, Any]:
        """One row of metrics.jsonl."""
        config, step = self._plan.config, self.num_steps
        steps_since_row = (step - 1) % config.log_interval + 1
        return {
            "step": step,
            "epoch": self._plan.epoch(step),
            "loss": float(self._state.loss_sum) / steps_since_row,
            "learning_rate": float(self._learning_rates(step - 1)),
            "tokens_per_second": steps_per_second
            * config.batch_size
            * config.sequence_length,
        }

    def _save(self) -> None:
        progress = Progress(self.num_steps, self._plan.config.seed)
        self._checkpoints.save(progress, self._state)


def _summary(row: dict[str, Any]) -> str:
    return (
        f"epoch={row['epoch']:.2f} loss={row['loss']:.3f} "
        f"tokens/s={row['tokens_per_second']:.0f}"
    )
