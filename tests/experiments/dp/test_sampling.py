import numpy as np
import pytest
import scipy.stats

from experiments.dp import sampling

NUM_EXAMPLES, NUM_STEPS, Q = 40, 4000, 0.2


@pytest.fixture(scope="module")
def included_SxN():
    included = np.zeros((NUM_STEPS, NUM_EXAMPLES), bool)
    for step in range(NUM_STEPS):
        included[step, sampling.poisson_batch(1, step, NUM_EXAMPLES, Q)] = True
    return included


def test_every_example_has_the_sampling_probability(included_SxN):
    counts_N = included_SxN.sum(axis=0)
    z_N = (counts_N - NUM_STEPS * Q) / np.sqrt(NUM_STEPS * Q * (1 - Q))
    assert scipy.stats.kstest(z_N, "norm").pvalue > 1e-3


def test_batch_sizes_are_binomial(included_SxN):
    sizes_S = included_SxN.sum(axis=1)
    expected = scipy.stats.binom(NUM_EXAMPLES, Q)
    assert sizes_S.mean() == pytest.approx(expected.mean(), abs=0.15)
    # A fixed size, or shuffled epochs, would have next to no variance.
    assert sizes_S.var() == pytest.approx(expected.var(), rel=0.1)


def _largest_correlation(a_SxN, b_SxN, ignore_diagonal):
    standard = [(x - x.mean(axis=0)) / x.std(axis=0) for x in (a_SxN, b_SxN)]
    correlation_NxN = standard[0].T @ standard[1] / len(a_SxN)
    if ignore_diagonal:
        np.fill_diagonal(correlation_NxN, 0)
    return np.abs(correlation_NxN).max()


def test_examples_are_pairwise_independent(included_SxN):
    # 780 standard normals over sqrt(steps): the largest stays below 4.5 deviations.
    limit = 4.5 / np.sqrt(NUM_STEPS)
    assert _largest_correlation(included_SxN, included_SxN, True) < limit


def test_consecutive_steps_are_independent(included_SxN):
    limit = 4.8 / np.sqrt(NUM_STEPS)
    assert _largest_correlation(included_SxN[:-1], included_SxN[1:], False) < limit


def test_a_step_can_be_drawn_again_and_alone():
    first = sampling.poisson_batch(3, 17, 100, 0.3)
    np.testing.assert_array_equal(first, sampling.poisson_batch(3, 17, 100, 0.3))
    for other in (
        sampling.poisson_batch(3, 18, 100, 0.3),
        sampling.poisson_batch(4, 17, 100, 0.3),
    ):
        assert not np.array_equal(first, other)


def test_certain_and_impossible_inclusion():
    everyone = sampling.poisson_batch(0, 0, 50, 1.0)
    assert sorted(everyone.tolist()) == list(range(50))
    assert sampling.poisson_batch(0, 0, 50, 0.0).size == 0


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 16, 30])
def test_physical_batches_lose_nothing(count):
    indices = np.arange(count)[::-1]
    parts = sampling.physical_batches(indices, 8)
    assert all(part.shape == (8,) and part.dtype == np.int32 for part in parts)
    joined = np.concatenate(parts)
    np.testing.assert_array_equal(joined[joined >= 0], indices)
    assert set(joined[joined < 0].tolist()) <= {-1}
    assert len(parts) == max(1, -(-count // 8))


@pytest.mark.parametrize(("num_examples", "batch_size"), [(1437, 256), (60_000, 2048)])
def test_default_physical_size_is_rarely_exceeded(num_examples, batch_size):
    size = sampling.default_physical_size(num_examples, batch_size)
    law = scipy.stats.binom(num_examples, batch_size / num_examples)
    assert law.sf(size) < 1e-4


def test_default_physical_size_holds_the_whole_data_set():
    assert sampling.default_physical_size(10, 10) == 10
