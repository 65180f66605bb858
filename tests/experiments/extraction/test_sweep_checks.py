"""Whether models can be asked; what T5 models are checked for is in
test_infilling_answers.py, and how many tokens there are to choose from in
test_continuation_answers.py.
"""

import functools
import shutil

import numpy as np
import pytest
import tokenizers

from experiments.errors import UsageError
from experiments.extraction import byte_pairs
from tests.experiments.extraction import planned_sweeps
from tests.experiments.extraction.known_windows import GOLDEN
from tests.experiments.extraction.planned_sweeps import random_windows


@pytest.fixture
def plan(tmp_path):
    """`(windows_by_length, **config) -> SweepPlan` for the golden GPT-2."""
    return functools.partial(planned_sweeps.plan, tmp_path)


def test_a_context_beyond_the_positions(plan):
    # 300 positions hold 251 tokens and 49 of the suffix: the 50th is never read.
    made = plan(random_windows(L301=1, L302=1), contexts=(251,))
    assert made.questions[0].num_positions == 300
    with pytest.raises(UsageError, match=r"'gpt2' takes at most 300 .*to at most 251"):
        plan(None, contexts=(252,))


def test_ids_beyond_the_vocabulary(plan):
    windows = random_windows(L60=3)
    windows[60][1, 59] = 128
    with pytest.raises(
        UsageError, match=r"'gpt2' has a vocabulary of 128 ids, but window 1 holds 128:"
    ):
        plan(windows)


def test_padded_rows_are_in_the_vocabulary(plan):
    windows = random_windows(L60=3)
    windows[60][1, 59] = 127
    assert len(plan(windows).questions) == 1


def test_the_separator_is_an_id_too(plan):
    with pytest.raises(UsageError, match=r"of 128 ids, but the separator is 128:"):
        plan(random_windows(L50=1), manifest={"eos_id": 128}, empty_prompt="bos")


def tokenizer(path, *words):
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [])).save(str(path))
    return path


def test_tokenizers_must_mean_the_same(plan, tmp_path):
    ours = tokenizer(tmp_path / "ours.json", "a", "b", "c")
    manifest = {"tokenizer_fingerprint": byte_pairs.fingerprint(ours)}
    model = tmp_path / "model"
    shutil.copytree(GOLDEN / "gpt2", model)
    windows = {60: np.tile([0, 1], (1, 30))}
    # A model without a tokenizer is taken at its word.
    plan(windows, model, manifest, ours)
    for words in (("a", "b", "c"), ("a", "b", "x", "y")):
        # What counts are the ids in the windows, 0 and 1.
        tokenizer(model / "tokenizer.json", *words)
        assert plan(None, model).models[0].name == "model"
    tokenizer(model / "tokenizer.json", "a", "x", "b")
    with pytest.raises(UsageError, match=r"the id 1 is 'b' there and 'x' in the model"):
        plan(None, model)
    (tmp_path / "windows" / "tokenizer.json").unlink()
    with pytest.raises(
        UsageError, match=r"'model' has another tokenizer .*--tokenizer="
    ):
        plan(None, model)
