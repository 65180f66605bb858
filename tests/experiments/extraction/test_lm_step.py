import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.extraction import lm_step
from experiments.extraction.lm_objectives import NextToken

VOCABULARY_SIZE = 7


class Bigram(nn.Module):
    """The logits of the next token are a row of a table, times a function of a gain."""

    gain: object = staticmethod(lambda gain: gain)

    @nn.compact
    def __call__(self, tokens_BxT):
        table = nn.Embed(VOCABULARY_SIZE, VOCABULARY_SIZE, name="table")
        gain = self.param("gain", nn.initializers.ones, (1,))
        return table(tokens_BxT) * self.gain(gain)[None, None]


@pytest.fixture
def tokens_BxL():
    return jax.random.randint(jax.random.key(3), (2, 6), 0, VOCABULARY_SIZE)


def adamw(weight_decay=0.0, gradient_clip_norm=1.0, learning_rate=0.1):
    return lm_step.adamw(
        lambda count: learning_rate,
        weight_decay=weight_decay,
        gradient_clip_norm=gradient_clip_norm,
    )


def test_weights_decay_in_matrices_alone():
    params = {"kernel": jnp.full((2, 2), 3.0), "bias": jnp.full(2, 3.0)}
    optimizer = adamw(weight_decay=0.5)
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = optimizer.update(zeros, optimizer.init(params), params)
    np.testing.assert_allclose(updates["kernel"], -0.1 * 0.5 * 3.0, rtol=1e-6)
    np.testing.assert_array_equal(updates["bias"], 0.0)


@pytest.mark.parametrize(("length", "expected"), [(50.0, 2.0), (0.5, 0.5)])
def test_long_gradients_are_cut(length, expected):
    params = {"a": jnp.zeros(1), "b": jnp.zeros((1, 1))}
    grads = {"a": jnp.full(1, 0.6 * length), "b": jnp.full((1, 1), -0.8 * length)}
    optimizer = adamw(gradient_clip_norm=2.0)
    _, state = optimizer.update(grads, optimizer.init(params), params)
    mean = optax.tree.get(state, "mu")
    assert optax.tree.norm(mean) == pytest.approx(0.1 * expected, rel=1e-6)
    second = optax.tree.get(state, "nu")
    expected_second = 0.05 * (0.6 * expected) ** 2
    assert float(second["a"][0]) == pytest.approx(expected_second, rel=1e-5)


def test_rates_without_warmup_start_at_the_peak():
    schedule = lm_step.learning_rates(0.5, warmup_steps=0, num_steps=10)
    assert float(schedule(0)) == 0.5
    assert float(schedule(10)) == pytest.approx(0.05)


def mean_of(loss):
    def mean(params, batch):
        total, number = loss(params, batch)
        return total / number

    return mean


@pytest.mark.parametrize("microbatch_size", [1, 2, 4])
def test_parts_make_the_gradient_of_the_whole(microbatch_size):
    """Of the mean over all targets, though parts have different numbers of them."""
    model = Bigram()
    tokens_BxL = jax.random.randint(jax.random.key(4), (4, 6), 0, VOCABULARY_SIZE)
    batch = {"tokens": tokens_BxL, "counts": jnp.array([5.0, 1.0, 0.0, 2.0])}
    params = model.init(jax.random.key(0), tokens_BxL)

    def loss(params, batch):
        logits_BxTxV = model.apply(params, batch["tokens"][:, :-1])
        losses_BxT = optax.softmax_cross_entropy_with_integer_labels(
            logits_BxTxV, batch["tokens"][:, 1:]
        )
        counts_B = batch["counts"]
        return (losses_BxT.mean(axis=1) * counts_B).sum(), counts_B.sum()

    expected = jax.value_and_grad(mean_of(loss))(params, batch)
    found = lm_step.loss_and_gradient(loss, params, batch, microbatch_size)
    for got, wanted in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("batch_size", "sequence_length", "expected"),
    [(16, 32, 16), (24, 64, 8), (24, 100, 4), (7, 256, 1), (16, 2048, 1)],
)
def test_microbatches_on_a_cpu_divide_the_batch(batch_size, sequence_length, expected):
    found = lm_step.default_microbatch_size(batch_size, sequence_length, "cpu")
    assert found == expected


def test_steps_add_their_losses_and_lower_them(tokens_BxL):
    loss, optimizer = NextToken(Bigram()).loss, adamw()
    params = Bigram().init(jax.random.key(0), tokens_BxL)
    first = float(mean_of(loss)(params, tokens_BxL))
    step = lm_step.make_step(loss, optimizer, microbatch_size=1)
    state = lm_step.init_state(params, optimizer)
    state = step(state, tokens_BxL)
    second = float(mean_of(loss)(state.params, tokens_BxL))
    state = step(state, tokens_BxL)
    assert second < first
    assert float(state.loss_sum) == pytest.approx(first + second, rel=1e-6)


def test_a_gradient_that_is_not_finite_shows_in_the_loss(tokens_BxL):
    # The root of zero has no finite slope, and the loss is finite.
    model = Bigram(gain=lambda gain: jnp.sqrt(gain - gain))
    loss, optimizer = NextToken(model).loss, adamw()
    params = model.init(jax.random.key(0), tokens_BxL)
    assert np.isfinite(mean_of(loss)(params, tokens_BxL))
    step = lm_step.make_step(loss, optimizer, microbatch_size=1)
    state = step(lm_step.init_state(params, optimizer), tokens_BxL)
    assert np.isnan(state.loss_sum)
