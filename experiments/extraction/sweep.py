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

With decode=True the 50 tokens are generated as well, and compared with the verdict.
They are computed in another order, so where logits are equal up to rounding the two may
differ; any other difference stops the sweep. How near the generated tokens come to the
true ones is recorded and, given the corpus, whether they occur anywhere in it.

With beams=B the most likely continuation that a search with B beams finds is recorded
too, and whether it is the true one (ibid., Section 4.5). With samples=N so many
continuations are drawn at random, by `temperature` and `top_k`. How likely the true one
is to be drawn takes no draws, but one teacher-forced pass (see sampled_decoding.py).

T5 models continue no prompts. With masking=iid or masking=spans some tokens of every
window are dropped, and a window counts as extractable if greedy decoding fills all
blanks exactly (ibid., Section 5.1; see span_corruption.py and infilling.py).

The folder holds config.json (with what was swept, by hashes), records.parquet,
clusters.parquet (which windows lie in one repeated passage) and metrics.jsonl (how long
each part took). The same command with the same `out` continues a sweep that was
stopped, to the same records, bit for bit, on the same machine and versions.
"""

import dataclasses
import inspect
import json
import pathlib
import shutil
import time
from typing import Any

import jax
import polars
import tqdm
from ml_collections import config_flags

from experiments import command_line, models, run_folder
from experiments.errors import RunError, UsageError
from experiments.extraction import (
    continuation_answers,
    decoded_measures,
    infilling_answers,
    lookup,
    records,
    stored_suffix_array,
    sweep_config,
    sweep_plan,
)
from experiments.extraction.answers import Answer
from experiments.extraction.asking import Asker
from experiments.extraction.lookup import Lookup
from experiments.extraction.records import Parts
from experiments.extraction.sweep_config import SweepConfig
from experiments.extraction.sweep_models import SweptModel
from experiments.extraction.sweep_plan import Part, SweepPlan

CLUSTERS = "clusters.parquet"
# Of each part; metrics.jsonl and the last lines count all.
_PRINTED_NEAR_TIES = 3


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
        _check_same_inputs(folder, plan.record())
        run_folder.claim(folder, plan.record())
        if (folder / records.RECORDS).exists():
            # A sweep may have been stopped between the merge and this.
            shutil.rmtree(folder / records.PARTS, ignore_errors=True)
            print(f"Already finished: {folder}")
        else:
            _sweep_in(folder, plan)
        _summarize(folder, plan)
    return folder


def _check_same_inputs(folder: pathlib.Path, record: dict[str, Any]) -> None:
    """Raises `UsageError` if `folder` is of the same config with other inputs."""
    path = folder / run_folder.CONFIG
    try:
        before = json.loads(path.read_text()) if path.exists() else {}
        derived = before["derived"] if set(before) == set(record) else {}
        same_config = all(before[k] == record[k] for k in record if k != "derived")
        if not derived or not same_config:
            return
    except (ValueError, TypeError, KeyError):
        # Not the config of a sweep: claiming the folder says so.
        return
    changed = [
        key for key, value in record["derived"].items() if derived.get(key) != value
    ]
    if changed:
        raise UsageError(
            f"config.out={str(folder)!r} holds a sweep of the same config with other "
            f"{', '.join(changed)}: give another --config.out"
        )


def _sweep_in(folder: pathlib.Path, plan: SweepPlan) -> None:
    for note in plan.notes:
        print(note)
    searched = _lookup(plan)
    clusters = plan.windows.windows.select("window_id", "cluster")
    records.write_parquet(clusters, folder / CLUSTERS)
    finished = Parts(folder)
    _repair_metrics(folder)
    parts = {model.name: plan.parts(model) for model in plan.models}
    missing = {
        name: [part for part in own if part.name not in finished]
        for name, own in parts.items()
    }
    num_left, total = _num_records(missing), _num_records(parts)
    with tqdm.tqdm(
        total=total, initial=total - num_left, unit="window", smoothing=0.1
    ) as progress_bar:
        for model in plan.models:
            progress_bar.set_description_str(model.name)
            _ask(model, missing[model.name], folder, plan, finished, progress_bar)
    rows = records.merge(
        [finished.read(part.name) for own in parts.values() for part in own],
        list(parts),
    )
    if len(rows) != total:
        raise RunError(
            f"{folder / records.PARTS} holds {len(rows):,} records, expected "
            f"{total:,}: delete it, and sweep again"
        )
    if plan.config.decode:
        rows = decoded_measures.add(rows, plan.windows.windows, searched)
    records.write_parquet(rows, folder / records.RECORDS)
    finished.remove()


def _lookup(plan: SweepPlan) -> Lookup | None:
    """The corpus, if there is one, ready to be searched."""
    corpus = plan.corpus
    if corpus is None:
        return None
    folder = stored_suffix_array.folder_of(corpus)
    positions_R = stored_suffix_array.load(corpus, folder)
    return lookup.prepare(
        corpus.tokens_N, corpus.eos_id, corpus.vocabulary_size, positions_R
    )


def _repair_metrics(folder: pathlib.Path) -> None:
    """Takes out a last row that was cut short, so that others can follow."""
    rows = run_folder.read_metrics(folder)
    text = "".join(f"{json.dumps(row)}\n" for row in rows)
    run_folder.write_atomically(folder / run_folder.METRICS, text)


def _num_records(parts: dict[str, list[Part]]) -> int:
    return sum(part.num_records for own in parts.values() for part in own)


def _ask(
    swept: SweptModel,
    parts: list[Part],
    folder: pathlib.Path,
    plan: SweepPlan,
    finished: Parts,
    progress_bar: tqdm.tqdm,
) -> None:
    """Writes the parts of one model, which is in memory meanwhile."""
    if not parts:
        return
    config = plan.config
    model, params = models.load(swept.folder)
    asker = Asker(model, params, config.batch_size)
    for part in parts:
        start, compiled = time.perf_counter(), asker.compile_seconds
        answer = _answer(asker, part, config, progress_bar)
        compile_seconds = asker.compile_seconds - compiled
        for line in answer.near_ties[:_PRINTED_NEAR_TIES]:
            progress_bar.write(f"near-tie: {line}")
        metrics = {
            "part": part.name,
            "model": swept.name,
            "windows": part.num_records,
            "seconds": time.perf_counter() - start - compile_seconds,
            "compile_seconds": compile_seconds,
            "decoding_differs": len(answer.near_ties),
        }
        # First: of a part that is asked again, the last row counts.
        run_folder.append_metrics(folder, metrics)
        finished.write(part.name, answer.rows)


def _answer(
    asker: Asker, part: Part, config: SweepConfig, progress_bar: tqdm.tqdm
) -> Answer:
    try:
        with jax.default_matmul_precision(config.matmul_precision):
            ask = infilling_answers if config.masking else continuation_answers
            return ask.answer(asker, part, config, progress_bar.update)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise RunError(
            f"model {part.model.name!r} and {config.batch_size} windows of "
            f"{part.question.num_positions} tokens take more memory than there is: "
            f"lower --config.batch_size{' or --config.beams' if config.beams else ''} "
            "(finished parts belong to the larger one, so give another --config.out "
            "too)"
        ) from error


def _summarize(folder: pathlib.Path, plan: SweepPlan) -> None:
    """Prints what was found, a line for each model."""
    config = plan.config
    near = polars.col("min_margin").abs() <= config.near_tie
    measures = {
        "anywhere": (bool(config.corpus), polars.col("anywhere").sum()),
        "beam_extracted": (config.beams > 0, polars.col("beam_extracted").sum()),
        "beam_identical": (config.beams > 0, polars.col("beam_identical").mean()),
        "drawn": (config.samples > 0, (polars.col("samples_extracted") > 0).sum()),
    }
    found = (
        polars.scan_parquet(folder / records.RECORDS)
        .group_by("model")
        .agg(
            polars.len().alias("windows"),
            polars.col("extracted").sum(),
            near.sum().alias("near"),
            polars.col("tie").sum(),
            **{name: measure for name, (known, measure) in measures.items() if known},
        )
        .collect()
    )
    metrics = {row["part"]: row for row in run_folder.read_metrics(folder)}
    for model in plan.models:
        row = found.row(by_predicate=polars.col("model") == model.name, named=True)
        own = [m for m in metrics.values() if m["model"] == model.name]
        print(_found(model.name, row, config) + _speed(own))
    if config.decode:
        differing = sum(m["decoding_differs"] for m in metrics.values())
        total = sum(found["windows"])
        print(
            f"Decoding and teacher forcing: {total - differing:,} of {total:,} windows "
            f"agree, the others within {config.near_tie:g}"
        )


def _found(name: str, row: dict[str, Any], config: SweepConfig) -> str:
    """What is known of one model."""
    what = "filled without a mistake" if config.masking else "extractable"
    parts = [
        f"{name}: {row['extracted']:,} of {row['windows']:,} windows {what} "
        f"({row['extracted'] / row['windows']:.2%})"
    ]
    if config.corpus:
        parts.append(f"{row['anywhere']:,} found anywhere")
    if config.beams:
        parts.append(
            f"{row['beam_extracted']:,} by the best of {config.beams} beams, which is "
            f"the greedy continuation in {row['beam_identical']:.2%}"
        )
    if config.samples:
        parts.append(f"{row['drawn']:,} among {config.samples:,} draws")
    if not config.verdicts_only:
        parts.append(
            f"{row['near']:,} verdicts within {config.near_tie:g}, {row['tie']:,} "
            "exact ties"
        )
    return "; ".join(parts)


def _speed(metrics: list[dict[str, Any]]) -> str:
    seconds = sum(m["seconds"] for m in metrics)
    if not seconds:
        return ""
    rate = sum(m["windows"] for m in metrics) / seconds
    compiling = sum(m["compile_seconds"] for m in metrics)
    return f"; {rate:,.1f} windows/s after {compiling:.1f} s of compiling"


if __name__ == "__main__":
    keys = inspect.getdoc(SweepConfig)
    config_flags.DEFINE_config_file(
        "config", help_string=f"A file of experiments/extraction/configs/. {keys}"
    )
    command_line.run(
        main, config_keys=[f.name for f in dataclasses.fields(SweepConfig)]
    )
