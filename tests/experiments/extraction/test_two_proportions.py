import fractions
import itertools
import math

import hypothesis
import numpy as np
import pytest
import scipy.stats
from hypothesis import strategies as st

from experiments.extraction import two_proportions
from experiments.extraction.two_proportions import compare

WINDOWS = st.lists(
    st.tuples(st.booleans(), st.booleans(), st.integers(0, 7)), min_size=1, max_size=60
)


def arrays(windows):
    first_N, second_N, clusters_N = (np.array(a) for a in zip(*windows, strict=True))
    return first_N, second_N, clusters_N


def test_a_pair_of_models_by_hand():
    """Clusters 0, 1, 2 of 2, 1 and 3 windows, which change by 2, -1 and 2."""
    found = compare(
        np.array([1, 1, 0, 1, 1, 0], bool),
        np.array([0, 0, 1, 0, 0, 0], bool),
        np.array([0, 0, 1, 2, 2, 2]),
    )
    assert (found.windows, found.clusters, found.differing_clusters) == (6, 3, 3)
    assert (found.first, found.second) == pytest.approx((4 / 6, 1 / 6))
    assert found.difference == 0.5
    pooled = 5 / 12
    assert found.pooled_z == pytest.approx(0.5 / math.sqrt(pooled * (1 - pooled) / 3))
    assert found.pooled_p == pytest.approx(2 * scipy.stats.norm.sf(found.pooled_z))
    # 3 of 3, from changes 2, 1, 2: of eight sums of signs, -5 -3 3 5 are as far away
    # with -1 and +1 of the middle one, which is 5, 3, and the same below 0.
    assert found.clustered_z == pytest.approx(3 / math.sqrt(9))
    assert found.clustered_p == 4 / 8


@hypothesis.given(WINDOWS)
def test_the_probability_is_that_of_all_signs(windows):
    first_N, second_N, clusters_N = arrays(windows)
    found = compare(first_N, second_N, clusters_N)
    changes = [
        int(first_N[clusters_N == c].sum()) - int(second_N[clusters_N == c].sum())
        for c in np.unique(clusters_N)
    ]
    sums = [
        abs(sum(s * d for s, d in zip(signs, changes, strict=True)))
        for signs in itertools.product((1, -1), repeat=len(changes))
    ]
    as_far = sum(total >= abs(sum(changes)) for total in sums)
    expected = fractions.Fraction(as_far, len(sums))
    assert found.clustered_p == pytest.approx(float(expected), rel=1e-12)
    if found.differing_clusters:
        assert found.clustered_p >= 2.0 ** (1 - found.differing_clusters)


@hypothesis.given(WINDOWS)
def test_either_model_may_be_the_first(windows):
    first_N, second_N, clusters_N = arrays(windows)
    one = compare(first_N, second_N, clusters_N)
    other = compare(second_N, first_N, clusters_N)
    assert one.difference == -other.difference
    assert one.lower == pytest.approx(-other.upper)
    assert one.pooled_z == pytest.approx(-other.pooled_z)
    assert one.clustered_z == -other.clustered_z
    assert one.clustered_p == pytest.approx(other.clustered_p)
    assert -1 <= one.lower <= one.difference <= one.upper <= 1
    assert one.difference == pytest.approx(one.first - one.second)


def test_windows_on_their_own_are_tested_as_by_mcnemar():
    """30 for the first alone, 12 for the second alone, 58 alike."""
    first_N = np.repeat([1, 0, 1, 0], [30, 12, 20, 38])
    second_N = np.repeat([0, 1, 1, 0], [30, 12, 20, 38])
    found = compare(first_N, second_N, np.arange(100))
    assert found.clustered_z == pytest.approx(18 / math.sqrt(42))
    sign_test = scipy.stats.binomtest(30, 42).pvalue
    assert found.clustered_p == pytest.approx(sign_test, rel=1e-12)
    # Agresti & Min 2005: half a pair more in each cell.
    b, c, n = 30.5, 12.5, 102
    half = 1.959964 * math.sqrt(b + c - (b - c) ** 2 / n) / n
    expected = ((b - c) / n - half, (b - c) / n + half)
    assert (found.lower, found.upper) == pytest.approx(expected)


def test_copies_of_windows_fool_the_pooled_test_only():
    first_N = np.repeat([1, 0, 0, 1], [8, 3, 9, 5])
    second_N = np.repeat([0, 1, 0, 1], [8, 3, 9, 5])
    clusters_N = np.arange(25)
    one = compare(first_N, second_N, clusters_N)
    copied = compare(*(np.repeat(a, 4) for a in (first_N, second_N, clusters_N)))
    assert copied.pooled_z == pytest.approx(2 * one.pooled_z)
    assert copied.clustered_z == pytest.approx(one.clustered_z)
    assert copied.clustered_p == pytest.approx(one.clustered_p)
    assert (copied.lower, copied.upper) == pytest.approx((one.lower, one.upper))


def test_nothing_differs():
    alike_N = np.array([1, 0, 1], bool)
    for values_N in (alike_N, ~alike_N | True, alike_N & False):
        found = compare(values_N, values_N, np.arange(3))
        assert (found.pooled_z, found.clustered_z) == (0, 0)
        assert (found.pooled_p, found.clustered_p) == (1, 1)
        assert found.lower < found.difference == 0 < found.upper


def test_small_probabilities_are_not_zero():
    first_N, second_N = np.repeat([1, 0], 200), np.repeat([0, 0], 200)
    found = compare(first_N, second_N, np.arange(400))
    assert found.clustered_p == pytest.approx(2.0**-199, rel=1e-12)
    # z is 16.3: 1 less a probability so small would be 1.
    assert found.pooled_p == pytest.approx(2 * scipy.stats.norm.sf(found.pooled_z))
    assert 0 < found.pooled_p < 1e-50


def test_many_clusters_have_the_normal_distribution(monkeypatch):
    rng = np.random.default_rng(0)
    first_N, second_N = rng.random((2, 900)) < np.array([[0.34], [0.3]])
    clusters_N = rng.integers(300, size=900)
    exact = compare(first_N, second_N, clusters_N)
    monkeypatch.setattr(two_proportions, "_EXACT", 0)
    normal = compare(first_N, second_N, clusters_N)
    expected = 2 * scipy.stats.norm.sf(abs(normal.clustered_z))
    assert normal.clustered_p == pytest.approx(expected, rel=1e-12)
    assert exact.clustered_p == pytest.approx(normal.clustered_p, abs=0.05)
    assert exact.clustered_p != normal.clustered_p


def test_no_window_is_an_error():
    nothing = np.zeros(0, bool)
    with pytest.raises(ValueError, match="no window"):
        compare(nothing, nothing, np.zeros(0, np.int64))
