"""What a sweep will do, settled and checked before the first model is loaded."""

import dataclasses
import pathlib
from importlib import metadata
from typing import Any

import jax
import numpy as np
import polars

from experiments.errors import UsageError
from experiments.extraction import (
    corpus_folder,
    evaluation_set,
    sweep_checks,
    sweep_models,
    sweep_questions,
)
from experiments.extraction.corpus_folder import Corpus
from experiments.extraction.evaluation_set import EvaluationSet
from experiments.extraction.sweep_config import SweepConfig
from experiments.extraction.sweep_models import SweptModel
from experiments.extraction.sweep_questions import Question
from experiments.extraction.token_sources import TOKENS
from experiments.extraction.verdicts import SUFFIX_LENGTH

# A part of the records is so many batches: what a killed sweep loses at most.
_BATCHES_PER_PART = 16


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """One model's share of the work that is finished or not: some rows of a question.

    Attributes:
      name: Names it among the parts of the sweep.
      model: Who is asked.
      question: What is asked.
      start: The first row of the question's windows.
      stop: One more than the last.
    """

    name: str
    model: SweptModel
    question: Question
    start: int
    stop: int

    @property
    def num_records(self) -> int:
        """One for each window and context."""
        return (self.stop - self.start) * len(self.question.contexts)

    @property
    def windows(self) -> polars.DataFrame:
        """Its rows of the question's windows."""
        return self.question.windows[self.start : self.stop]

    def tokens(self) -> np.ndarray:
        """The ids as i32[N, T], T being what a model reads and predicts."""
        tokens = self.windows["tokens"].cast(polars.List(polars.Int32))
        tokens_NxL = tokens.list.to_array(self.question.length).to_numpy()
        return self.question.read(tokens_NxL)


@dataclasses.dataclass(frozen=True)
class SweepPlan:
    """A sweep.

    Attributes:
      config: As the user gave it.
      windows: The evaluation set.
      models: In the order of their records.
      questions: What each model is asked, by length.
      notes: What is left out, a line each.
      corpus: Where generated suffixes are looked up, or None.
    """

    config: SweepConfig
    windows: EvaluationSet
    models: tuple[SweptModel, ...]
    questions: tuple[Question, ...]
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
            "masking": self.config.masking,
            "suffix_length": None if self.config.masking else SUFFIX_LENGTH,
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
                name=f"{i:03d}-{question.name}-{start:09d}",
                model=model,
                question=question,
                start=start,
                stop=min(start + rows, len(question.windows)),
            )
            for question in self.questions
            for start in range(0, len(question.windows), rows)
        ]


def make_plan(config: SweepConfig) -> SweepPlan:
    """Reads the windows and the models' configs, and checks that they fit.

    Raises:
      UsageError: They do not, or are not there.
      RunError: A file is damaged.
    """
    windows = evaluation_set.load(config.windows)
    questions, notes = sweep_questions.make(config, windows)
    corpus = _corpus(config, windows) if config.corpus else None
    models = sweep_models.describe(config.models, config.baselines)
    sweep_checks.check(models, questions, windows, config)
    return SweepPlan(config, windows, models, questions, notes, corpus)


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
