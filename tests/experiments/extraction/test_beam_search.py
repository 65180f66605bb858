import functools
import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import models
from experiments.errors import UsageError
from experiments.extraction import beam_search, decoding, shared_prompts, verdicts
from experiments.extraction.beam_search import search

pytestmark = pytest.mark.usefixtures("compiled_cheaply")

NEVER = -1e9
"""A logit that float32 takes for a probability of 0."""
# A window shorter than prompts and suffixes, so that it shows.
NEO = "gpt_neo:layers=2:width=16:heads=2:window=3"
GPT_J = "gpt_j:layers=1:width=8:heads=2:rotary_dim=4"


def build(spec, vocabulary_size, positions):
    model = models.build_language_model(spec, vocabulary_size, positions)
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), int))
    return model, shapes


def large_random(shapes, seed, deviation=0.5):
    """Weights with which the next tokens are neither certain nor a matter of chance."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: (deviation * rng.normal(size=x.shape)).astype(np.float32), shapes
    )


def random_tokens(vocabulary_size, shape, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(vocabulary_size, size=shape, dtype=np.int32)


def compiled_search(model, **static):
    return jax.jit(functools.partial(search, model, **static))


@pytest.fixture(scope="module")
def neo():
    """A model of 40 tokens, its parameters, and its compiled forward pass."""
    model, shapes = build(NEO, 40, 64)
    return model, large_random(shapes, seed=1), jax.jit(model.apply)


class Exhaustive:
    """64 tokens, of which 4 have a probability above 0: 64 beams prune no 3 steps.

    GPT-J, since its head has a bias.
    """

    alphabet, num_beams, num_tokens, context = 4, 64, 4, 3

    def __init__(self):
        self.model, self.shapes = build(GPT_J, self.num_beams, 8)
        self.search = compiled_search(
            self.model, num_beams=self.num_beams, num_tokens=self.num_tokens
        )
        self.logits = jax.jit(self.model.apply)
        self.continuations_ExT = np.array(
            list(itertools.product(range(self.alphabet), repeat=self.num_tokens)),
            np.int32,
        )

    def params(self, seed):
        params = large_random(self.shapes, seed)
        params["params"]["head"]["bias"][self.alphabet :] = NEVER
        return params

    def best(self, params, prompt_C):
        """Scores of the best continuations and their tokens, of all in float64."""
        num_all = len(self.continuations_ExT)
        whole_ExT = np.concatenate(
            [np.tile(prompt_C, (num_all, 1)), self.continuations_ExT], axis=1
        )
        score_E = rescored(self.logits, params, whole_ExT, self.context)
        order_N = np.argsort(-score_E, kind="stable")[: self.num_beams]
        return score_E[order_N], self.continuations_ExT[order_N]


def rescored(logits, params, tokens_BxT, context):
    """Log-probabilities of all tokens after `context`, by a full forward pass, f64."""
    logits_BxTxV = np.asarray(logits(params, tokens_BxT), np.float64)
    top_BxTx1 = logits_BxTxV.max(axis=-1, keepdims=True)
    normalizer_BxT = (
        np.log(np.exp(logits_BxTxV - top_BxTx1).sum(-1)) + top_BxTx1[..., 0]
    )
    targets_BxS = tokens_BxT[:, context:]
    target_BxS = np.take_along_axis(
        logits_BxTxV[:, context - 1 : -1], targets_BxS[..., None], axis=-1
    )[..., 0]
    return (target_BxS - normalizer_BxT[:, context - 1 : -1]).sum(axis=-1)


@pytest.fixture(scope="module")
def exhaustive():
    return Exhaustive()


@hypothesis.settings(max_examples=25)
@hypothesis.given(seed=st.integers(0, 10**6))
def test_equals_exhaustive_search(exhaustive, seed):
    params = exhaustive.params(seed)
    prompts_PxC = random_tokens(4, (2, exhaustive.context), seed)
    found = exhaustive.search(params, prompts_PxC)
    for p, prompt_C in enumerate(prompts_PxC):
        score_N, tokens_NxT = exhaustive.best(params, prompt_C)
        np.testing.assert_allclose(found.scores_PxN[p], score_N, rtol=1e-5, atol=1e-5)
        # Which of two comes first is a matter of rounding where they are that close.
        clear_N = np.append(np.diff(score_N) < -1e-4, False)
        clear_N[1:] &= clear_N[:-1]
        np.testing.assert_array_equal(
            np.asarray(found.tokens_PxNxT[p])[clear_N], tokens_NxT[clear_N]
        )


def pruned_reference(logits, params, prompt_C, num_beams, num_tokens):
    """Beam search in NumPy: whole sequences, no cache, all candidates sorted."""
    sequences_NxT = prompt_C[None]
    score_N = np.zeros(1)
    length = len(prompt_C) + num_tokens
    for _ in range(num_tokens):
        num_read = sequences_NxT.shape[1]
        # What follows does not reach what is read, and one program serves all steps.
        padded = np.zeros((num_beams, length), np.int32)
        padded[: len(sequences_NxT), :num_read] = sequences_NxT
        logits_NxV = np.asarray(logits(params, padded), np.float64)[:, num_read - 1]
        logits_NxV = logits_NxV[: len(sequences_NxT)]
        logits_NxV -= logits_NxV.max(axis=-1, keepdims=True)
        logits_NxV -= np.log(np.exp(logits_NxV).sum(axis=-1, keepdims=True))
        candidates_M = (score_N[:, None] + logits_NxV).ravel()
        order_N = np.argsort(-candidates_M, kind="stable")[:num_beams]
        beams_N, tokens_N = np.divmod(order_N, logits_NxV.shape[1])
        sequences_NxT = np.concatenate(
            [sequences_NxT[beams_N], tokens_N[:, None]], axis=1
        )
        score_N = candidates_M[order_N]
    return sequences_NxT[:, len(prompt_C) :], score_N


def test_prunes_as_defined(neo):
    """A few beams over 50 steps, many of which die on the way."""
    model, params, logits = neo
    prompts_PxC = random_tokens(40, (3, 1))
    found = compiled_search(model, num_beams=6)(params, prompts_PxC)
    for p, prompt_C in enumerate(prompts_PxC):
        tokens_NxT, score_N = pruned_reference(logits, params, prompt_C, 6, 50)
        np.testing.assert_array_equal(found.tokens_PxNxT[p], tokens_NxT)
        np.testing.assert_allclose(found.scores_PxN[p], score_N, rtol=1e-5)


def test_scores_are_those_of_a_full_pass(neo):
    model, params, logits = neo
    prompts_PxC = random_tokens(40, (2, 9), seed=3)
    found = compiled_search(model, num_beams=40)(params, prompts_PxC)
    tokens_PxNxT = np.asarray(found.tokens_PxNxT)
    assert tokens_PxNxT.shape == (2, 40, 50)
    for p, prompt_C in enumerate(prompts_PxC):
        whole_NxT = np.concatenate(
            [np.tile(prompt_C, (40, 1)), tokens_PxNxT[p]], axis=1
        )
        expected_N = rescored(logits, params, whole_NxT, context=9)
        np.testing.assert_allclose(found.scores_PxN[p], expected_N, rtol=1e-5)
        assert len(np.unique(tokens_PxNxT[p], axis=0)) == 40
        forced = verdicts.score(model, params, jnp.asarray(whole_NxT), contexts=(9,))
        np.testing.assert_allclose(
            found.scores_PxN[p], verdicts.judge(forced).suffix_logprob[:, 0], rtol=1e-5
        )
    assert (np.diff(found.scores_PxN, axis=1) <= 0).all()


def test_one_beam_is_greedy(neo):
    model, params, _ = neo
    prompts_PxC = random_tokens(40, (64, 12), seed=4)
    found = compiled_search(model, num_beams=1)(params, prompts_PxC)
    generated = jax.jit(functools.partial(decoding.generate, model))
    expected_PxT = generated(params, prompts_PxC)
    np.testing.assert_array_equal(found.tokens_PxNxT[:, 0], expected_PxT)


def test_one_beam_is_greedy_where_sums_are_coarse():
    """The best tokens are 1e-5 apart; float32 numbers near the score, 1.5e-5."""
    model, shapes = build(GPT_J, 40, 64)
    params = jax.tree.map(lambda x: np.zeros(x.shape, np.float32), shapes)
    bias_V = params["params"]["head"]["bias"]
    bias_V[3], bias_V[7] = 0.9e-4, 1e-4
    found = compiled_search(model, num_beams=1)(params, random_tokens(40, (2, 3)))
    assert (np.asarray(found.tokens_PxNxT) == 7).all()
    np.testing.assert_allclose(found.scores_PxN, -50 * np.log(40), rtol=1e-4)


def test_groups_of_prompts_change_nothing(neo, monkeypatch):
    """Nor does it change the best beam that the others are not returned."""
    model, params, _ = neo
    prompts_PxC = random_tokens(40, (4, 5), seed=5)
    static = {"num_beams": 8, "num_tokens": 6}
    every = compiled_search(model, **static)(params, prompts_PxC)
    assert every.tokens_PxNxT.shape == (4, 8, 6)
    monkeypatch.setattr(shared_prompts, "_BYTES_AT_ONCE", 1)
    best = compiled_search(model, **static, num_returned=1)(params, prompts_PxC)
    np.testing.assert_array_equal(best.tokens_PxNxT, every.tokens_PxNxT[:, :1])
    np.testing.assert_allclose(best.scores_PxN, every.scores_PxN[:, :1], rtol=1e-5)


def test_a_single_token(neo):
    model, params, logits = neo
    prompts_PxC = random_tokens(40, (2, 5), seed=7)
    found = compiled_search(model, num_beams=40, num_tokens=1)(params, prompts_PxC)
    expected_PxV = np.argsort(-np.asarray(logits(params, prompts_PxC))[:, -1], axis=-1)
    np.testing.assert_array_equal(found.tokens_PxNxT[..., 0], expected_PxV)


def test_ties_go_to_the_lowest_beam_and_token(neo):
    model, params, _ = neo
    uniform = jax.tree.map(np.zeros_like, params)
    found = compiled_search(model, num_beams=5, num_tokens=4)(
        uniform, random_tokens(40, (2, 3))
    )
    tokens_NxT = np.zeros((5, 4), int)
    tokens_NxT[:, -1] = np.arange(5)
    np.testing.assert_array_equal(found.tokens_PxNxT, np.stack([tokens_NxT] * 2))
    np.testing.assert_allclose(found.scores_PxN, -4 * np.log(40), rtol=1e-6)


def test_logits_that_are_not_finite_show(neo):
    """In a prompt, or where generated tokens are read."""
    model, params, _ = neo
    run = compiled_search(model, num_beams=3, num_tokens=4)
    prompts_PxC = random_tokens(40, (2, 3), seed=8)
    fine = run(params, prompts_PxC)
    assert np.isfinite(fine.scores_PxN).all()
    # An id outside the vocabulary gives NaN.
    wrong_PxC = prompts_PxC.copy()
    wrong_PxC[0, 1] = 40
    found = run(params, wrong_PxC)
    assert np.isnan(found.scores_PxN[0]).all()
    np.testing.assert_allclose(found.scores_PxN[1], fine.scores_PxN[1], rtol=1e-6)
    for damage in (np.nan, -np.nan, np.inf):
        damaged = jax.tree.map(np.copy, params)
        # Of the last position that is read.
        damaged["params"]["position_embedding"]["embedding"][5] = damage
        assert np.isnan(run(damaged, prompts_PxC).scores_PxN).all()


@pytest.mark.parametrize("num_beams", [0, -1, 41, 100])
def test_more_beams_than_tokens(neo, num_beams):
    model, params, _ = neo
    with pytest.raises(UsageError, match=rf"^{num_beams} beams, expected 1 to 40 .*:"):
        search(model, params, random_tokens(40, (1, 3)), num_beams=num_beams)


def test_candidates_are_numbered_in_32_bits():
    beam_search.check_num_beams(40_000, 50_257)
    with pytest.raises(UsageError, match="expected 1 to 42730"):
        beam_search.check_num_beams(50_000, 50_257)


def test_what_is_compiled():
    """Memory does not hold the prompt for each beam, nor are candidates sorted."""
    model, shapes = build("gpt2:layers=2:width=64:heads=2", 128, 512)
    prompts_PxC = jax.ShapeDtypeStruct((3, 400), jnp.int32)
    run = compiled_search(model, num_beams=50, num_tokens=10)
    program = run.lower(shapes, prompts_PxC).compile()
    # Fifteen times as slow, otherwise.
    assert " sort(" not in program.as_text(), "the best candidates come from a sort"
    memory = program.memory_analysis()
    one_cache_each = 2 * 2 * 64 * 4 * 50 * 409
    assert memory.temp_size_in_bytes < one_cache_each / 4
    said = shared_prompts.bytes_per_prompt(model.config, 400, 50, num_tokens=10)
    assert said / 2 < memory.temp_size_in_bytes < 2 * said
