"""What a sweep will do, settled and checked before the first model is loaded."""

import collections
import dataclasses
import hashlib
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import polars

from experiments.errors import UsageError
from experiments.extraction import byte_pairs, evaluation_set
from experiments.extraction.evaluation_set import EvaluationSet
from experiments.extraction.sweep_config import SweepConfig
from experiments.extraction.verdicts import SUFFIX_LENGTH
from experiments.models import language_models, registry, safetensors_folder

# A part of the records is so many batches: what a killed sweep loses at most.
BATCHES_PER_PART = 16


@dataclasses.dataclass(frozen=True)
class SweptModel:
    """A model of the sweep.

    Attributes:
      name: The last part of its folder, longer where two would be the same.
      folder: As the config has it.
      params: Number of parameters.
      baseline: It has not been trained on the corpus.
      max_positions: The longest input it takes.
      vocabulary_size: Of its embedding; a padded vocabulary's extra ids take part in
        the argmax, as they do in other implementations.
      sha256: Of its weights and its config.
    """

    name: str
    folder: str
    params: int
    baseline: bool
    max_positions: int
    vocabulary_size: int
    sha256: str

    def record(self) -> dict[str, Any]:
        """What config.json says about it."""
        return {
            "model": self.name,
            "folder": self.folder,
            "params": self.params,
            "baseline": self.baseline,
            "sha256": self.sha256,
        }


@dataclasses.dataclass(frozen=True)
class Prompts:
    """Windows of one length, and where they are cut into prompt and suffix.

    Attributes:
      length: Of the windows, in tokens.
      contexts: Lengths of the prompts, ascending; one pass of a model serves them all.
      windows: Their rows of windows.parquet.
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
        """Tokens that the model sees before the suffix."""
        return self.contexts if self.first_token is None else (1,)

    @property
    def num_positions(self) -> int:
        """Tokens that are fed to the model, the last suffix token not being one."""
        return max(self.model_contexts) + SUFFIX_LENGTH - 1

    def tokens(self) -> np.ndarray:
        """The ids as i32[N, T], T being what a model reads and predicts."""
        tokens = (
            self.windows["tokens"]
            .cast(polars.List(polars.Int32))
            .list.to_array(self.length)
        )
        tokens_NxL = tokens.to_numpy()
        if self.first_token is not None:
            tokens_NxL = np.insert(tokens_NxL, 0, self.first_token, axis=1)
        return np.ascontiguousarray(tokens_NxL[:, : self.num_positions + 1])


@dataclasses.dataclass(frozen=True)
class SweepPlan:
    """A sweep.

    Attributes:
      config: As the user gave it.
      windows: The evaluation set.
      models: In the order of their records.
      prompts: What each model is asked.
      num_skipped: Windows with an empty prompt that are left out.
    """

    config: SweepConfig
    windows: EvaluationSet
    models: tuple[SweptModel, ...]
    prompts: tuple[Prompts, ...]
    num_skipped: int

    def record(self) -> dict[str, Any]:
        """What config.json says."""
        record = dataclasses.asdict(self.config)
        del record["out"]
        derived = {
            "windows_sha256": self.windows.sha256,
            "suffix_length": SUFFIX_LENGTH,
            "precision": self.config.matmul_precision,
            "models": [model.record() for model in self.models],
        }
        # As JSON has it, so that it compares equal when it is read back.
        return {
            k: list(v) if isinstance(v, tuple) else v for k, v in record.items()
        } | {"derived": derived}


def make_plan(config: SweepConfig) -> SweepPlan:
    """Reads the windows and the models' configs, and checks that they fit.

    Raises:
      UsageError: They do not, or are not there.
      RunError: A file is damaged.
    """
    windows = evaluation_set.load(config.windows)
    prompts, num_skipped = _prompts(config, windows)
    models = _models(config)
    for model in models:
        _check_fits(model, prompts, windows)
        _check_tokenizer(model, windows)
    return SweepPlan(config, windows, models, prompts, num_skipped)


def _prompts(
    config: SweepConfig, windows: EvaluationSet
) -> tuple[tuple[Prompts, ...], int]:
    chosen = _sampled(windows.windows, config)
    prompts: list[Prompts] = []
    num_skipped = 0
    for (length,), rows in chosen.group_by("length", maintain_order=True):
        contexts = [
            context
            for context in sorted(config.contexts or (int(length) - SUFFIX_LENGTH,))
            if 0 <= context <= int(length) - SUFFIX_LENGTH
        ]
        if contexts and contexts[0] == 0:
            del contexts[0]
            if config.empty_prompt == "skip":
                num_skipped += len(rows)
            else:
                prompts.append(Prompts(int(length), (0,), rows, _separator(windows)))
        if contexts:
            prompts.append(Prompts(int(length), tuple(contexts), rows, None))
    if not prompts:
        lengths = sorted(set(chosen["length"].to_list()))
        raise UsageError(
            f"config.windows={config.windows!r} has windows of {lengths} tokens, none "
            f"long enough for a prompt of {list(config.contexts) or 1} and a suffix of "
            f"{SUFFIX_LENGTH} tokens: build longer windows, lower --config.contexts, "
            "or set --config.empty_prompt=bos for windows of 50 tokens"
        )
    return tuple(prompts), num_skipped


def _sampled(windows: polars.DataFrame, config: SweepConfig) -> polars.DataFrame:
    """At most `windows_per_bucket` windows of each length and bucket, by window_id."""
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


def _models(config: SweepConfig) -> tuple[SweptModel, ...]:
    folders = [folder for folder in (*config.models, *config.baselines) if folder]
    for folder, times in collections.Counter(folders).items():
        if times > 1:
            raise UsageError(
                f"model folder {folder!r} is given {times} times in config.models and "
                "config.baselines: give it once"
            )
    members = {folder for folder in config.models if folder}
    return tuple(
        _model(folder, name, baseline=folder not in members)
        for folder, name in zip(folders, model_names(folders), strict=True)
    )


def _model(folder: str, name: str, *, baseline: bool) -> SweptModel:
    path = language_models.model_folder(folder)
    model = language_models.architecture(path)
    shapes = jax.eval_shape(
        model.init, jax.random.key(0), jax.ShapeDtypeStruct((1, 1), jnp.int32)
    )
    files = sorted({path / "config.json", *safetensors_folder.locate(path).values()})
    return SweptModel(
        name=name,
        folder=folder,
        params=registry.num_parameters(shapes),
        baseline=baseline,
        max_positions=model.config.max_positions,
        vocabulary_size=model.config.vocabulary_size,
        sha256=_sha256(files),
    )


def model_names(folders: Sequence[str]) -> list[str]:
    """Short names that tell the folders apart: as many last parts as that takes.

    Example:
      >>> model_names(["a/gpt2", "b/gpt2", "b/pythia"])
      ['a/gpt2', 'b/gpt2', 'pythia']
    """
    parts = [pathlib.Path(folder).expanduser().resolve().parts for folder in folders]

    def name(own: tuple[str, ...]) -> str:
        others = [other for other in parts if other != own]
        for length in range(1, len(own) + 1):
            if all(other[-length:] != own[-length:] for other in others):
                return "/".join(own[-length:])
        return "/".join(own)

    return [name(own) for own in parts]


def _check_fits(
    model: SweptModel, prompts: Sequence[Prompts], windows: EvaluationSet
) -> None:
    longest = max(prompts, key=lambda p: p.num_positions)
    if longest.num_positions > model.max_positions:
        raise UsageError(
            f"model {model.name!r} takes {model.max_positions} tokens, but a prompt of "
            f"{longest.contexts[-1]} and {SUFFIX_LENGTH - 1} suffix tokens are "
            f"{longest.num_positions}: give --config.contexts of at most "
            f"{model.max_positions - SUFFIX_LENGTH + 1}, or leave the model out"
        )
    largest = max(int(p.windows["tokens"].list.max().max()) for p in prompts)  # type: ignore[arg-type]
    if largest >= model.vocabulary_size:
        raise UsageError(
            f"model {model.name!r} has a vocabulary of {model.vocabulary_size} ids, "
            f"but the windows hold the id {largest}: give windows of a corpus that was "
            "tokenised for this model"
        )


def _check_tokenizer(model: SweptModel, windows: EvaluationSet) -> None:
    """Compares the tokenizers, where both sides have one."""
    ours = language_models.model_folder(model.folder) / language_models.TOKENIZER
    theirs = windows.manifest.get("tokenizer_fingerprint")
    if theirs is None or not ours.is_file():
        return
    if byte_pairs.fingerprint(ours) != theirs:
        raise UsageError(
            f"model {model.name!r} has another tokenizer ({ours}) than the corpus of "
            "the windows: build the evaluation set with --tokenizer="
            f"{ours.parent}, or leave the model out"
        )


def _sha256(files: Sequence[pathlib.Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
