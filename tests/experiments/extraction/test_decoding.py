import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from experiments import models
from experiments.extraction import decoding
from tests.experiments.extraction import known_windows

pytestmark = pytest.mark.usefixtures("compiled_cheaply")


@given(
    hnp.arrays(np.float32, (3, 7), elements=st.sampled_from([-np.inf, -1.0, 0.0, 2.0]))
)
def test_the_lowest_of_equal_ids_wins(logits_BxV):
    token_B = decoding.greedy_token(jnp.asarray(logits_BxV))
    assert token_B.dtype == jnp.int32
    np.testing.assert_array_equal(token_B, logits_BxV.argmax(axis=-1))


def test_not_a_number_is_no_token():
    logits_BxV = jnp.array([[0.0, jnp.nan], [jnp.nan, jnp.nan], [0.0, jnp.inf]])
    assert decoding.greedy_token(logits_BxV).tolist() == [2, 2, 1]


class Counting:
    """A model without attention: the token after t is t + 1, around the vocabulary."""

    vocabulary_size = 7

    def init_cache(self, batch_size, length):
        return {
            "read": jnp.zeros((), jnp.int32),
            "room": jnp.zeros((batch_size, length)),
        }

    def apply(self, params, x, cache=None, *, method):
        del params
        if method == "logits":
            return jax.nn.one_hot((x[..., 0] + 1) % self.vocabulary_size, 7)
        room = cache["room"].shape[1]
        read = cache["read"] + x.shape[1]
        hidden = jnp.where(read <= room, x, -1)
        return hidden[..., None], {**cache, "read": read}


def test_no_token_ends_the_text():
    prompts_BxT = jnp.array([[9, 5], [9, 6]])
    generated_BxN = decoding.generate(Counting(), None, prompts_BxT, num_tokens=20)
    expected_BxN = (np.array([[6], [0]]) + np.arange(20)) % 7
    assert generated_BxN.tolist() == expected_BxN.tolist()


@pytest.mark.parametrize("num_tokens", [1, 2])
def test_few_tokens(num_tokens):
    generated_BxN = decoding.generate(
        Counting(), None, jnp.array([[3]]), num_tokens=num_tokens
    )
    assert generated_BxN.tolist() == [[4, 5][:num_tokens]]


@pytest.mark.parametrize("family", ["gpt_neo", "gpt_j"])
def test_equal_to_decoding_without_a_cache(family):
    folder = known_windows.GOLDEN / family
    # Beyond the 256 tokens that GPT-Neo's local layers see, up to the last position.
    prompts_BxT = np.random.default_rng(1).integers(
        0, known_windows.VOCABULARY_SIZE, (2, 251)
    )
    model, params = models.load(folder)
    generated_Bx50 = jax.jit(lambda p, x: decoding.generate(model, p, x))(
        params, prompts_BxT.astype(np.int32)
    )
    expected_BxT = known_windows.continued(folder, prompts_BxT)
    np.testing.assert_array_equal(generated_Bx50, expected_BxT[:, 251:])
