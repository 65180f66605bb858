import math
from fractions import Fraction

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from experiments.errors import RunError, UsageError
from experiments.extraction import discoverable


def least(log_probability, p):
    return discoverable.least_queries(np.array([log_probability]), p).item()


@hypothesis.given(
    p_z=st.integers(1, 99).map(lambda i: Fraction(i, 100)),
    p=st.integers(1, 99).map(lambda i: Fraction(i, 100)),
)
def test_is_the_definition_in_fractions(p_z, p):
    n = int(least(math.log(p_z), float(p)))
    assert 1 - (1 - p_z) ** n >= p
    assert n == 1 or 1 - (1 - p_z) ** (n - 1) < p


@pytest.mark.parametrize("n", [1, 2, 3, 10])
def test_is_not_one_too_many_at_the_border(n):
    """Where n queries reach p exactly, and just not."""
    p = 1 - 2.0**-n
    assert least(math.log(0.5), p) == n
    assert least(math.log(0.5), p + 1e-12) == n + 1


@hypothesis.given(st.floats(-700, -40), st.floats(0.01, 0.99))
def test_tiny_probabilities(log_probability, p):
    """log(1 - p_z) is -p_z to more digits than there are."""
    expected = -math.log1p(-p) * math.exp(-log_probability)
    assert least(log_probability, p) == pytest.approx(expected, rel=1e-11)


def test_ends_of_the_range():
    assert least(-math.inf, 0.5) == math.inf
    assert least(-1e4, 0.5) == math.inf
    assert least(0.0, 0.999) == 1
    # Rounding in a sum of float32 log-probabilities.
    assert least(1e-6, 0.999) == 1
    assert least(-1e-30, 0.999) == 1
    assert 1e130 < least(-300.0, 0.5) < 2e130


@hypothesis.given(
    st.lists(st.floats(-400, 0), min_size=1), st.floats(1, 1e100), st.floats(0.01, 0.99)
)
def test_rates_grow_with_n_and_fall_with_p(log_probabilities, n, p):
    log_probability_N = np.array(log_probabilities)
    rate = discoverable.rate(log_probability_N, n, p)
    assert 0 <= rate <= discoverable.rate(log_probability_N, 2 * n, p) <= 1
    assert discoverable.rate(log_probability_N, n, p / 2) >= rate


def test_one_query_needs_the_probability_itself():
    log_probability_N = np.log([0.1, 0.3, 0.5, 0.9])
    assert discoverable.rate(log_probability_N, 1, 0.4) == 0.5


@pytest.mark.parametrize("p", [0.0, 1.0, -0.1, 1.5, math.nan])
def test_p_that_is_no_probability(p):
    with pytest.raises(UsageError, match="expected a probability between 0 and 1"):
        least(-1.0, p)


@pytest.mark.parametrize("n", [0, -3, 0.5, math.nan])
def test_no_queries(n):
    with pytest.raises(UsageError, match="queries, expected at least 1"):
        discoverable.rate(np.zeros(2), n, 0.5)


def test_nan_is_not_undiscoverable():
    with pytest.raises(RunError, match="1 of 3 log-probabilities are NaN"):
        discoverable.rate(np.array([-1.0, math.nan, -math.inf]), 5, 0.5)
