import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from experiments import models
from experiments.extraction import row_groups, verdicts
from experiments.extraction.verdicts import Scores
from tests.experiments.extraction import known_windows

pytestmark = pytest.mark.usefixtures("compiled_cheaply")

# Few values, so that many are equal.
LOGITS = hnp.arrays(np.float32, (1, 6, 5), elements=st.sampled_from([-1.0, 0.0, 2.0]))
SCORE_LOGITS = jax.jit(verdicts.score_logits)
TARGETS = hnp.arrays(np.int32, (1, 6), elements=st.integers(0, 4))


@given(logits_1x6x5=LOGITS, targets_1x6=TARGETS)
def test_scores_by_their_definition(logits_1x6x5, targets_1x6):
    scores = SCORE_LOGITS(logits_1x6x5, targets_1x6)
    for i, (logits_V, target) in enumerate(
        zip(logits_1x6x5[0], targets_1x6[0], strict=True)
    ):
        others = np.delete(logits_V, target)
        assert scores.margin[0, i] == logits_V[target] - others.max()
        # NumPy's argmax is the first one, so the lowest id.
        assert scores.correct[0, i] == (logits_V.argmax() == target)
        exact = logits_V.astype(np.float64)
        expected = exact[target] - np.log(np.exp(exact).sum())
        assert scores.log_probability[0, i] == pytest.approx(expected, abs=1e-6)


def test_large_logits_do_not_overflow():
    logits_1x1x2 = jnp.array([[[3e38, 2.9e38]]])
    scores = verdicts.score_logits(logits_1x1x2, jnp.array([[0]]))
    assert scores.log_probability.item() == 0
    assert verdicts.finite(scores).all()


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("place", [0, 1])
def test_logits_that_are_no_numbers_are_found(value, place):
    logits_1x2x2 = np.zeros((1, 2, 2), np.float32)
    logits_1x2x2[0, 1, place] = value
    scores = verdicts.score_logits(jnp.asarray(logits_1x2x2), jnp.array([[0, 0]]))
    assert np.isnan(scores.log_probability).tolist() == [[False, True]]
    assert verdicts.finite(scores).tolist() == [False]


def test_an_impossible_token_is_no_fault():
    logits_1x1x3 = jnp.array([[[0.0, -jnp.inf, 0.0]]])
    scores = verdicts.score_logits(logits_1x1x3, jnp.array([[0]]))
    assert verdicts.finite(scores).all()
    assert scores.log_probability.item() == pytest.approx(np.log(0.5))


@given(
    correct=hnp.arrays(
        bool, (2, 3, 50), elements=st.sampled_from([True] * 20 + [False])
    ),
    seed=st.integers(0, 9),
)
def test_verdicts_by_their_definition(correct, seed):
    random = np.random.default_rng(seed)
    margin = np.where(correct, 1, -1) * random.integers(0, 3, correct.shape)
    log_probability = random.normal(size=correct.shape).astype(np.float32)
    judged = verdicts.judge(Scores(margin.astype(np.float32), correct, log_probability))
    for index in np.ndindex(2, 3):
        flags = list(correct[index])
        first = flags.index(False) if False in flags else 50
        assert judged.first_mismatch[index] == first
        assert judged.extracted[index] == (first == 50)
        assert judged.tokens_correct[index] == sum(flags)
        assert judged.min_margin[index] == min(margin[index])
        assert judged.tie[index] == (0 in margin[index])
        total = float(np.sum(log_probability[index], dtype=np.float64))
        assert judged.suffix_logprob[index] == pytest.approx(total, abs=1e-4)


@pytest.fixture(scope="module")
def golden():
    model, params = models.load(known_windows.GOLDEN / "gpt_neox")
    random = np.random.default_rng(0)
    tokens_BxT = random.integers(0, known_windows.VOCABULARY_SIZE, (6, 90))
    return model, params, tokens_BxT.astype(np.int32)


def test_scores_are_those_of_the_whole_logits(golden):
    model, params, tokens_BxT = golden
    logits_BxTxV = jax.jit(model.apply)(params, tokens_BxT)
    scores = jax.jit(
        lambda params, tokens: verdicts.score(
            model, params, tokens, contexts=(1, 7, 40)
        )
    )(params, tokens_BxT)
    for k, context in enumerate((1, 7, 40)):
        expected = SCORE_LOGITS(
            logits_BxTxV[:, context - 1 : context + 49],
            tokens_BxT[:, context : context + 50],
        )
        np.testing.assert_allclose(scores.margin[:, k], expected.margin, atol=1e-4)
        np.testing.assert_array_equal(scores.correct[:, k], expected.correct)
        np.testing.assert_allclose(
            scores.log_probability[:, k], expected.log_probability, atol=1e-4
        )


def test_small_pieces_make_no_difference(golden, monkeypatch):
    model, params, tokens_BxT = golden

    def margins():
        score = lambda p, x: verdicts.score(model, p, x, contexts=(40,))  # noqa: E731
        return jax.jit(score)(params, tokens_BxT).margin

    whole = margins()
    monkeypatch.setattr(row_groups, "_TOKENS_ON_CPU", 200)
    # Two rows at once, and five of their 50 positions.
    monkeypatch.setattr(verdicts, "_LOGITS_BYTES", 5 * 2 * 4 * 128)
    np.testing.assert_allclose(margins(), whole, atol=1e-4)


def test_the_last_token_is_not_read(golden):
    model, params, tokens_BxT = golden
    # 40 + 49 positions are enough for a window of 90 tokens.
    cut = model.clone(config=dataclasses.replace(model.config, max_positions=89))
    scores = jax.eval_shape(
        lambda p, x: verdicts.score(cut, p, x, contexts=(40,)), params, tokens_BxT
    )
    assert scores.margin.shape == (6, 1, 50)
