import functools

import numpy as np
import pytest

from experiments.errors import UsageError
from tests.experiments.extraction import planned_sweeps
from tests.experiments.extraction.planned_sweeps import random_windows


@pytest.fixture
def plan(tmp_path):
    """`(windows_by_length, **config) -> SweepPlan` for the golden GPT-2."""
    return functools.partial(planned_sweeps.plan, tmp_path)


def asked(made):
    return [(p.length, p.contexts, len(p.windows)) for p in made.questions]


def test_by_default_all_but_the_suffix_is_prompt(plan):
    made = plan(random_windows(L100=3, L50=2, L60=4, L49=1))
    assert asked(made) == [(60, (10,), 4), (100, (50,), 3)]
    assert made.notes == (
        "1 windows are left out: they are shorter than a prompt and a suffix of 50 "
        "tokens",
        "2 windows are left out of context 0: their prompts are empty; "
        "--config.empty_prompt=bos would prompt with the separator",
    )


def test_shorter_contexts_of_longer_windows(plan):
    made = plan(random_windows(L100=3, L150=2, L60=1), contexts=(100, 20, 50))
    assert asked(made) == [(100, (20, 50), 3), (150, (20, 50, 100), 2)]
    (model,) = made.models
    assert [part.num_records for part in made.parts(model)] == [6, 6]
    assert [part.tokens().shape for part in made.parts(model)] == [(3, 100), (2, 150)]


def test_no_more_tokens_than_are_needed(plan):
    windows = random_windows(L150=2)
    made = plan(windows, contexts=(20,))
    (part,) = made.parts(made.models[0])
    tokens_NxT = part.tokens()
    assert tokens_NxT.dtype == np.int32
    np.testing.assert_array_equal(tokens_NxT, windows[150][:, :70])
    assert part.question.num_positions == 69


def test_an_empty_prompt_becomes_the_separator(plan):
    windows = random_windows(L50=2, L60=1)
    made = plan(windows, manifest={"eos_id": 1}, contexts=(0, 10), empty_prompt="bos")
    assert asked(made) == [(50, (0,), 2), (60, (0,), 1), (60, (10,), 1)]
    assert made.notes == ()
    first, second, _ = made.parts(made.models[0])
    expected = np.concatenate([np.ones((2, 1), int), windows[50]], axis=1)
    np.testing.assert_array_equal(first.tokens(), expected)
    np.testing.assert_array_equal(second.tokens()[0, 1:], windows[60][0, :50])
    assert first.question.model_contexts == (1,)
    assert len({part.name for part in made.parts(made.models[0])}) == 3


def test_no_separator_to_prompt_with(plan):
    with pytest.raises(UsageError, match=r"needs the separator .*=skip"):
        plan(random_windows(L50=2), manifest={"eos_id": None}, empty_prompt="bos")


def test_nothing_left_to_ask(plan):
    with pytest.raises(UsageError, match=r"windows of \[50\] tokens, none .*=bos"):
        plan(random_windows(L50=2))


def test_a_context_that_no_window_has(plan):
    with pytest.raises(
        UsageError, match=r"contexts has 51, .* \(they have \[60, 100\]"
    ):
        plan(random_windows(L60=1, L100=1), contexts=(10, 51))
