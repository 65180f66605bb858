import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.dp.sampling import physical_batches
from experiments.dp.steps import Data, PrivateStep, make_evaluate, zero_sums
from experiments.models import classifiers

CLIP, EXPECTED_BATCH_SIZE = 1.0, 10
# Steps are compiled per physical size.
pytestmark = pytest.mark.usefixtures("compiled_once")
MODEL = classifiers.MLP(num_classes=3, hidden_sizes=(4,))


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    inputs_N = rng.uniform(size=(40, 3, 3, 1)).astype(np.float32)
    return Data(jnp.asarray(inputs_N), jnp.asarray(rng.integers(0, 3, 40)))


@jax.jit
def init_params():
    return MODEL.init(jax.random.key(0), jnp.zeros((1, 3, 3, 1)))


def make_step(noise_multiplier=0.0, learning_rate=1.0):
    return PrivateStep(
        MODEL,
        optax.sgd(learning_rate),
        jax.random.key(1),
        l2_clip_norm=CLIP,
        noise_multiplier=noise_multiplier,
        expected_batch_size=EXPECTED_BATCH_SIZE,
    )


@pytest.fixture(scope="module")
def quiet_step():
    return make_step()


@pytest.fixture(scope="module")
def noisy_step():
    return make_step(noise_multiplier=2.0)


def change(step, data, parts):
    """What one step subtracts from the parameters, as one vector."""
    before = init_params()
    state, sums = step(step.init(init_params()), data, parts)
    flat = [jax.flatten_util.ravel_pytree(p)[0] for p in (before, state.params)]
    return np.asarray(flat[0] - flat[1]), sums


def clipped_mean(data, indices):
    """The same by hand, one example at a time."""

    @jax.jit
    @jax.grad
    def grad_fn(params, i):
        logits_1xV = MODEL.apply(params, data.inputs_N[i][None])
        return optax.softmax_cross_entropy_with_integer_labels(
            logits_1xV[0], data.labels_N[i]
        )

    total, num_clipped, params = 0.0, 0, init_params()
    for i in indices:
        grad = jax.flatten_util.ravel_pytree(grad_fn(params, i))[0]
        norm = jnp.linalg.norm(grad)
        num_clipped += int(norm > CLIP)
        total = total + grad * jnp.minimum(1.0, CLIP / norm)
    return np.asarray(total) / EXPECTED_BATCH_SIZE, num_clipped


@pytest.mark.parametrize("physical_size", [7, 24])
def test_clipped_sum_over_the_expected_size(quiet_step, data, physical_size):
    indices = np.array([3, 1, 4, 15, 9, 2, 6])
    found, sums = change(quiet_step, data, physical_batches(indices, physical_size))
    expected, num_clipped = clipped_mean(data, indices)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    assert 0 < num_clipped < 7, "the clip norm should split the examples"
    assert int(sums.num_clipped) == num_clipped
    assert int(sums.num_examples) == 7


@pytest.mark.parametrize("physical_size", [7, 19])
def test_a_batch_beyond_the_physical_size_loses_nothing(
    quiet_step, noisy_step, data, physical_size
):
    indices = np.arange(19)
    parts = physical_batches(indices, physical_size)
    # With noise too: it is added once, and is the same for the same step.
    for step in (quiet_step, noisy_step):
        whole, sums_whole = change(step, data, physical_batches(indices, 24))
        split, sums_split = change(step, data, parts)
        np.testing.assert_allclose(split, whole, rtol=1e-4, atol=1e-5)
        assert int(sums_split.num_correct) == int(sums_whole.num_correct)
        assert int(sums_split.num_examples) == 19
        assert float(sums_split.loss) == pytest.approx(float(sums_whole.loss), rel=1e-5)


def test_an_empty_batch_is_a_step_with_noise(noisy_step, quiet_step, data):
    empty = physical_batches(np.array([], np.int32), 7)
    noise, sums = change(noisy_step, data, empty)
    assert int(sums.num_examples) == 0
    assert float(sums.loss) == 0
    # Of standard deviation noise multiplier * clip norm / expected batch size.
    scale = 2.0 * CLIP / EXPECTED_BATCH_SIZE
    assert noise.std() == pytest.approx(scale, rel=0.35)
    assert len(np.unique(noise)) == noise.size
    assert np.all(change(quiet_step, data, empty)[0] == 0)


def test_noise_differs_from_step_to_step(noisy_step, data):
    empty = physical_batches(np.array([], np.int32), 7)
    state = noisy_step.init(init_params())
    flat = [jax.flatten_util.ravel_pytree(state.params)[0]]
    for _ in range(2):
        state, _ = noisy_step(state, data, empty)
        flat.append(jax.flatten_util.ravel_pytree(state.params)[0])
    first, second = flat[1] - flat[0], flat[2] - flat[1]
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.5
    assert not np.any(np.isclose(first, second, atol=1e-6))


def test_one_compilation_for_all_batch_sizes(data):
    step = make_step(noise_multiplier=1.0)
    state = step.init(init_params())
    for size in (0, 1, 5, 8, 9, 17, 40, 3, 0):
        state, _ = step(state, data, physical_batches(np.arange(size), 8))
    assert step.update._cache_size() == 1
    assert step.accumulate._cache_size() == 1


def test_zero_sums_are_like_the_sums(quiet_step, data):
    zero = zero_sums(init_params())
    sums = jax.eval_shape(
        quiet_step.accumulate, zero, init_params(), data, np.zeros(4, np.int32)
    )
    assert jax.tree.map(lambda x: (x.shape, x.dtype), zero) == jax.tree.map(
        lambda x: (x.shape, x.dtype), sums
    )


@pytest.mark.parametrize("batch_size", [7, 40, 64])
def test_accuracy_counts_every_example_once(data, batch_size):
    params = init_params()
    predictions_N = jnp.argmax(MODEL.apply(params, data.inputs_N), axis=-1)
    expected = float(jnp.mean(predictions_N == data.labels_N))
    found = make_evaluate(MODEL, batch_size)(params, data)
    assert found == pytest.approx(expected, abs=1e-6)
