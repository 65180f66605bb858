import jax
import numpy as np
import pytest

from experiments import models
from experiments.extraction import early_rejection, verdicts
from experiments.extraction.asking import Asker
from tests.experiments.extraction import known_windows

pytestmark = pytest.mark.usefixtures("compiled_cheaply")

CONTEXT = 20
# Around the border between the first tokens and the rest, and at both ends.
FIRST_WRONG = [50, 0, 1, 4, 5, 6, 7, 30, 49, 50, 48, 5, 50, 50]


@pytest.fixture(scope="module")
def windows():
    """Tokens, and which of them are extractable."""
    prompts_NxC = np.random.default_rng(2).integers(
        0, known_windows.VOCABULARY_SIZE, (len(FIRST_WRONG), CONTEXT)
    )
    tokens_NxT = known_windows.continued(known_windows.GOLDEN / "gpt2", prompts_NxC)
    return known_windows.spoiled(tokens_NxT, FIRST_WRONG), np.array(FIRST_WRONG) == 50


@pytest.fixture(scope="module")
def asker():
    model, params = models.load(known_windows.GOLDEN / "gpt2")
    return Asker(model, params, batch_size=4)


def test_scores_of_windows_that_do_not_fill_their_batches(asker, windows):
    tokens_NxT, extractable_N = windows
    done = []
    scores = asker.scores(tokens_NxT, (CONTEXT,), done.append)
    assert scores.margin.shape == (len(FIRST_WRONG), 1, 50)
    assert scores.margin.dtype == np.float32
    judged = verdicts.judge(scores)
    assert judged.first_mismatch[:, 0].tolist() == FIRST_WRONG
    np.testing.assert_array_equal(judged.extracted[:, 0], extractable_N)
    assert done == [4, 4, 4, 2]


@pytest.mark.parametrize(
    ("near_tie", "num_asked_again"), [(0.0, []), (1e9, [len(FIRST_WRONG)])]
)
def test_early_rejection_changes_no_verdict(
    asker, windows, near_tie, num_asked_again, monkeypatch
):
    tokens_NxT, extractable_N = windows
    asked = []
    scores = asker.scores
    monkeypatch.setattr(
        asker, "scores", lambda x, contexts: asked.append(len(x)) or scores(x, contexts)
    )
    extracted_N, finite_N = asker.extractable(tokens_NxT, CONTEXT, near_tie)
    np.testing.assert_array_equal(extracted_N, extractable_N)
    assert finite_N.all()
    # The full pass settles what is near a tie, and nothing else.
    assert asked == num_asked_again


def test_rejected_windows_are_not_read_to_their_end(asker, windows, monkeypatch):
    tokens_NxT, _ = windows
    rows = []
    run = asker._run

    def spy(function, *arrays, **static):
        if function is early_rejection.score_rest:
            rows.extend(np.unique(arrays[2]))
        return run(function, *arrays, **static)

    monkeypatch.setattr(asker, "_run", spy)
    asker.extractable(tokens_NxT[:4], CONTEXT, near_tie=0.0)
    assert rows == [0]


def test_scores_do_not_depend_on_the_company(asker, windows):
    tokens_NxT, _ = windows
    alone = asker.scores(tokens_NxT[5:6], (CONTEXT,))
    together = asker.scores(tokens_NxT[4:8], (CONTEXT,))
    np.testing.assert_allclose(alone.margin[0], together.margin[1], atol=1e-5)


def test_decoding_agrees(asker, windows):
    tokens_NxT, extractable_N = windows
    generated_Nx50 = asker.generate(tokens_NxT, CONTEXT)
    reproduced_N = (generated_Nx50 == tokens_NxT[:, CONTEXT:]).all(axis=1)
    np.testing.assert_array_equal(reproduced_N, extractable_N)


def test_nothing_is_compiled_after_the_first_batch(windows, caplog):
    tokens_NxT, _ = windows
    model, params = models.load(known_windows.GOLDEN / "gpt2")
    asker = Asker(model, params, batch_size=2)

    def ask(rows):
        asker.scores(tokens_NxT[rows], (CONTEXT,))
        asker.extractable(tokens_NxT[rows], CONTEXT, near_tie=0.0)

    with jax.log_compiles(), caplog.at_level("WARNING"):
        ask(slice(0, 2))
        assert sum("Finished XLA compilation" in m for m in caplog.messages) >= 3
        seconds, num_programs = asker.compile_seconds, asker.num_programs
        caplog.clear()
        # Full batches and others.
        ask(slice(2, None))
        ask(slice(0, 1))
        assert not [m for m in caplog.messages if "ompil" in m]
    assert num_programs == 3
    assert (asker.compile_seconds, asker.num_programs) == (seconds, num_programs)


def test_logits_that_are_no_numbers_are_told(windows):
    tokens_NxT, _ = windows
    model, params = models.load(known_windows.GOLDEN / "gpt2")
    # Of one token alone, which the first window holds in its suffix.
    token = int(tokens_NxT[0, CONTEXT + 30])
    table = params["params"]["embedding"]["embedding"].at[token].set(np.nan)
    params["params"]["embedding"]["embedding"] = table
    asker = Asker(model, params, batch_size=4)
    finite_N = verdicts.finite(asker.scores(tokens_NxT[:1], (CONTEXT,)))
    assert finite_N.tolist() == [[False]]
    extracted_N, finite_N = asker.extractable(tokens_NxT[:1], CONTEXT, near_tie=1e-3)
    assert (extracted_N.tolist(), finite_N.tolist()) == ([False], [False])
