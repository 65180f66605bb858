"""The windows that a report shows, as data for its page: prompts, truths, answers."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl

from experiments.errors import UsageError
from experiments.extraction import (
    evaluation_set,
    report_page,
    selections,
    sweep_runs,
    token_texts,
)
from experiments.extraction.selections import Selection
from experiments.extraction.sweep_runs import SweepRuns

_LARGEST_FLOAT32 = float(np.finfo(np.float32).max)


@dataclasses.dataclass(frozen=True)
class Gallery:
    """Some of the prompts, and how each model continued them.

    Attributes:
      data: What page.js reads; JSON without NaN or infinities. Its keys:

        suffix_length: In tokens; null if blanks are filled in.
        models: name, params and baseline of each.
        rows: window_id, length, context, count and bucket of each prompt, the share of
          `whitespace` and the `entropy` of the window (null where not known), how many
          tokens are `targets`, and `answers`: for each model null (not asked), or
          whether it `extracted`, the `right` tokens, the least `margin`, the place of
          the first `mismatch`, how many tokens of its continuation are `matching`
          before the first that is not, and the `rest` of them from there; null where
          not known.
        selections: title, descending, rows (places in `rows`), and how many prompts
          there are in `all`.
        windows: The ids of the tokens of each window; null if not known.
        vocabulary: What each of the ids says; null if not known.
      notes: What a reader should know about the choice, a sentence each.
    """

    data: dict[str, Any]
    notes: tuple[str, ...]


def collect(runs: SweepRuns, limit: int, seed: int) -> Gallery:
    """Chooses at most `limit` prompts, and looks up what belongs to them.

    Args:
      runs: The sweeps.
      limit: A window at one context is one prompt.
      seed: Of the choice.

    Raises:
      RunError: A sweep or a tokenizer is damaged.
    """
    prompts = selections.prompts(runs.records, runs.models)
    found = selections.of_the_appendix(prompts, runs.models)
    places = selections.choose(prompts["bucket"].to_numpy(), found, limit, seed)
    chosen = prompts[places].select("window_id", "context", "length", "count", "bucket")
    plainness = prompts[places].select(pl.col("whitespace", "entropy").round(4))
    notes = [_about_the_choice(len(places), len(prompts), found, seed)]
    several = sum(not model.baseline for model in runs.models) > 1
    if several and not runs.masking and not selections.is_strict(prompts, runs.models):
        what = "*Only* by one model is by no other that was trained on the corpus."
        notes.append(f"{what} {report_page.PLAIN_RULE}")
    tokens, missing = _tokens(runs, chosen["window_id"])
    answers = _answers(runs, chosen, tokens)
    vocabulary, unnamed = _vocabulary(runs, tokens, answers)
    chosen = _with_targets(chosen, runs.records).hstack(plainness)
    data = {
        "suffix_length": runs.suffix_length,
        "models": [
            {"name": m.name, "params": m.params, "baseline": m.baseline}
            for m in runs.models
        ],
        "rows": [
            row | {"answers": own}
            for row, own in zip(chosen.iter_rows(named=True), answers, strict=True)
        ],
        "selections": [_selection(selection, places) for selection in found],
        "windows": tokens,
        "vocabulary": vocabulary,
    }
    return Gallery(data, (*notes, *missing, *unnamed))


def _with_targets(chosen: pl.DataFrame, records: pl.DataFrame) -> pl.DataFrame:
    keys = ["window_id", "context"]
    targets = records.group_by(keys).agg(targets=pl.col("num_targets").first())
    return chosen.join(targets, on=keys, how="left", maintain_order="left")


def _about_the_choice(
    shown: int, total: int, found: Sequence[Selection], seed: int
) -> str:
    if shown == total:
        return f"All {total:,} prompts are here; a prompt is a window at one context."
    some = "some of each selection, and the rest " if found else ""
    return (
        f"{shown:,} of {total:,} prompts are here (a prompt is a window at one "
        f"context): {some}evenly from the buckets of repetitions, drawn with seed "
        f"{seed}. They are examples; the figures and tables are about all prompts."
    )


def _selection(selection: Selection, places: np.ndarray) -> dict[str, Any]:
    return {
        "title": selection.title,
        "descending": selection.descending,
        "rows": np.flatnonzero(selection.selected_N[places]).tolist(),
        "all": int(selection.selected_N.sum()),
    }


def _tokens(
    runs: SweepRuns, window_ids: pl.Series
) -> tuple[dict[int, list[int]] | None, tuple[str, ...]]:
    """The tokens of windows, or None and the reason."""
    folder = pathlib.Path(runs.windows).expanduser()
    try:
        token_texts.check_windows(folder, runs.windows_sha256)
    except UsageError as error:
        return None, (f"Prompts and continuations are not known: {error}.",)
    return token_texts.tokens_of_windows(folder, window_ids.unique().to_list()), ()


def _vocabulary(
    runs: SweepRuns,
    tokens: dict[int, list[int]] | None,
    answers: Sequence[Sequence[dict[str, Any] | None]],
) -> tuple[dict[int, str] | None, tuple[str, ...]]:
    """What the ids on the page say, or None and the reason."""
    if tokens is None:
        return None, ()
    path = pathlib.Path(runs.windows).expanduser() / evaluation_set.TOKENIZER
    if not path.is_file():
        note = f"There is no {path}, so that tokens are shown by their ids."
        return None, (note,)
    ids = {i for window in tokens.values() for i in window}
    ids |= {i for own in answers for a in own if a for i in a["rest"] or ()}
    return token_texts.of_ids(path, sorted(ids)), ()


def _answers(
    runs: SweepRuns, chosen: pl.DataFrame, tokens: dict[int, list[int]] | None
) -> list[list[dict[str, Any] | None]]:
    """For each prompt what each model answered, None where it was not asked."""
    keys = ["model", "window_id", "context"]
    generated = sweep_runs.read_generated(runs, chosen)
    records = runs.records.join(chosen, on=keys[1:], how="semi").join(
        generated, on=keys, how="left"
    )
    known = {
        (row["model"], row["window_id"], row["context"]): row
        for row in records.iter_rows(named=True)
    }
    return [
        [
            _answer(row, tokens)
            if (row := known.get((model.name, window_id, context)))
            else None
            for model in runs.models
        ]
        for window_id, context in chosen.select(keys[1:]).iter_rows()
    ]


def _answer(row: dict[str, Any], tokens: dict[int, list[int]] | None) -> dict[str, Any]:
    margin = row["min_margin"]
    if margin is not None:
        # Nine digits tell all float32 apart, and JSON has no infinity.
        clipped = min(max(margin, -_LARGEST_FLOAT32), _LARGEST_FLOAT32)
        margin = float(f"{clipped:.9g}")
    matching, rest = _continuation(row, tokens)
    return {
        "extracted": row["extracted"],
        "right": row["tokens_correct"],
        "margin": margin,
        "mismatch": row["first_mismatch"],
        "matching": matching,
        "rest": rest,
    }


def _continuation(
    row: dict[str, Any], tokens: dict[int, list[int]] | None
) -> tuple[int | None, list[int] | None]:
    """How many tokens of the continuation match the truth, and what comes then.

    Without decoding, teacher forcing says as much: up to the first mismatch, greedy
    decoding sees what the model was given.
    """
    generated = row["generated"]
    if generated is not None and tokens is not None:
        start, end = row["context"], row["context"] + row["num_targets"]
        truth = tokens[row["window_id"]][start:end]
        pairs = enumerate(zip(generated, truth, strict=True))
        matching = next((i for i, (a, b) in pairs if a != b), row["num_targets"])
        return matching, generated[matching:]
    if row["extracted"]:
        return row["num_targets"], []
    return row["first_mismatch"], None
