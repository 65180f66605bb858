"""Trains a language model on a corpus of tokens, without privacy.

    python -m experiments.extraction.train_lm \\
        --config=experiments/extraction/configs/stdlib_tiny.py \\
        --config.num_steps=200 --config.out=runs/tiny

The keys are those of `experiments.extraction.lm_config.LmConfig`. Running the same
command with the same `out` continues a run that was stopped, to the same bits: the
steps after the last checkpoint are repeated with the same batches. (An accelerator may
add floating-point numbers in another order each time.)

Each epoch visits every token of the corpus once, so a passage that the corpus holds c
times is met c times per epoch. Sequences run across the separators between documents.

A T5 (--config.model=t5:layers=2:...) reads each token once per epoch too, but 15 % of
them are dropped, others at each visit, and these alone are predicted: it takes several
times as many epochs to learn as much by heart (configs/t5_tiny.py).

The run folder holds config.json, metrics.jsonl, loss.png, checkpoints/ and at the end
model/, a Hugging Face folder that `experiments.models.load` and the sweep take. A
corpus of texts is tokenised into its corpus/ first.
"""

import dataclasses
import pathlib
import re

from ml_collections import config_flags

from experiments import command_line, models, run_folder
from experiments.checkpoints import Checkpoints
from experiments.errors import RunError
from experiments.extraction import corpus, lm_config, lm_figures, lm_plan, lm_run_folder
from experiments.extraction.lm_config import LmConfig
from experiments.extraction.lm_loop import LmLoop
from experiments.extraction.lm_plan import LmPlan


def main() -> None:
    """Trains as the flags say; the last line of output names the run folder."""
    folder = train(lm_config.parse(command_line.load_config()))
    print(f"Run folder: {folder}")


def train(config: LmConfig) -> pathlib.Path:
    """Trains as `config` says, or continues, and returns the run folder.

    Raises:
      UsageError: The config asks for something impossible, or for another run's folder.
      RunError: Corpus or checkpoints cannot be read, or the loss is not finite.
    """
    # A wrong spec is told before a folder is made or a corpus read.
    lm_plan.make_objective(config, vocabulary_size=1, eos_id=None)
    folder = run_folder.choose(config.out, _slug(config)).resolve()
    with run_folder.locked(folder):
        lm_run_folder.check(folder, config)
        tokens = corpus.load(
            config.corpus,
            folder / lm_run_folder.CORPUS,
            eos_id=config.eos_id,
            tokenizer=config.tokenizer,
        )
        plan = lm_plan.make_plan(config, tokens)
        lm_run_folder.claim(folder, config, plan.derived())
        _train_in(folder, plan)
        _report(folder)
    return folder


def _train_in(folder: pathlib.Path, plan: LmPlan) -> None:
    checkpoints = Checkpoints(folder / run_folder.CHECKPOINTS)
    step, num_steps = checkpoints.latest_step(), plan.config.num_steps
    if step is None and run_folder.read_metrics(folder):
        # The checkpoint of step 0 comes before the first row.
        raise RunError(
            f"config.out={str(folder)!r} holds metrics but no checkpoint to continue "
            "from: give another --config.out"
        )
    if step == num_steps and (folder / lm_run_folder.MODEL).exists():
        print(f"Already finished: {step} steps in {folder}")
        return
    _announce(plan, step or 0)
    loop = LmLoop(folder, plan, checkpoints)
    loop.finish()
    models.save(
        folder / lm_run_folder.MODEL,
        plan.model,
        loop.params,
        tokenizer_json=plan.corpus.tokenizer,
    )


def _announce(plan: LmPlan, step: int) -> None:
    config = plan.config
    verb = f"Continuing from step {step}" if step else "Training"
    print(
        f"{verb}: {config.model} ({plan.num_parameters:,} parameters) on "
        f"{config.corpus} ({len(plan.corpus.tokens_N):,} tokens, vocabulary "
        f"{plan.corpus.vocabulary_size:,}), {config.num_steps} steps of "
        f"{config.batch_size} x {config.sequence_length} tokens = "
        f"{plan.epoch(config.num_steps):.2f} epochs",
        flush=True,
    )


def _report(folder: pathlib.Path) -> None:
    rows = run_folder.read_metrics(folder)
    if not rows:
        raise RunError(
            f"{folder / run_folder.METRICS} lost its rows: give another --config.out"
        )
    lm_figures.loss(rows, folder / lm_run_folder.PLOT)
    last = rows[-1]
    print(
        f"Loss {last['loss']:.4f} nats per token after {last['step']} steps "
        f"({last['epoch']:.2f} epochs)"
    )
    print(f"Plot: {folder / lm_run_folder.PLOT}")
    print(f"Model: {folder / lm_run_folder.MODEL}")


def _slug(config: LmConfig) -> str:
    parts = [p for p in re.split(r"[^A-Za-z0-9_.-]+", config.corpus) if p]
    named = parts[0] if len(parts) == 1 else f"{parts[0]}-{parts[-1]}"
    return f"{named}-{config.model.partition(':')[0]}"


if __name__ == "__main__":
    config_flags.DEFINE_config_file(
        "config", help_string="A file of experiments/extraction/configs/."
    )
    command_line.run(main, config_keys=[f.name for f in dataclasses.fields(LmConfig)])
