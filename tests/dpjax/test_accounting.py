"""Tests of dpjax.accounting against closed forms, quadrature and published values."""

import dataclasses
import doctest
import json
import math
import warnings

import dp_accounting
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpjax import accounting

_LEDGER = accounting.Ledger()


def _renyi_by_quadrature(sigma: float, q: float, order: float) -> float:
    """Rényi divergence of one step by the trapezoidal rule, in both directions.

    The integrands are analytic and vanish at both ends, where the rule converges
    exponentially fast.
    """
    x = np.arange(-30 * sigma - order, 30 * sigma + 2 * order, sigma / 64)
    log_base = -(x**2) / (2 * sigma**2) - math.log(sigma * math.sqrt(2 * math.pi))
    log_shifted = log_base + (2 * x - 1) / (2 * sigma**2)
    log_mixed = np.logaddexp(math.log1p(-q) + log_base, math.log(q) + log_shifted)

    def divergence(log_p: np.ndarray, log_q: np.ndarray) -> float:
        log_terms = order * log_p - (order - 1) * log_q + math.log(sigma / 64)
        top = log_terms.max()
        return (top + math.log(np.exp(log_terms - top).sum())) / (order - 1)

    return max(divergence(log_mixed, log_base), divergence(log_base, log_mixed))


@pytest.mark.parametrize("sigma", [0.3, 0.7, 1.0, 2.5, 10.0])
@pytest.mark.parametrize("q", [0.001, 0.02, 0.3, 0.9])
@pytest.mark.parametrize("order", [1.2, 1.7, 2, 3.5, 8, 33])
def test_one_step_divergence_is_never_below_quadrature(sigma, q, order):
    exact = _renyi_by_quadrature(sigma, q, order)
    value = accounting._rdp_of_one_step(sigma, q, order)
    assert exact * (1 - 1e-9) - 1e-14 <= value <= exact * (1 + 1e-9) + 1e-12


@pytest.mark.parametrize(
    ("sigma", "q", "order"),
    [
        (1.0, 0.01, 300),
        (0.1, 1e-5, 1_000),
        (10.0, 1e-4, 900),
        (60.0, 1e-3, 20_000),
        # The integrand peaks between 0 and the order, near neither.
        (109.36419620060568, 0.39717516282643495, 5871),
        (159.1099129681209, 0.32303872029442615, 24391),
    ],
)
def test_large_orders_agree_with_the_binomial_sum(sigma, q, order):
    event = dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(sigma))
    exact = dp_accounting.rdp.RdpAccountant([order]).compose(event).rdp[0]
    value = accounting._rdp_of_one_step(sigma, q, order)
    assert value == pytest.approx(exact, rel=1e-7)
    assert value >= exact * (1 - 1e-9)


def test_low_orders_are_tighter_than_the_librarys_bound():
    event = dp_accounting.PoissonSampledDpEvent(0.3, dp_accounting.GaussianDpEvent(10))
    bound = dp_accounting.rdp.RdpAccountant([1.2]).compose(event).rdp[0]
    assert accounting._rdp_of_one_step(10.0, 0.3, 1.2) < bound / 30


def test_one_step_divergence_stays_positive_where_rounding_dominates():
    # Without its margin the sum of the library is -4.5e-18 here.
    value = accounting._rdp_of_one_step(
        19093.328051951517, 1.0939692072847227e-06, 2778
    )
    assert value >= 4.55983e-18


@pytest.mark.parametrize(
    ("sigma", "q", "steps", "delta"),
    [
        (1.1, 0.01, 1_000, 1e-5),
        (0.6, 0.02, 300, 1e-6),
        (0.4, 0.3, 20, 1e-5),
        (4.0, 0.01, 10_000, 1e-5),
        (1.0, 0.002, 469, 1e-5),
    ],
)
def test_epsilon_is_the_least_over_all_orders(sigma, q, steps, delta):
    orders = 1 + np.geomspace(0.03, 60, 700)
    divergences = steps * np.array(
        [_renyi_by_quadrature(sigma, q, order) for order in orders]
    )
    # Canonne, Kamath and Steinke 2020, proposition 12.
    reference = np.min(
        divergences
        + np.log1p(-1 / orders)
        - (math.log(delta) + np.log(orders)) / (orders - 1)
    )
    value = accounting.epsilon(sigma, q, steps, delta)
    assert value == pytest.approx(reference, rel=2e-3)


# Data set of 60,000, batches of 128, 469 steps an epoch, delta 1e-5; integer orders
# only, so that these are upper bounds within a few percent.
_BY_EPOCHS = {
    0.64: [2.56, 3.70, 4.31, 8.50],
    1.0: [0.777, 1.03, 1.25, 2.74],
    1.1: [0.629, 0.818, 1.03, 2.32],
    2.0: [0.157, 0.292, 0.422, 1.00],
}


@pytest.mark.parametrize("sigma", _BY_EPOCHS)
def test_epsilon_by_epochs(sigma):
    values = [
        accounting.epsilon(sigma, 128 / 60_000, 469 * epochs, 1e-5)
        for epochs in (1, 10, 20, 100)
    ]
    np.testing.assert_array_less(values, np.array(_BY_EPOCHS[sigma]) * 1.005)
    np.testing.assert_allclose(values, _BY_EPOCHS[sigma], rtol=0.045)


def test_epsilon_of_the_textbook_example():
    assert accounting.epsilon(4.0, 0.01, 10_000, 1e-5) == pytest.approx(1.035, abs=1e-3)


def test_short_order_grids_do_not_happen():
    # A grid that ends at order 63 gives 0.1029, one with gaps up to 1024 0.0035.
    value = accounting.epsilon(10.0, 1e-4, 100, 1e-5)
    assert value < 0.0018
    assert value >= accounting.epsilon(10.0, 1e-4, 100, 1e-5, "pld") > 0


def test_epsilon_is_not_negative():
    assert accounting.epsilon(100.0, 1e-3, 1, 0.5) == 0.0
    assert accounting.epsilon(100.0, 1e-3, 1, 0.5, "pld") == 0.0


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
@pytest.mark.parametrize(
    ("sigma", "q", "steps", "expected"),
    [
        (1.0, 0.0, 100, 0.0),
        (0.0, 0.0, 100, 0.0),
        (1.0, 0.1, 0, 0.0),
        (0.0, 0.1, 0, 0.0),
        (math.inf, 0.1, 10, 0.0),
        (math.inf, 1.0, 10, 0.0),
        (0.0, 0.1, 1, math.inf),
        (0.0, 1.0, 1, math.inf),
        (1e-200, 0.1, 1, math.inf),
        (1e300, 1.0, 1, 0.0),
    ],
)
def test_edge_cases(sigma, q, steps, expected, accountant):
    assert accounting.epsilon(sigma, q, steps, 1e-5, accountant) == expected


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
@pytest.mark.parametrize(("sigma", "steps"), [(1.0, 1), (5.0, 30), (0.3, 4)])
def test_full_batches_are_the_plain_gaussian(sigma, steps, accountant):
    exact = dp_accounting.get_epsilon_gaussian(sigma / math.sqrt(steps), 1e-6)
    value = accounting.epsilon(sigma, 1.0, steps, 1e-6, accountant)
    assert exact <= value < exact * (1.002 if accountant == "pld" else 1.09)


@pytest.mark.parametrize("delta", [1e-5, 1e-9, 1e-10, 1e-11, 1e-12])
def test_pld_does_not_lose_small_deltas_to_rounding(delta):
    # dp-accounting's convolutions alone give 6.5476 at 1e-10, below the true 6.5479.
    exact = dp_accounting.get_epsilon_gaussian(1.0, delta)
    value = accounting.epsilon(100.0, 1 - 1e-10, 10_000, delta, "pld")
    assert exact * (1 - 1e-6) <= value < exact * 1.1


@pytest.mark.parametrize(
    ("sigma", "q", "steps"),
    [(1.1, 0.01, 500), (0.5, 0.1, 20), (20.0, 1e-3, 100_000), (0.2, 0.01, 3)],
)
def test_pld_is_tighter_than_rdp(sigma, q, steps):
    by_rdp = accounting.epsilon(sigma, q, steps, 1e-5)
    by_pld = accounting.epsilon(sigma, q, steps, 1e-5, "pld")
    assert by_rdp / 3 < by_pld < by_rdp


def test_tiny_delta():
    by_rdp = accounting.epsilon(1.0, 0.01, 1_000, 1e-18)
    assert accounting.epsilon(1.0, 0.01, 1_000, 1e-12) < by_rdp < 6.3
    # Out of the reach of the privacy loss distribution.
    assert accounting.epsilon(1.0, 0.01, 1_000, 1e-18, "pld") == by_rdp
    assert 900 < accounting.epsilon(1.0, 0.5, 1_000, 1e-300) < 1_000


def test_tiny_sampling_probability():
    assert accounting.epsilon(1.0, 1e-12, 10**6, 1e-5) == 0.0
    assert 0 < accounting.epsilon(1.0, 1e-12, 1, 1e-15) < 35
    assert accounting.epsilon(1.0, 5e-324, 1, 1e-5) == 0.0


def test_nearly_full_batches_join_up_with_full_ones():
    nearly = accounting.epsilon(1.0, 1 - 1e-16, 10, 1e-5)
    assert nearly == pytest.approx(accounting.epsilon(1.0, 1.0, 10, 1e-5), rel=2e-3)


def test_huge_epsilon_is_a_warned_bound():
    with pytest.warns(UserWarning, match="raise noise_multiplier") as caught:
        value = accounting.epsilon(1e-3, 1.0, 10, 1e-5)
    assert caught[0].filename == __file__
    # The divergence at order 1 is 10 / (2 sigma**2), and a floor.
    assert 5e6 < value < 5.06e6


def test_last_order_is_a_warned_bound():
    ledger = _step(_LEDGER, 1e5, 1e-5)
    with pytest.warns(UserWarning, match="the last one within reach") as caught:
        value = ledger.epsilon(1e-12)
    assert caught[0].filename == __file__
    assert 0 < value < 1e-7


_SIGMAS = st.floats(1, 20)
_PROBABILITIES = st.floats(1e-4, 1)
_STEPS = st.integers(1, 2_000)
_DELTAS = st.floats(1e-12, 1e-3)


@settings(max_examples=25)
@given(_SIGMAS, _PROBABILITIES, _STEPS, _DELTAS, st.floats(1.01, 3))
def test_epsilon_is_monotone(sigma, q, steps, delta, factor):
    # The orders tried are discrete, and not the same in every call.
    value = accounting.epsilon(sigma, q, steps, delta) * (1 - 3e-3)
    assert value >= 0
    assert accounting.epsilon(sigma / factor, q, steps, delta) >= value
    assert accounting.epsilon(sigma, min(q * factor, 1), steps, delta) >= value
    assert accounting.epsilon(sigma, q, math.ceil(steps * factor), delta) >= value
    assert accounting.epsilon(sigma, q, steps, delta / factor) >= value


@settings(max_examples=15)
@given(st.floats(0.05, 20), _PROBABILITIES, _STEPS, st.sampled_from([1e-5, 1e-8]))
def test_calibrated_noise_never_exceeds_the_target(target, q, steps, delta):
    sigma = accounting.noise_multiplier(
        target, delta=delta, sampling_probability=q, num_steps=steps
    )
    assert accounting.epsilon(sigma, q, steps, delta) <= target
    assert accounting.epsilon(sigma * (1 - 2e-3), q, steps, delta) > target * (1 - 5e-3)


def test_calibrated_noise_by_pld():
    arguments = {"delta": 1e-5, "sampling_probability": 0.01, "num_steps": 500}
    by_rdp = accounting.noise_multiplier(2.0, **arguments)
    by_pld = accounting.noise_multiplier(2.0, **arguments, accountant="pld")
    assert 0.8 * by_rdp < by_pld < by_rdp
    assert 1.99 < accounting.epsilon(by_pld, 0.01, 500, 1e-5, "pld") <= 2.0


@pytest.mark.parametrize(
    ("target", "q", "steps"), [(math.inf, 0.1, 10), (0.0, 0.0, 10), (1.0, 0.1, 0)]
)
def test_no_noise_is_needed(target, q, steps):
    sigma = accounting.noise_multiplier(
        target, delta=1e-5, sampling_probability=q, num_steps=steps
    )
    assert sigma == 0.0
    assert accounting.epsilon(sigma, q, steps, 1e-5) <= target


def test_unreachable_target():
    with pytest.raises(ValueError, match=r"^target_epsilon=1e-20 cannot be .*raise"):
        accounting.noise_multiplier(
            1e-20, delta=1e-18, sampling_probability=0.5, num_steps=10
        )


@settings(max_examples=15)
@given(st.floats(0.05, 20), _SIGMAS, st.floats(1e-3, 1))
def test_number_of_steps_is_the_largest(target, sigma, q):
    steps = accounting.num_steps(
        target, noise_multiplier=sigma, sampling_probability=q, delta=1e-6
    )
    assert accounting.epsilon(sigma, q, steps, 1e-6) <= target
    assert accounting.epsilon(sigma, q, steps + 1, 1e-6) > target


def test_number_of_steps_by_pld_is_larger():
    arguments = {"noise_multiplier": 4.0, "sampling_probability": 0.01, "delta": 1e-5}
    by_rdp = accounting.num_steps(1.0, **arguments)
    by_pld = accounting.num_steps(1.0, **arguments, accountant="pld")
    assert by_rdp < by_pld
    assert accounting.epsilon(4.0, 0.01, by_pld, 1e-5, "pld") <= 1.0


def test_no_step_fits():
    assert (
        accounting.num_steps(
            0.1, noise_multiplier=0.5, sampling_probability=0.5, delta=1e-5
        )
        == 0
    )
    assert (
        accounting.num_steps(
            9.0, noise_multiplier=0.0, sampling_probability=0.5, delta=1e-5
        )
        == 0
    )


@pytest.mark.parametrize(
    ("target", "sigma", "q"),
    [(math.inf, 1.0, 0.1), (1.0, math.inf, 0.1), (1.0, 1.0, 0.0), (1.0, 1.0, 1e-200)],
)
def test_no_largest_number_of_steps(target, sigma, q):
    with pytest.raises(ValueError, match="there is no largest number of steps"):
        accounting.num_steps(
            target, noise_multiplier=sigma, sampling_probability=q, delta=1e-5
        )


_GOOD = {
    "noise_multiplier": 1.0,
    "sampling_probability": 0.1,
    "num_steps": 10,
    "delta": 1e-5,
    "accountant": "rdp",
}


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("noise_multiplier", -1.0, ValueError),
        ("noise_multiplier", math.nan, ValueError),
        ("noise_multiplier", None, TypeError),
        ("noise_multiplier", "1.0", TypeError),
        ("sampling_probability", -0.1, ValueError),
        ("sampling_probability", 1.1, ValueError),
        ("sampling_probability", math.nan, ValueError),
        ("num_steps", -1, ValueError),
        ("num_steps", 2**60, ValueError),
        ("num_steps", 100.0, TypeError),
        ("num_steps", 1.5, TypeError),
        ("num_steps", True, TypeError),
        ("delta", 0.0, ValueError),
        ("delta", 1.0, ValueError),
        ("delta", -1e-5, ValueError),
        ("delta", math.nan, ValueError),
        ("accountant", "gdp", ValueError),
    ],
)
def test_bad_arguments(name, value, error):
    with pytest.raises(error, match=f"^{name}=") as caught:
        accounting.epsilon(**{**_GOOD, name: value})
    assert "\n" not in str(caught.value)
    arguments = {**_GOOD, name: value}
    delta, accountant = arguments.pop("delta"), arguments.pop("accountant")
    with pytest.raises(error, match=f"^{name}="):
        _LEDGER.compose(**arguments).epsilon(delta, accountant)


@pytest.mark.parametrize("name", ["sampling_probability", "num_steps", "delta"])
@pytest.mark.parametrize("value", [-1, math.nan])
def test_bad_arguments_of_noise_multiplier(name, value):
    arguments = {k: v for k, v in _GOOD.items() if k != "noise_multiplier"}
    with pytest.raises((TypeError, ValueError), match=f"^{name}="):
        accounting.noise_multiplier(1.0, **{**arguments, name: value})


@pytest.mark.parametrize("target", [-1.0, math.nan])
def test_bad_targets(target):
    with pytest.raises(ValueError, match=r"^target_epsilon="):
        accounting.noise_multiplier(
            target, delta=1e-5, sampling_probability=0.1, num_steps=1
        )
    with pytest.raises(ValueError, match=r"^target_epsilon="):
        accounting.num_steps(
            target, delta=1e-5, sampling_probability=0.1, noise_multiplier=1.0
        )


def _step(ledger, sigma=1.0, q=0.01, steps=1):
    return ledger.compose(
        noise_multiplier=sigma, sampling_probability=q, num_steps=steps
    )


def test_single_steps_add_up():
    ledger = _LEDGER
    for _ in range(200):
        ledger = _step(ledger)
    assert ledger == _step(_LEDGER, steps=200)
    assert ledger.num_steps == 200
    for accountant in ("rdp", "pld"):
        assert ledger.epsilon(1e-5, accountant) == accounting.epsilon(
            1.0, 0.01, 200, 1e-5, accountant
        )


def test_empty_ledger():
    assert _LEDGER.num_steps == 0
    assert _LEDGER.epsilon(1e-5) == _LEDGER.epsilon(1e-5, "pld") == 0.0
    assert _step(_LEDGER, steps=0) == _LEDGER


def test_ledger_is_a_value():
    ledger = _step(_LEDGER)
    _step(ledger)
    assert _LEDGER.num_steps == 0
    assert ledger.num_steps == 1
    assert hash(ledger) == hash(_step(_LEDGER))
    with pytest.raises(dataclasses.FrozenInstanceError):
        ledger.entries = ()


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_different_steps_compose(accountant):
    first, second = _step(_LEDGER, 1.0, 0.01, 300), _step(_LEDGER, 0.8, 0.02, 100)
    both = _step(first, 0.8, 0.02, 100)
    together = both.epsilon(1e-5, accountant)
    assert together > max(x.epsilon(1e-5, accountant) for x in (first, second))
    # Advanced composition beats adding up, which splits delta.
    assert together < sum(x.epsilon(5e-6, accountant) for x in (first, second))
    swapped = _step(second, 1.0, 0.01, 300)
    assert swapped.epsilon(1e-5, accountant) == pytest.approx(together, rel=1e-9)
    interleaved = _step(
        _step(_step(_LEDGER, 1.0, 0.01, 100), 0.8, 0.02, 100), steps=200
    )
    assert len(interleaved.entries) == 3
    assert interleaved.epsilon(1e-5, accountant) == pytest.approx(together, rel=1e-9)


def test_different_full_batches_are_one_gaussian():
    ledger = _step(_step(_LEDGER, 3.0, 1.0), 4.0, 1.0)
    expected = accounting.epsilon((1 / 9 + 1 / 16) ** -0.5, 1.0, 1, 1e-5)
    assert ledger.epsilon(1e-5) == pytest.approx(expected, rel=1e-12)


def test_steps_that_reveal_nothing_cost_nothing_but_count():
    ledger = _step(_step(_step(_LEDGER), 1.0, 0.0, 7), math.inf, 0.5, 3)
    assert ledger.num_steps == 11
    assert ledger.epsilon(1e-5) == _step(_LEDGER).epsilon(1e-5)


def test_one_step_without_noise_is_enough():
    ledger = _step(_step(_LEDGER, 5.0, 0.01, 1_000), 0.0, 0.01, 1)
    assert ledger.epsilon(1e-5) == ledger.epsilon(1e-5, "pld") == math.inf


@given(
    st.lists(st.tuples(st.floats(0, math.inf), st.floats(0, 1), st.integers(0, 10**12)))
)
def test_json_round_trip_is_exact(items):
    ledger = _LEDGER
    for sigma, q, steps in items:
        ledger = _step(ledger, sigma, q, steps)
    text = ledger.to_json()
    assert accounting.Ledger.from_json(text) == ledger
    assert accounting.Ledger.from_json(text).to_json() == text


def test_numbers_of_other_libraries_are_taken():
    ledger = _step(_LEDGER, np.float64(1.0), np.float32(0.5), np.int64(3))
    assert ledger == _step(_LEDGER, 1.0, 0.5, 3)
    assert accounting.Ledger.from_json(ledger.to_json()) == ledger


def _with(**changes):
    return json.dumps({**json.loads(_step(_LEDGER).to_json()), **changes})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "not json",
        "[]",
        "null",
        "{}",
        None,
        _with(format="other"),
        _with(version=2),
        _with(adjacency="replace_one"),
        _with(sampling="fixed"),
        _with(extra=1),
        _with(entries=None),
        _with(entries=[[1.0, 0.1]]),
        _with(entries=[{"noise_multiplier": 1.0}]),
        _with(entries=[[-1.0, 0.1, 1]]),
        _with(entries=[[1.0, 1.5, 1]]),
        _with(entries=[[1.0, 0.1, 0]]),
        _with(entries=[[1.0, 0.1, 1.0]]),
        _with(entries=[[1.0, 0.1, True]]),
        _with(entries=[[True, 0.1, 1]]),
        _with(entries=[["1.0", 0.1, 1]]),
        _with(entries=[[math.nan, 0.1, 1]]),
    ],
)
def test_foreign_json(text):
    with pytest.raises(ValueError, match=r"^text is no dpjax ledger: ") as caught:
        accounting.Ledger.from_json(text)
    assert "\n" not in str(caught.value)


def test_examples_in_docstrings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert doctest.testmod(accounting).failed == 0
