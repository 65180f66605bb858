import shutil

import numpy as np
import pytest
import tokenizers

from experiments.errors import UsageError
from experiments.extraction import byte_pairs, sweep_config, sweep_plan
from tests.experiments.extraction import known_windows
from tests.experiments.extraction.known_windows import GOLDEN


def random_windows(**num_by_length):
    random = np.random.default_rng(0)
    return {
        int(name[1:]): random.integers(
            2, known_windows.VOCABULARY_SIZE, (n, int(name[1:]))
        )
        for name, n in num_by_length.items()
    }


@pytest.fixture
def plan(tmp_path):
    """`(windows_by_length, **config) -> SweepPlan` for the golden GPT-2."""

    def make(windows, model=GOLDEN / "gpt2", manifest=None, tokenizer=None, **values):
        folder = tmp_path / "windows"
        if windows is not None:
            known_windows.write(folder, windows, tokenizer, **(manifest or {}))
        config = sweep_config.make(models=(str(model),), windows=str(folder), **values)
        return sweep_plan.make_plan(sweep_config.parse(config))

    return make


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


def test_some_windows_of_each_bucket(plan):
    # Buckets take turns, so each of three has ten windows.
    made = plan(random_windows(L60=30, L70=30), windows_per_bucket=4)
    few = {p.length: set(p.windows["window_id"]) for p in made.questions}
    for asked_windows in made.questions:
        counts = asked_windows.windows["bucket"].value_counts()
        assert sorted(counts.rows()) == [(0, 4), (1, 4), (2, 4)]
        assert asked_windows.windows["window_id"].is_sorted()
    again = plan(None, windows_per_bucket=4)
    assert {p.length: set(p.windows["window_id"]) for p in again.questions} == few
    other = plan(None, windows_per_bucket=4, seed=1)
    assert {p.length: set(p.windows["window_id"]) for p in other.questions} != few
    more = plan(None, windows_per_bucket=7)
    assert all(few[p.length] < set(p.windows["window_id"]) for p in more.questions)
    assert (
        sum(len(p.windows) for p in plan(None, windows_per_bucket=99).questions) == 60
    )


def test_parts_cover_everything_once(plan):
    made = plan(random_windows(L60=70, L70=33), batch_size=2)
    parts = made.parts(made.models[0])
    assert [(p.question.length, p.start, p.stop) for p in parts] == [
        (60, 0, 32),
        (60, 32, 64),
        (60, 64, 70),
        (70, 0, 32),
        (70, 32, 33),
    ]
    assert len({part.name for part in parts}) == 5


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
