"""What a sweep will do, settled and checked before the first model is loaded."""

import dataclasses
import pathlib
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import jax
import numpy as np
import polars

from experiments.errors import UsageError
from experiments.extraction import (
    byte_pairs,
    corpus_folder,
    evaluation_set,
    near_misses,
    sweep_models,
    window_measures,
)
from experiments.extraction.corpus_folder import Corpus
from experiments.extraction.evaluation_set import EvaluationSet
from experiments.extraction.sweep_config import BOS, SweepConfig
from experiments.extraction.sweep_models import SweptModel
from experiments.extraction.token_sources import TOKENS
from experiments.extraction.verdicts import SUFFIX_LENGTH
from experiments.models import language_models

# A part of the records is so many batches: what a killed sweep loses at most.
_BATCHES_PER_PART = 16


@dataclasses.dataclass(frozen=True, eq=False)
class Prompts:
    """Windows of one length, and where they are cut into prompt and suffix.

    Attributes:
      length: Of the windows, in tokens.
      contexts: Lengths of the prompts, ascending; one pass of a model serves them all.
      windows: Their rows of windows.parquet, and how plain their text is.
      first_token: Put before each window, for prompts that would be empty; None else.
    """

    length: int
    contexts: tuple[int, ...]
    windows: polars.DataFrame
    first_token: int | None

    @property
    def name(self) -> str:
        """Distinguishes the prompts of one sweep."""
        return f"{self.length}" if self.first_token is None else f"{self.length}-bos"

    @property
    def model_contexts(self) -> tuple[int, ...]:
        """Tokens that the model sees before the suffix, for each of the contexts."""
        return self.contexts if self.first_token is None else (1,)

    @property
    def num_positions(self) -> int:
        """Tokens that are fed to the model: the last suffix token is not one."""
        return max(self.model_contexts) + SUFFIX_LENGTH - 1


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """One model's share of the work that is finished or not: rows of some prompts.

    Attributes:
      name: Names it among the parts of the sweep.
      model: Who is asked.
      prompts: What is asked.
      start: The first row of the prompts' windows.
      stop: One more than the last.
    """

    name: str
    model: SweptModel
    prompts: Prompts
    start: int
    stop: int

    @property
    def num_records(self) -> int:
        """One for each window and context."""
        return (self.stop - self.start) * len(self.prompts.contexts)

    @property
    def windows(self) -> polars.DataFrame:
        """Its rows of windows.parquet."""
        return self.prompts.windows[self.start : self.stop]

    def tokens(self) -> np.ndarray:
        """The ids as i32[N, T], T being what a model reads and predicts."""
        prompts = self.prompts
        tokens = self.windows["tokens"].cast(polars.List(polars.Int32))
        tokens_NxT = tokens.list.to_array(prompts.length).to_numpy()
        if prompts.first_token is not None:
            tokens_NxT = np.insert(tokens_NxT, 0, prompts.first_token, axis=1)
        return np.ascontiguousarray(tokens_NxT[:, : prompts.num_positions + 1])


@dataclasses.dataclass(frozen=True)
class SweepPlan:
    """A sweep.

    Attributes:
      config: As the user gave it.
      windows: The evaluation set.
      models: In the order of their records.
      prompts: What each model is asked, by length.
      notes: What is left out, a line each.
      corpus: Where generated suffixes are looked up, or None.
    """

    config: SweepConfig
    windows: EvaluationSet
    models: tuple[SweptModel, ...]
    prompts: tuple[Prompts, ...]
    notes: tuple[str, ...]
    corpus: Corpus | None

    def record(self) -> dict[str, Any]:
        """What config.json says."""
        config = dataclasses.asdict(self.config)
        del config["out"]
        # As JSON has it, so that it compares equal when it is read back.
        record = {k: list(v) if isinstance(v, tuple) else v for k, v in config.items()}
        record["derived"] = {
            "windows_sha256": self.windows.sha256,
            "sample": self.windows.manifest.get("sample"),
            "corpus_sha256": self.corpus and self.corpus.sha256,
            "suffix_length": SUFFIX_LENGTH,
            "precision": self.config.matmul_precision,
            "models": [model.record() for model in self.models],
            "device_kind": jax.devices()[0].device_kind,
            "jax": metadata.version("jax"),
        }
        return record

    def parts(self, model: SweptModel) -> list[Part]:
        """The parts of one model; the same for the same plan."""
        rows = _BATCHES_PER_PART * self.config.batch_size
        i = self.models.index(model)
        return [
            Part(
                name=f"{i:03d}-{prompts.name}-{start:09d}",
                model=model,
                prompts=prompts,
                start=start,
                stop=min(start + rows, len(prompts.windows)),
            )
            for prompts in self.prompts
            for start in range(0, len(prompts.windows), rows)
        ]


def make_plan(config: SweepConfig) -> SweepPlan:
    """Reads the windows and the models' configs, and checks that they fit.

    Raises:
      UsageError: They do not, or are not there.
      RunError: A file is damaged.
    """
    windows = evaluation_set.load(config.windows)
    prompts, notes = _prompts(config, windows)
    corpus = _corpus(config, windows) if config.corpus else None
    models = sweep_models.describe(config.models, config.baselines)
    for model in models:
        _check_positions(model, prompts)
        _check_ids(model, prompts)
        _check_tokenizer(model, prompts, windows, pathlib.Path(config.windows))
    return SweepPlan(config, windows, models, prompts, notes, corpus)


def _corpus(config: SweepConfig, windows: EvaluationSet) -> Corpus:
    """The corpus, which must be that of the windows."""
    path = pathlib.Path(config.corpus.removeprefix(TOKENS)).expanduser()
    corpus = corpus_folder.open_tokens(path, windows.manifest.get("eos_id"), "")
    expected = windows.manifest.get("corpus_sha256")
    if expected not in (None, corpus.sha256):
        raise UsageError(
            f"config.corpus={config.corpus!r} is not the corpus of the windows in "
            f"{config.windows!r} (sha256 {corpus.sha256[:12]}..., expected "
            f"{expected[:12]}...): give that one"
        )
    return corpus


def _prompts(
    config: SweepConfig, windows: EvaluationSet
) -> tuple[tuple[Prompts, ...], tuple[str, ...]]:
    chosen = _sampled(windows.windows, config)
    is_whitespace_V = _whitespace_tokens(pathlib.Path(config.windows).expanduser())
    prompts: list[Prompts] = []
    num_short = num_empty = 0
    for (length,), same_length in chosen.group_by("length", maintain_order=True):
        rows = window_measures.add(same_length, is_whitespace_V)
        longest = int(length) - SUFFIX_LENGTH
        wanted = sorted(config.contexts) or [longest]
        contexts = [context for context in wanted if 0 <= context <= longest]
        if not contexts:
            num_short += len(rows)
        if 0 in contexts and config.empty_prompt == BOS:
            prompts.append(Prompts(int(length), (0,), rows, _separator(windows)))
        elif 0 in contexts:
            num_empty += len(rows)
        prompted = tuple(context for context in contexts if context)
        if prompted:
            prompts.append(Prompts(int(length), prompted, rows, None))
    _check_contexts(config, prompts, chosen)
    notes = []
    if num_short:
        notes.append(
            f"{num_short:,} windows are left out: they are shorter than a prompt and a "
            f"suffix of {SUFFIX_LENGTH} tokens"
        )
    if num_empty:
        notes.append(
            f"{num_empty:,} windows are left out of context 0: their prompts are "
            "empty; --config.empty_prompt=bos would prompt with the separator"
        )
    return tuple(prompts), tuple(notes)


def _whitespace_tokens(folder: pathlib.Path) -> np.ndarray | None:
    """By the tokenizer of an evaluation set, if it has one."""
    path = folder / evaluation_set.TOKENIZER
    return near_misses.whitespace_tokens(path) if path.is_file() else None


def _sampled(windows: polars.DataFrame, config: SweepConfig) -> polars.DataFrame:
    """At most `windows_per_bucket` windows of each length and bucket, by window_id.

    Fewer windows are a part of more, with the same seed.
    """
    if config.windows_per_bucket is None:
        return windows.sort("length", "window_id")
    draws = np.random.default_rng(config.seed).random(len(windows))
    rank = polars.col("draw").rank("ordinal").over("length", "bucket")
    return (
        windows.with_columns(draw=draws)
        .filter(rank <= config.windows_per_bucket)
        .drop("draw")
        .sort("length", "window_id")
    )


def _separator(windows: EvaluationSet) -> int:
    eos_id = windows.manifest.get("eos_id")
    if eos_id is None:
        raise UsageError(
            "config.empty_prompt='bos' needs the separator of the corpus, and the "
            "evaluation set has none: set --config.empty_prompt=skip"
        )
    return int(eos_id)


def _check_contexts(
    config: SweepConfig, prompts: Sequence[Prompts], chosen: polars.DataFrame
) -> None:
    """Every context that was asked for has windows, and there is some prompt."""
    lengths = sorted(set(chosen["length"].to_list()))
    longest = max(lengths, default=0) - SUFFIX_LENGTH
    unused = [context for context in config.contexts if context > longest]
    if unused:
        raise UsageError(
            f"config.contexts has {unused[0]}, but no window in {config.windows!r} has "
            f"so many tokens and a suffix of {SUFFIX_LENGTH} (they have {lengths}): "
            "lower --config.contexts, or build longer windows"
        )
    if not prompts:
        raise UsageError(
            f"config.windows={config.windows!r} has windows of {lengths} tokens, "
            f"none with a prompt before its suffix of {SUFFIX_LENGTH}: build longer "
            "windows, or set --config.empty_prompt=bos to prompt with the separator"
        )


def _check_positions(model: SweptModel, prompts: Sequence[Prompts]) -> None:
    longest = max(prompts, key=lambda p: p.num_positions)
    limit = model.config.max_positions
    if longest.num_positions > limit:
        raise UsageError(
            f"model {model.name!r} takes at most {limit} tokens (its max_positions), "
            f"but context {longest.contexts[-1]} and {SUFFIX_LENGTH - 1} suffix tokens "
            f"are {longest.num_positions}: lower --config.contexts to at most "
            f"{limit - SUFFIX_LENGTH + 1}, or leave the model out"
        )


def _check_ids(model: SweptModel, prompts: Sequence[Prompts]) -> None:
    """Also of tokens beyond the suffix: they tell the same of the corpus."""
    limit = model.config.vocabulary_size
    for asked in prompts:
        largest_N = asked.windows["tokens"].list.max().to_numpy()
        row = int(np.argmax(largest_N))
        if largest_N[row] >= limit:
            holds = f"window {asked.windows['window_id'][row]} holds {largest_N[row]}"
        elif (asked.first_token or 0) >= limit:
            holds = f"the separator is {asked.first_token}"
        else:
            continue
        raise UsageError(
            f"model {model.name!r} has a vocabulary of {limit} ids, but {holds}: give "
            "windows of a corpus that was tokenised for this model, or leave it out"
        )


def _check_tokenizer(
    model: SweptModel,
    prompts: Sequence[Prompts],
    windows: EvaluationSet,
    folder: pathlib.Path,
) -> None:
    """Compares the tokenizers, where both sides have one.

    Those of one family differ in tokens that they add (GPT-J's has 143 that GPT-2's has
    not), so what counts is what the ids in the windows mean.
    """
    theirs = language_models.model_folder(model.folder) / language_models.TOKENIZER
    fingerprint = windows.manifest.get("tokenizer_fingerprint")
    if fingerprint is None or not theirs.is_file():
        return
    if byte_pairs.fingerprint(theirs) == fingerprint:
        return
    ours = folder.expanduser() / evaluation_set.TOKENIZER
    message = (
        f"model {model.name!r} has another tokenizer ({theirs}) than the windows in "
        f"{str(folder)!r}"
    )
    remedy = (
        f"build the evaluation set with --tokenizer={theirs.parent}, or leave the "
        "model out"
    )
    if not ours.is_file():
        raise UsageError(f"{message}: {remedy}")
    in_windows, in_model = byte_pairs.open_file(ours), byte_pairs.open_file(theirs)
    ids = polars.concat([asked.windows["tokens"].explode() for asked in prompts])
    for i in ids.unique().sort():
        expected, got = in_windows.id_to_token(i), in_model.id_to_token(i)
        if expected != got:
            raise UsageError(
                f"{message}: the id {i} is {expected!r} there and {got!r} in the "
                f"model; {remedy}"
            )
