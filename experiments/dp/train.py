"""Trains a classifier of images or texts with differential privacy.

    python -m experiments.dp.train --config=experiments/dp/configs/digits_mlp.py \\
        --config.num_steps=200 --config.out=/tmp/run

The keys are those of `experiments.dp.train_config.TrainConfig`. Running the same
command with the same `out` continues a run that was stopped, to the same bits and the
same epsilon: the steps after the last checkpoint are repeated with the same batches and
the same noise, which reveals nothing new.

Epsilon covers the final parameters, the parameters after every step and whatever is
computed from them and the test data. It does not cover what is measured on the training
batches for diagnosis (`loss`, `train_accuracy`, `clipped_fraction` in metrics.jsonl),
and it assumes that the checkpoints, which hold the seed, stay private.
"""

import dataclasses
import pathlib
import re
import sys

from ml_collections import config_flags

from dpjax import accounting
from experiments import command_line, run_folder, seeds
from experiments.checkpoints import Checkpoints, Progress
from experiments.dp import plots, train_config
from experiments.dp.loop import Loop
from experiments.dp.plan import Plan, make_plan
from experiments.dp.train_config import TrainConfig
from experiments.errors import RunError, UsageError

PLOT = "accuracy.png"


def main() -> None:
    """Trains as the flags say; the last line of output names the run folder."""
    config = train_config.parse(
        command_line.load_config(), command_line.overridden_keys()
    )
    folder = train(config)
    print(f"Run folder: {folder}")


def train(config: TrainConfig) -> pathlib.Path:
    """Trains as `config` says, or continues, and returns the run folder.

    Raises:
      UsageError: The config asks for something impossible, or for another run's folder.
      RunError: Data or checkpoints cannot be read.
    """
    plan = make_plan(config)
    folder = run_folder.choose(config.out, _slug(config)).resolve()
    with run_folder.locked(folder):
        run_folder.claim(folder, plan.public_record())
        _train_in(folder, plan)
        _report(folder, plan)
    return folder


def _train_in(folder: pathlib.Path, plan: Plan) -> None:
    checkpoints = Checkpoints(folder / run_folder.CHECKPOINTS)
    progress = _progress(folder, plan.config, checkpoints)
    loop = Loop(folder, plan, checkpoints, progress)
    if progress.step == plan.config.num_steps:
        print(f"Already finished: {progress.step} steps in {folder}")
        return
    _announce(plan, progress.step)
    loop.finish()


def _progress(
    folder: pathlib.Path, config: TrainConfig, checkpoints: Checkpoints
) -> Progress:
    """Where the run in `folder` stands; a new one gets its seed here."""
    if checkpoints.latest_step() is None:
        # The checkpoint of step 0 comes before the first row.
        if run_folder.read_metrics(folder):
            raise RunError(
                f"config.out={str(folder)!r} holds metrics but no checkpoint to "
                "continue from: give another --config.out"
            )
        seed = seeds.draw() if config.seed is None else config.seed
        return Progress(0, seed, accounting.Ledger().to_json())
    progress = checkpoints.progress()
    if config.seed not in (None, progress.seed):
        raise UsageError(
            f"config.out={str(folder)!r} holds a run with another seed: give another "
            "--config.out, or the same seed to continue that run"
        )
    return progress


def _announce(plan: Plan, step: int) -> None:
    config, num_train = plan.config, plan.dataset.num_train
    verb = f"Continuing from step {step}" if step else "Training"
    print(
        f"{verb}: {config.model} ({plan.num_parameters:,} parameters) on "
        f"{config.dataset} ({num_train:,} examples), {config.num_steps} steps of "
        f"{config.batch_size} expected examples, clip norm {config.l2_clip_norm:g}, "
        f"noise multiplier {plan.noise_multiplier:.4g}",
        flush=True,
    )
    if config.delta * num_train >= 1:
        print(
            f"warning: config.delta={config.delta:g} is not below 1/{num_train}, so "
            "publishing an example outright would be allowed: lower --config.delta",
            file=sys.stderr,
        )


def _report(folder: pathlib.Path, plan: Plan) -> None:
    rows = run_folder.read_metrics(folder)
    if not rows:
        raise RunError(
            f"{folder / run_folder.METRICS} lost its rows: give another --config.out"
        )
    plots.accuracy_and_epsilon(rows, folder / PLOT)
    last = rows[-1]
    epsilon = "inf" if last["epsilon"] is None else f"{last['epsilon']:.4f}"
    print(
        f"Test accuracy {last['test_accuracy']:.4f} after {last['step']} steps; "
        f"epsilon {epsilon} at delta {plan.config.delta:g}"
    )
    print(f"Plot: {folder / PLOT}")


def _slug(config: TrainConfig) -> str:
    parts = [p for p in re.split(r"[^A-Za-z0-9_.-]+", config.dataset) if p]
    dataset = parts[0] if len(parts) == 1 else f"{parts[0]}-{parts[-1]}"
    model = config.model.partition(":")[0]
    return f"{dataset}-{model}"


if __name__ == "__main__":
    config_flags.DEFINE_config_file(
        "config", help_string="A file of experiments/dp/configs/."
    )
    command_line.run(
        main, config_keys=[f.name for f in dataclasses.fields(TrainConfig)]
    )
