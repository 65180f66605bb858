import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from experiments import models
from experiments.errors import UsageError
from experiments.extraction import decoding, sampled_decoding, shared_prompts, verdicts
from experiments.extraction.sampled_decoding import SamplingScheme, draw_keys

pytestmark = pytest.mark.usefixtures("compiled_cheaply")

VOCABULARY_SIZE, CONTEXT = 5, 3
SCHEMES = [
    SamplingScheme(),
    SamplingScheme(temperature=2.0),
    SamplingScheme(temperature=0.5, top_k=3),
]


class Tiny:
    def __init__(self):
        spec = "gpt_neo:layers=2:width=8:heads=2:window=3"
        self.model = models.build_language_model(spec, VOCABULARY_SIZE, 64)
        shapes = jax.eval_shape(
            self.model.init, jax.random.key(0), jnp.zeros((1, 1), int)
        )
        rng = np.random.default_rng(3)
        self.params = jax.tree.map(
            lambda x: (0.6 * rng.normal(size=x.shape)).astype(np.float32), shapes
        )
        self.logits = jax.jit(self.model.apply)

    def sample(self, scheme, num_tokens):
        function = functools.partial(
            sampled_decoding.sample, self.model, scheme=scheme, num_tokens=num_tokens
        )
        return jax.jit(function)

    def score(self, scheme, contexts=(CONTEXT,)):
        function = functools.partial(
            sampled_decoding.score, self.model, contexts=contexts, scheme=scheme
        )
        return jax.jit(function)


@pytest.fixture(scope="module")
def tiny():
    return Tiny()


def random_tokens(shape, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(VOCABULARY_SIZE, size=shape, dtype=np.int32)


def log_softmax(logits_xV):
    logits_xV = logits_xV - logits_xV.max(axis=-1, keepdims=True)
    return logits_xV - np.log(np.exp(logits_xV).sum(axis=-1, keepdims=True))


def reference(logits_xV, scheme):
    """Log-probabilities of the scheme, by sorting, in float64."""
    logits_xV = np.asarray(logits_xV, np.float64)
    if scheme.top_k is not None:
        rank_xV = np.argsort(
            np.argsort(-logits_xV, axis=-1, kind="stable"), axis=-1, kind="stable"
        )
        logits_xV = np.where(rank_xV < scheme.top_k, logits_xV, -np.inf)
    return log_softmax(logits_xV / scheme.temperature)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_scores_follow_from_the_logits(tiny, scheme):
    tokens_BxT = random_tokens((4, CONTEXT + 50))
    scores = tiny.score(scheme)(tiny.params, tokens_BxT)
    log_p_BxTxV = reference(tiny.logits(tiny.params, tokens_BxT), scheme)
    expected_BxS = np.take_along_axis(
        log_p_BxTxV[:, CONTEXT - 1 : -1], tokens_BxT[:, CONTEXT:, None], axis=-1
    )[..., 0]
    found_BxS = np.asarray(scores.log_probability)[:, 0]
    np.testing.assert_allclose(found_BxS, expected_BxS, rtol=1e-4, atol=1e-5)
    assert np.isinf(found_BxS).any() == (scheme.top_k is not None)


@pytest.mark.parametrize("temperature", [1e-2, 1e-4, 1e-6, 1e-30])
def test_low_temperatures_keep_the_digits(temperature):
    """Logits far from 0, and a runner-up that is as near as the temperature."""
    logits_BxV = np.random.default_rng(0).normal(-90, 3, (50, 100)).astype(np.float32)
    logits_BxV[:, 7] = logits_BxV.max(axis=-1) - np.float32(temperature)
    best_B = logits_BxV.argmax(axis=-1)
    scheme = SamplingScheme(temperature)
    scores = jax.jit(
        lambda x, targets: verdicts.score_logits(scheme.modified(x), targets)
    )(logits_BxV[:, None], best_B[:, None])
    expected_B = reference(logits_BxV, scheme)[np.arange(50), best_B]
    np.testing.assert_allclose(
        np.asarray(scores.log_probability)[:, 0], expected_B, rtol=1e-5, atol=1e-6
    )


def test_the_plain_scheme_is_the_model(tiny):
    tokens_BxT = random_tokens((4, CONTEXT + 50))
    contexts = (1, CONTEXT)
    found = tiny.score(SamplingScheme(), contexts)(tiny.params, tokens_BxT)
    plain = jax.jit(functools.partial(verdicts.score, tiny.model, contexts=contexts))
    for a, b in zip(found, plain(tiny.params, tokens_BxT), strict=True):
        np.testing.assert_array_equal(a, b)


def test_one_token_to_choose_from_is_greedy(tiny):
    """It draws what greedy decoding generates, with probability 1, and no other."""
    scheme = SamplingScheme(temperature=0.7, top_k=1)
    prompts_PxC = random_tokens((4, CONTEXT), seed=1)
    keys_PxN = draw_keys(0, CONTEXT, np.arange(4), np.arange(2))
    drawn_PxNxT = tiny.sample(scheme, 50)(tiny.params, prompts_PxC, keys_PxN)
    generate = jax.jit(functools.partial(decoding.generate, tiny.model))
    greedy_PxT = np.asarray(generate(tiny.params, prompts_PxC))
    np.testing.assert_array_equal(drawn_PxNxT, np.stack([greedy_PxT] * 2, axis=1))
    whole_BxT = np.concatenate([prompts_PxC, greedy_PxT], axis=1)
    whole_BxT[1, CONTEXT + 20] = (whole_BxT[1, CONTEXT + 20] + 1) % VOCABULARY_SIZE
    judged = verdicts.judge(tiny.score(scheme)(tiny.params, whole_BxT))
    np.testing.assert_array_equal(judged.extracted[:, 0], [True, False, True, True])
    np.testing.assert_array_equal(judged.suffix_logprob[:, 0], [0, -np.inf, 0, 0])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_draws_are_as_frequent_as_they_are_likely(tiny, scheme):
    """Continuations of 3 tokens, all of them counted: a chi-squared test."""
    prompt_1xC, num_draws = random_tokens((1, CONTEXT), seed=2), 4000
    keys_1xN = draw_keys(7, CONTEXT, [0], np.arange(num_draws))
    drawn_NxT = tiny.sample(scheme, 3)(tiny.params, prompt_1xC, keys_1xN)[0]
    continuations_ExT = np.array(
        list(itertools.product(range(VOCABULARY_SIZE), repeat=3)), np.int32
    )
    whole_ExT = np.concatenate(
        [np.tile(prompt_1xC, (len(continuations_ExT), 1)), continuations_ExT], axis=1
    )
    log_p_ExTxV = reference(tiny.logits(tiny.params, whole_ExT), scheme)
    log_p_E = np.take_along_axis(
        log_p_ExTxV[:, CONTEXT - 1 : -1], continuations_ExT[..., None], axis=-1
    ).sum(axis=(1, 2))
    assert np.exp(log_p_E).sum() == pytest.approx(1)
    code_N = np.asarray(drawn_NxT) @ VOCABULARY_SIZE ** np.arange(2, -1, -1)
    count_E = np.bincount(code_N, minlength=len(log_p_E))
    expected_E = num_draws * np.exp(log_p_E)
    assert count_E[expected_E == 0].sum() == 0
    # Rare ones together, for the approximation by the chi-squared distribution.
    rare_E = expected_E < 5
    observed = np.append(count_E[~rare_E], count_E[rare_E].sum() + 1e-9)
    wanted = np.append(expected_E[~rare_E], expected_E[rare_E].sum() + 1e-9)
    assert scipy.stats.chisquare(observed, wanted).pvalue > 1e-4


def test_a_draw_is_its_own(tiny, monkeypatch):
    """It depends on its seed, context, window and trial, and on nothing else."""
    prompts_PxC = random_tokens((4, CONTEXT), seed=4)
    scheme = SCHEMES[-1]
    run = tiny.sample(scheme, 20)
    ids_P, trials_N = np.array([5, 900_000, 0, 7]), np.arange(3)
    keys_PxN = draw_keys(1, CONTEXT, ids_P, trials_N)
    together = np.asarray(run(tiny.params, prompts_PxC, keys_PxN))
    assert together.shape == (4, 3, 20)
    monkeypatch.setattr(shared_prompts, "_BYTES_AT_ONCE", 1)
    order, trials = [2, 0, 3, 1], [2, 0]
    some = tiny.sample(scheme, 20)(
        tiny.params, prompts_PxC[order], draw_keys(1, CONTEXT, ids_P[order], trials)
    )
    np.testing.assert_array_equal(some, together[order][:, trials])
    flat = together.reshape(12, 20)
    assert len(np.unique(flat, axis=0)) == 12
    for seed, context in ((2, CONTEXT), (1, CONTEXT + 1)):
        keys_PxN = draw_keys(seed, context, ids_P, trials_N)
        other = run(tiny.params, prompts_PxC, keys_PxN)
        assert (np.asarray(other) != together).any(axis=-1).all()


def test_logits_that_are_not_finite_show(tiny):
    params = jax.tree.map(np.copy, tiny.params)
    params["params"]["position_embedding"]["embedding"][CONTEXT + 2] = -np.nan
    prompts_PxC = random_tokens((2, CONTEXT), seed=5)
    keys_PxN = draw_keys(0, CONTEXT, np.arange(2), np.arange(2))
    drawn_PxNxT = tiny.sample(SCHEMES[-1], 6)(params, prompts_PxC, keys_PxN)
    assert (drawn_PxNxT[..., :3] < VOCABULARY_SIZE).all()
    assert (drawn_PxNxT[..., 3:] == VOCABULARY_SIZE).all()
    scores = tiny.score(SCHEMES[-1])(params, random_tokens((2, CONTEXT + 50)))
    assert not verdicts.finite(scores).any()


def test_a_nan_is_not_left_out():
    """Neither sign of it, wherever it is among the logits."""
    for nan, place in itertools.product((np.nan, -np.nan), range(4)):
        logits_V = np.array([1.0, 2.0, 3.0, 4.0], np.float32)
        logits_V[place] = nan
        modified_V = SamplingScheme(top_k=2).modified(jnp.asarray(logits_V))
        assert np.isnan(modified_V[place])


@pytest.mark.parametrize("top_k", [1, 2, 3, 4, 6])
def test_ties_for_the_last_place(top_k):
    """The lowest ids; never more than k."""
    logits_1xV = jnp.array([[0.0, 2.0, 1.0, 2.0, 1.0, 1.0]])
    modified_1xV = SamplingScheme(top_k=top_k).modified(logits_1xV)
    expected = sorted([1, 3, 2, 4, 5, 0][:top_k])
    np.testing.assert_array_equal(np.flatnonzero(np.isfinite(modified_1xV)), expected)


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.inf, math.nan])
def test_temperatures_that_mean_nothing(temperature):
    with pytest.raises(UsageError, match=r"temperature=.*expected a positive number"):
        SamplingScheme(temperature=temperature)


def test_numbers_of_tokens_that_mean_nothing():
    with pytest.raises(UsageError, match="top_k=0, expected at least 1"):
        SamplingScheme(top_k=0)
    with pytest.raises(UsageError, match="top_k=6, expected at most 5, the tokens"):
        SamplingScheme(top_k=6).modified(jnp.zeros(5))


@pytest.mark.parametrize("wrong", [-1, 2**32])
def test_window_ids_beyond_32_bits(wrong):
    with pytest.raises(UsageError, match=f"{wrong} among the window ids"):
        draw_keys(0, CONTEXT, np.array([3, wrong]), [0])
    with pytest.raises(UsageError, match=f"{wrong} among the trials"):
        draw_keys(0, CONTEXT, [3], np.array([wrong]))
