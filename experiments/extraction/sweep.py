"""Asks language models to continue windows of their training data.

    python -m experiments.extraction.sweep \\
        --config=experiments/extraction/configs/figure_1.py \\
        --config.models=runs/small,runs/large --config.windows=runs/windows \\
        --config.out=runs/sweep

The keys are those of `experiments.extraction.sweep_config.SweepConfig`. A window is
*extractable* if greedy decoding continues its first tokens, the prompt, by exactly the
50 tokens that follow (Carlini et al. 2023, arXiv 2202.07646, Definition 3.1, for the
prefix of the window's own occurrence). That is decided without decoding, by one
teacher-forced pass (see verdicts.py), and written to records.parquet (see records.py)
with how far the verdict is from turning.

With decode=True the 50 tokens are generated as well, and the two verdicts compared.
They are computed in another order, so where logits are equal up to rounding they may
differ; any other difference stops the sweep.

The same command with the same `out` continues a sweep that was stopped, to the same
records, bit for bit, on the same machine and versions.
"""

import dataclasses
import pathlib
import shutil
import time
from typing import Any

import jax
import numpy as np
import polars
import tqdm
from ml_collections import config_flags

from experiments import command_line, models, run_folder
from experiments.errors import RunError
from experiments.extraction import records, sweep_config, sweep_plan
from experiments.extraction.asking import Asker
from experiments.extraction.records import Parts
from experiments.extraction.sweep_config import SweepConfig
from experiments.extraction.sweep_plan import (
    BATCHES_PER_PART,
    Prompts,
    SweepPlan,
    SweptModel,
)
from experiments.extraction.verdicts import SUFFIX_LENGTH, Verdicts

CLUSTERS = "clusters.parquet"
# Logits closer than this may be equal up to rounding.
NEAR_TIE = 1e-3


@dataclasses.dataclass(frozen=True)
class Part:
    """A run of rows of one set of prompts, asked of one model."""

    model: SweptModel
    prompts: Prompts
    start: int
    stop: int
    name: str

    @property
    def num_records(self) -> int:
        """One for each window and context."""
        return (self.stop - self.start) * len(self.prompts.contexts)


def main() -> None:
    """Sweeps as the flags say; the last line of output names the folder."""
    folder = sweep(sweep_config.parse(command_line.load_config()))
    print(f"Sweep folder: {folder}")


def sweep(config: SweepConfig) -> pathlib.Path:
    """Sweeps as `config` says, or continues, and returns the folder.

    Raises:
      UsageError: The config asks for something impossible, or for another's folder.
      RunError: A file is damaged, logits are not finite, or decoding disagrees.
    """
    plan = sweep_plan.make_plan(config)
    folder = run_folder.choose(config.out, "sweep").resolve()
    with run_folder.locked(folder):
        run_folder.claim(folder, plan.record())
        if (folder / records.RECORDS).exists():
            # A sweep that was stopped between the merge and this.
            shutil.rmtree(folder / records.PARTS, ignore_errors=True)
            print(f"Already finished: {folder}")
        else:
            _sweep_in(folder, plan)
        _summarize(polars.read_parquet(folder / records.RECORDS), plan)
    return folder


def _sweep_in(folder: pathlib.Path, plan: SweepPlan) -> None:
    if plan.num_skipped:
        print(
            f"{plan.num_skipped:,} windows of {SUFFIX_LENGTH} tokens leave no prompt "
            "and are left out; set --config.empty_prompt=bos to prompt with the "
            "separator"
        )
    records.write_parquet(
        plan.windows.windows.select("window_id", "cluster"), folder / CLUSTERS
    )
    parts, finished = _parts(plan), Parts(folder)
    total = sum(part.num_records for part in parts)
    with tqdm.tqdm(total=total, unit="window", smoothing=0) as progress_bar:
        for model in plan.models:
            own = [part for part in parts if part.model == model]
            missing = [part for part in own if part.name not in finished]
            progress_bar.initial += sum(p.num_records for p in own if p not in missing)
            progress_bar.update(0)
            progress_bar.set_postfix_str(model.name)
            _ask(model, missing, plan, finished, progress_bar)
    rows = records.merge(
        [finished.read(part.name) for part in parts], [m.name for m in plan.models]
    )
    records.write_parquet(rows, folder / records.RECORDS)
    finished.remove()


def _parts(plan: SweepPlan) -> list[Part]:
    rows_per_part = BATCHES_PER_PART * plan.config.batch_size
    return [
        Part(
            model,
            prompts,
            start,
            min(start + rows_per_part, len(prompts.windows)),
            f"{i:03d}-{prompts.name}-{start:09d}",
        )
        for i, model in enumerate(plan.models)
        for prompts in plan.prompts
        for start in range(0, len(prompts.windows), rows_per_part)
    ]


def _ask(
    swept: SweptModel,
    parts: list[Part],
    plan: SweepPlan,
    finished: Parts,
    progress_bar: tqdm.tqdm,
) -> None:
    """Writes the parts of one model."""
    if not parts:
        return
    config = plan.config
    model, params = models.load(swept.folder)
    compile_seconds, start = 0.0, time.perf_counter()
    with jax.default_matmul_precision(config.matmul_precision):
        for prompts in plan.prompts:
            own = [part for part in parts if part.prompts is prompts]
            if not own:
                continue
            asker = Asker(
                model,
                params,
                prompts,
                batch_size=config.batch_size,
                decode=config.decode,
            )
            compile_seconds += asker.compile_seconds
            tokens_NxT = prompts.tokens()
            for part in own:
                rows = _answer(asker, part, tokens_NxT[part.start : part.stop], config)
                finished.write(part.name, rows)
                progress_bar.update(part.num_records)
    seconds = time.perf_counter() - start - compile_seconds
    num_records = sum(part.num_records for part in parts)
    progress_bar.write(
        f"{swept.name}: {num_records / seconds:,.0f} windows/s after "
        f"{compile_seconds:.1f} s of compiling"
    )


def _answer(
    asker: Asker, part: Part, tokens_NxT: np.ndarray, config: SweepConfig
) -> polars.DataFrame:
    """The records of a part, by context and then by window."""
    answers = asker.verdicts(tokens_NxT)
    windows = part.prompts.windows[part.start : part.stop]
    _check_finite(answers, part.model, windows)
    generated = _generated(asker, tokens_NxT, answers, part) if config.decode else None
    frames = []
    for k, context in enumerate(part.prompts.contexts):
        columns: dict[str, Any] = {
            "window_id": windows["window_id"],
            "model": part.model.name,
            "params": part.model.params,
            "length": windows["length"],
            "context": context,
            "count": windows["count"],
            "bucket": windows["bucket"],
        }
        for field in dataclasses.fields(answers):
            columns[field.name] = getattr(answers, field.name)[:, k]
        frame = polars.DataFrame(columns).cast(polars.Schema(records.COLUMNS))
        if generated is not None:
            tokens_NxS = generated[:, k].astype(np.uint32)
            column = polars.Series("generated", tokens_NxS).cast(
                records.GENERATED["generated"]
            )
            frame = frame.with_columns(column)
        frames.append(frame)
    return polars.concat(frames)


def _check_finite(
    answers: Verdicts, model: SweptModel, windows: polars.DataFrame
) -> None:
    bad_N = ~np.isfinite(answers.suffix_logprob).all(axis=1)
    if bad_N.any():
        window_id = windows["window_id"][int(bad_N.argmax())]
        raise RunError(
            f"model {model.name!r} gives logits that are not finite for "
            f"{bad_N.sum()} of {len(bad_N)} windows, window_id={window_id} among them: "
            "its weights are damaged or overflow float32; leave the model out"
        )


def _generated(
    asker: Asker, tokens_NxT: np.ndarray, answers: Verdicts, part: Part
) -> np.ndarray:
    """What decoding gives, i32[N, K, 50], once it agrees with the verdicts."""
    generated_NxKxS = asker.generate(tokens_NxT)
    for k, context in enumerate(part.prompts.model_contexts):
        suffix_NxS = tokens_NxT[:, context : context + SUFFIX_LENGTH]
        reproduced_N = (generated_NxKxS[:, k] == suffix_NxS).all(axis=1)
        differs_N = reproduced_N != answers.extracted[:, k]
        sure_N = differs_N & (np.abs(answers.min_margin[:, k]) > NEAR_TIE)
        if sure_N.any():
            row = int(sure_N.argmax())
            window_id = part.prompts.windows["window_id"][part.start + row]
            raise RunError(
                f"model {part.model.name!r}, window_id={window_id}, context "
                f"{part.prompts.contexts[k]}: decoding and the teacher-forced pass "
                f"disagree although the margin is {answers.min_margin[row, k]:.3g}: "
                "please report this as a defect"
            )
    return generated_NxKxS


def _summarize(rows: polars.DataFrame, plan: SweepPlan) -> None:
    """Prints what was found, a line for each model."""
    near = polars.col("min_margin").abs() < NEAR_TIE
    summary = rows.group_by("model", maintain_order=True).agg(
        polars.len().alias("windows"),
        polars.col("extracted").sum(),
        near.sum().alias("near"),
        polars.col("tie").sum(),
        polars.col("min_margin").null_count().alias("unknown"),
    )
    for row in summary.iter_rows(named=True):
        ties = (
            "margins not recorded"
            if row["unknown"]
            else f"{row['near']} within {NEAR_TIE:g} of another verdict, {row['tie']} "
            "exact ties"
        )
        print(
            f"{row['model']}: {row['extracted']:,} of {row['windows']:,} extractable "
            f"({row['extracted'] / row['windows']:.2%}); {ties}"
        )
    if plan.config.decode:
        _summarize_decoding(rows, plan)


def _summarize_decoding(rows: polars.DataFrame, plan: SweepPlan) -> None:
    windows = plan.windows.windows.select("window_id", "tokens")
    suffix = polars.col("tokens").list.slice(polars.col("context"), SUFFIX_LENGTH)
    joined = rows.join(windows, on="window_id", how="left")
    differing = joined.filter(
        (suffix == polars.col("generated")) != polars.col("extracted")
    )
    print(
        f"Decoding and teacher forcing agree on {len(rows) - len(differing):,} of "
        f"{len(rows):,} verdicts"
    )
    for row in differing.head(10).iter_rows(named=True):
        print(
            f"  {row['model']}, window {row['window_id']}, context {row['context']}: "
            f"margin {row['min_margin']:.2e}"
        )


if __name__ == "__main__":
    config_flags.DEFINE_config_file(
        "config", help_string="A file of experiments/extraction/configs/."
    )
    command_line.run(
        main, config_keys=[f.name for f in dataclasses.fields(SweepConfig)]
    )
