import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import models
from experiments.errors import UsageError
from experiments.extraction import lm_objectives, span_corruption
from experiments.extraction.lm_config import LmConfig
from experiments.extraction.lm_objectives import NextToken, SpanCorruption
from experiments.extraction.span_corruption import corrupt

pytestmark = pytest.mark.usefixtures("compiled_cheaply")

VOCABULARY_SIZE = 20
GPT = "gpt2:layers=1:width=8:heads=2"
T5 = "t5:layers=1:width=8:heads=2:head_dim=6:feed_forward=10"


class Bigram(nn.Module):
    """The logits of the next token are a row of a table."""

    @nn.compact
    def __call__(self, tokens_BxT):
        return nn.Embed(VOCABULARY_SIZE, VOCABULARY_SIZE, name="table")(tokens_BxT)


def model_of(spec):
    return models.build_language_model(spec, VOCABULARY_SIZE, 64)


@functools.cache
def t5():
    """A T5 with weights so large that its losses depend on all that it reads."""
    model = model_of(T5)
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    shapes = jax.eval_shape(model.init, jax.random.key(0), tokens, tokens)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: 0.5 * rng.normal(size=x.shape), shapes)
    return model, jax.tree.map(lambda x: x.astype(np.float32), params)


def crops_of(seed, num_crops, length):
    """Crops and, as the loop gives them, the token after each."""
    rng = np.random.default_rng(seed)
    tokens_BxL = rng.integers(0, VOCABULARY_SIZE, (num_crops, length + 1))
    return tokens_BxL.astype(np.int32)


def test_next_tokens_lose_the_cross_entropy_of_all_but_the_first():
    tokens_BxL = crops_of(0, 2, 5)
    objective = NextToken(Bigram())
    params = Bigram().init(jax.random.key(0), tokens_BxL)
    total, number = objective.loss(params, objective.batch(tokens_BxL, 7))
    assert total.dtype == number.dtype == jnp.float32
    table_VxV = np.asarray(params["params"]["table"]["embedding"], np.float64)
    logprobs_VxV = table_VxV - np.log(np.exp(table_VxV).sum(-1, keepdims=True))
    before, after = tokens_BxL[:, :-1], tokens_BxL[:, 1:]
    np.testing.assert_allclose(total, -logprobs_VxV[before, after].sum(), rtol=1e-6)
    assert number == 10


@pytest.mark.parametrize("masking", ["iid", "spans"])
def test_padded_blanks_lose_what_each_crop_loses_by_itself(masking):
    """No padding: one crop at a time, with its inputs and targets as they are."""
    model, params = t5()
    config = model.config
    tokens_6xL = crops_of(1, 6, 45)
    objective = SpanCorruption(model, masking, seed=3)
    batch = objective.batch(tokens_6xL, 100)
    total, number = jax.jit(objective.loss)(params, batch)
    expected, lengths = [], set()
    for row, tokens_L in enumerate(tokens_6xL):
        dropped_T = span_corruption.mask(masking, 3, 100 + row, 45)
        blanks = corrupt(tokens_L[:-1], dropped_T, config.sentinels, config.eos_id)
        targets_T = blanks.targets_T[: blanks.num_scored]
        logits_TxV = model.apply(params, blanks.inputs_S[None], targets_T[None])[0]
        logprobs_TxV = np.asarray(jax.nn.log_softmax(logits_TxV), np.float64)
        expected += list(-logprobs_TxV[np.arange(len(targets_T)), targets_T])
        lengths.add((len(blanks.inputs_S), len(targets_T)))
    # Of different lengths if blanks are.
    assert len(lengths) > 1 or masking == "spans"
    assert number == len(expected) < batch.targets_NxT.size
    assert total.dtype == number.dtype == jnp.float32
    assert total == pytest.approx(sum(expected), rel=1e-5)


def test_blanks_are_others_at_each_visit_and_the_same_when_continued():
    objective = SpanCorruption(model_of(T5), "spans", seed=0)
    tokens_4xL = np.repeat(crops_of(2, 1, 40), 4, axis=0)
    first = objective.batch(tokens_4xL, 0)
    assert len({row.tobytes() for row in first.inputs_NxS}) == 4
    second = objective.batch(tokens_4xL, 4)
    assert not np.array_equal(first.inputs_NxS, second.inputs_NxS)
    again = SpanCorruption(model_of(T5), "spans", seed=0).batch(tokens_4xL[:2], 6)
    for found, expected in zip(again, second, strict=True):
        np.testing.assert_array_equal(found, expected[2:])
    other = SpanCorruption(model_of(T5), "spans", seed=1).batch(tokens_4xL, 0)
    assert not np.array_equal(other.inputs_NxS, first.inputs_NxS)


@pytest.mark.parametrize("masking", ["iid", "spans"])
def test_all_batches_have_the_same_shapes(masking):
    objective = SpanCorruption(model_of(T5), masking, seed=0)
    batches = [objective.batch(crops_of(i, 3, 50), 3 * i) for i in range(20)]
    shapes = {tuple((x.shape, x.dtype) for x in batch) for batch in batches}
    assert len(shapes) == 1


def test_the_separator_of_the_corpus_is_a_token_like_any_other():
    """It may be dropped, and is never taken for the </s> or the padding of T5."""
    model = models.build_language_model(T5, VOCABULARY_SIZE, 64, eos_id=0)
    tokens_1xL = np.zeros((1, 41), np.int32)
    batch = SpanCorruption(model, "spans", seed=0).batch(tokens_1xL, 0)
    assert (batch.inputs_NxS == 0).sum() == 34
    assert (batch.targets_NxT == 0).sum() == 6


def test_each_family_has_its_own():
    config = LmConfig(seed=4, sequence_length=12)
    assert lm_objectives.of(config, model_of(GPT)) == NextToken(model_of(GPT))
    spans = SpanCorruption(model_of(T5), "spans", 4)
    assert lm_objectives.of(config, model_of(T5)) == spans
    iid = dataclasses.replace(config, masking="iid")
    assert lm_objectives.of(iid, model_of(T5)).masking == "iid"
    assert spans.derived() == {"masking": "spans"}


@pytest.mark.parametrize(
    ("spec", "changes", "message"),
    [
        (GPT, {"masking": "iid"}, "masking='iid', expected None for a gpt2, which"),
        (T5, {"max_positions": 64}, "max_positions=64, expected None for a t5"),
        (T5, {"sequence_length": 1}, "sequence_length=1, expected 2 or more"),
        (
            T5,
            {"sequence_length": 700, "masking": "iid"},
            "sequence_length=700, expected so few that 99 blanks can .*, not 105: ch",
        ),
    ],
)
def test_keys_that_do_not_fit_the_family(spec, changes, message):
    config = dataclasses.replace(LmConfig(), **changes)
    with pytest.raises(UsageError, match=rf"^config\.{message}") as error:
        lm_objectives.of(config, model_of(spec))
    assert "\n" not in str(error.value)


def test_the_longest_crops_can_be_named():
    for masking, length in (("iid", 663), ("spans", 1990)):
        config = LmConfig(sequence_length=length, masking=masking)
        objective = lm_objectives.of(config, model_of(T5))
        objective.batch(crops_of(0, 8, length), 0)
        longer = dataclasses.replace(config, sequence_length=length + 1)
        with pytest.raises(UsageError, match="expected so few"):
            lm_objectives.of(longer, model_of(T5))
