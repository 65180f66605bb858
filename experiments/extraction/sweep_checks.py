"""Whether the models of a sweep can be asked what it asks, before any is loaded."""

import pathlib
from collections.abc import Sequence

import numpy as np
import polars

from experiments.errors import UsageError
from experiments.extraction import (
    beam_search,
    byte_pairs,
    evaluation_set,
    infilling,
)
from experiments.extraction.evaluation_set import EvaluationSet
from experiments.extraction.sampled_decoding import SamplingScheme
from experiments.extraction.sweep_blanks import BlankedWindows
from experiments.extraction.sweep_config import SweepConfig
from experiments.extraction.sweep_models import SweptModel
from experiments.extraction.sweep_prompts import Prompts
from experiments.extraction.sweep_questions import Question
from experiments.extraction.verdicts import SUFFIX_LENGTH
from experiments.models import language_models
from experiments.models.decoder_config import DecoderConfig
from experiments.models.t5_config import T5Config


def check(
    models: Sequence[SweptModel],
    questions: Sequence[Question],
    windows: EvaluationSet,
    config: SweepConfig,
) -> None:
    """Raises `UsageError` about the first model that does not fit."""
    _check_kinds(models, config)
    for model in models:
        if isinstance(model.config, DecoderConfig):
            _check_positions(model, model.config, questions)
            _check_choices(model, config)
        else:
            _check_sentinels(model, model.config, questions, config)
        _check_ids(model, questions)
        _check_tokenizer(model, questions, windows, pathlib.Path(config.windows))


def _check_kinds(models: Sequence[SweptModel], config: SweepConfig) -> None:
    """T5 models fill blanks, all others continue prompts."""
    t5 = [m.name for m in models if isinstance(m.config, T5Config)]
    others = [m.name for m in models if not isinstance(m.config, T5Config)]
    if t5 and others:
        raise UsageError(
            f"{t5[0]!r} is a T5, which fills blanks, and {others[0]!r} is none: sweep "
            "the T5 models apart, with --config.masking=iid and another --config.out"
        )
    if t5 and not config.masking:
        raise UsageError(
            f"model {t5[0]!r} is a T5, which fills blanks and continues nothing: give "
            "--config.masking=iid (or spans), or leave the model out"
        )
    if others and config.masking:
        raise UsageError(
            f"config.masking={config.masking!r} is for T5 models, but model "
            f"{others[0]!r} is none: give --config.masking= to have prompts "
            "continued, or leave the model out"
        )


def _check_positions(
    model: SweptModel, architecture: DecoderConfig, questions: Sequence[Question]
) -> None:
    longest = max(questions, key=lambda q: q.num_positions)
    limit = architecture.max_positions
    if longest.num_positions > limit:
        raise UsageError(
            f"model {model.name!r} takes at most {limit} tokens (its max_positions), "
            f"but context {longest.contexts[-1]} and {SUFFIX_LENGTH - 1} suffix tokens "
            f"are {longest.num_positions}: lower --config.contexts to at most "
            f"{limit - SUFFIX_LENGTH + 1}, or leave the model out"
        )


def _check_choices(model: SweptModel, config: SweepConfig) -> None:
    """There are as many tokens as the config would choose from."""
    size = model.config.vocabulary_size
    try:
        if config.beams:
            beam_search.check_num_beams(config.beams, size)
        SamplingScheme(config.temperature, config.top_k).check(size)
    except UsageError as error:
        raise UsageError(f"model {model.name!r}: {error}") from error


def _check_sentinels(
    model: SweptModel,
    architecture: T5Config,
    questions: Sequence[Question],
    config: SweepConfig,
) -> None:
    """Each window has enough of them, and none among its tokens."""
    sentinels, size = architecture.sentinels, architecture.vocabulary_size
    if sentinels.first >= size:
        raise UsageError(
            f"model {model.name!r} has a vocabulary of {size} ids, but its first "
            f"sentinel is {sentinels.first}: set first_sentinel and num_sentinels in "
            "its config.json, or leave the model out"
        )
    for asked in questions:
        if not isinstance(asked, BlankedWindows):
            continue
        try:
            infilling.check_windows(
                asked.windows["tokens"].list.to_array(asked.length).to_numpy(),
                asked.windows["window_id"].to_numpy(),
                seed=config.seed,
                masking=asked.masking,
                sentinels=sentinels,
            )
        except UsageError as error:
            raise UsageError(f"model {model.name!r}: {error}") from error


def _check_ids(model: SweptModel, questions: Sequence[Question]) -> None:
    """Also of tokens beyond the suffix: they tell the same of the corpus."""
    limit = model.config.vocabulary_size
    for asked in questions:
        largest_N = asked.windows["tokens"].list.max().to_numpy()
        row = int(np.argmax(largest_N))
        if largest_N[row] >= limit:
            holds = f"window {asked.windows['window_id'][row]} holds {largest_N[row]}"
        elif isinstance(asked, Prompts) and (asked.first_token or 0) >= limit:
            holds = f"the separator is {asked.first_token}"
        else:
            continue
        raise UsageError(
            f"model {model.name!r} has a vocabulary of {limit} ids, but {holds}: give "
            "windows of a corpus that was tokenised for this model, or leave it out"
        )


def _check_tokenizer(
    model: SweptModel,
    questions: Sequence[Question],
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
    ids = polars.concat([asked.windows["tokens"].explode() for asked in questions])
    for i in ids.unique().sort():
        expected, got = in_windows.id_to_token(i), in_model.id_to_token(i)
        if expected != got:
            raise UsageError(
                f"{message}: the id {i} is {expected!r} there and {got!r} in the "
                f"model; {remedy}"
            )
