"""Privacy accounting for the Poisson-subsampled Gaussian mechanism.

One *step* of private training draws each example independently with the
*sampling probability* q (Poisson sampling), sums the clipped gradients of the drawn
examples and adds Gaussian noise whose standard deviation is the *noise multiplier*
times the L2 sensitivity of that sum. The functions here tell what a number of such
steps costs. The adjacency is add-or-remove-one: two data sets are neighbours if one
is the other plus one example. Every epsilon is an upper bound: rounding,
discretisation and truncation all err on the private side.

The same table of edge cases holds for every function and for `Ledger`:

| case | what happens |
|---|---|
| `num_steps` = 0, or an empty ledger | epsilon 0: nothing was released |
| `sampling_probability` = 0 | epsilon 0: no example was ever looked at |
| `sampling_probability` = 1 | the plain Gaussian mechanism, without amplification |
| `noise_multiplier` = 0 (or below 1e-100) | epsilon inf, unless one of the two above |
| `noise_multiplier` = inf | epsilon 0: only noise was released |
| `delta` outside (0, 1) | ValueError, the ends included: at 0 the epsilon of |
| | Gaussian noise is inf, at 1 it is 0 for every mechanism |
| `noise_multiplier` < 0, `sampling_probability` outside [0, 1], a NaN | ValueError |
| `num_steps` < 0 | ValueError |
| `num_steps` not an integer, also 100.0 | TypeError |

Two accountants are offered:

* `"rdp"`: Rényi differential privacy. The divergences of one step come from
  dp-accounting (Mironov, Talwar and Zhang 2019, arXiv:1908.10530) at small integer
  orders and from quadrature at others, add up over steps, and convert to epsilon by
  Canonne, Kamath and Steinke 2020 (arXiv:2004.00010, proposition 12). There is no
  fixed grid of orders: the best one is searched for.
* `"pld"`: privacy loss distributions (Doroshenko et al. 2022, arXiv:2207.04380),
  tighter and slower. Its convolutions carry rounding errors, so it is asked for a
  delta smaller by a bound on them; where that leaves nothing (delta below about
  1e-11), or where RDP is tighter, the RDP bound is returned. It never exceeds "rdp".

Example:
    >>> from dpjax import accounting
    >>> eps = accounting.epsilon(1.1, 256 / 60_000, 3_000, delta=1e-5)
    >>> print(f"{eps:.2f}")
    1.20
    >>> sigma = accounting.noise_multiplier(
    ...     2.0, delta=1e-5, sampling_probability=256 / 60_000, num_steps=3_000
    ... )
    >>> accounting.epsilon(sigma, 256 / 60_000, 3_000, delta=1e-5) <= 2.0
    True
"""

import dataclasses
import functools
import json
import math
import operator
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, SupportsFloat, SupportsIndex

import dp_accounting
import numpy as np
from dp_accounting import pld, rdp

Accountant = Literal["rdp", "pld"]

# Steps that ran, by (noise multiplier, sampling probability). Their order does not
# matter to either accountant.
_Steps = Mapping[tuple[float, float], int]

_LEDGER_FORMAT = "dpjax.accounting.Ledger"
_LEDGER_VERSION = 1

# Below this, the square of the noise multiplier nears underflow.
_LEAST_NOISE = 1e-100
# Beyond this, the square of the noise multiplier nears overflow, and less noise than
# there is may always be assumed.
_MOST_NOISE = 1e100
_MOST_STEPS = 2**53

# dp-accounting bounds epsilon by orders above 1.01 only.
_LEAST_ORDER_MINUS_1 = 0.0101
# Stopping here costs an epsilon less than 1e-15 per nat of log(1 / delta).
_MOST_ORDER = 2**60
# Points of one integral: some milliseconds and megabytes.
_MOST_POINTS = 2**18
# Up to here dp-accounting's sum over the binomial is taken at integer orders, and
# orders between them are tried next to the best; the integers above are dense enough.
_MOST_SMALL_ORDER = 256
# Ratio of consecutive (order - 1) between the integers.
_ORDER_RATIO = 1.001


def epsilon(
    noise_multiplier: SupportsFloat,
    sampling_probability: SupportsFloat,
    num_steps: SupportsIndex,
    delta: SupportsFloat,
    accountant: Accountant = "rdp",
) -> float:
    """Returns the epsilon of steps of the Poisson-subsampled Gaussian mechanism.

    Args:
      noise_multiplier: standard deviation of the noise over the L2 sensitivity of
        the clipped sum, >= 0.
      sampling_probability: probability with which each example enters a step's
        batch, in [0, 1].
      num_steps: the number of steps, an integer >= 0.
      delta: probability with which the epsilon may fail, in (0, 1); choose it well
        below one over the number of examples.
      accountant: "rdp" or "pld".

    Returns:
      An epsilon >= 0, possibly inf, such that the steps together are
      (epsilon, delta)-differentially private under add-or-remove-one adjacency. The
      module's docstring has a table of edge cases.

    Raises:
      TypeError: an argument is not a number, or `num_steps` not an integer.
      ValueError: an argument is out of its range.

    Warns:
      UserWarning: the best order of the Rényi divergence lies outside the range
        searched, so that the value, still a valid bound, may be loose, by as much as
        the warning says. Only epsilons in the thousands, or of a few steps with
        noise multipliers in the thousands, get there.

    Example:
      >>> round(epsilon(4.0, 0.01, 10_000, delta=1e-5), 3)
      1.035
    """
    sigma = _at_least_0("noise_multiplier", noise_multiplier)
    q = _probability("sampling_probability", sampling_probability)
    steps = _count("num_steps", num_steps)
    _check_accountant(accountant)
    return _value_or_warn(_epsilon({(sigma, q): steps}, _delta(delta), accountant))


def noise_multiplier(
    target_epsilon: SupportsFloat,
    *,
    delta: SupportsFloat,
    sampling_probability: SupportsFloat,
    num_steps: SupportsIndex,
    accountant: Accountant = "rdp",
) -> float:
    """Returns the smallest noise multiplier that keeps within a target epsilon.

    `epsilon` of the returned value never exceeds the target: the search keeps an
    upper end that has been evaluated and found to hold, and returns that end.

    Args:
      target_epsilon: the epsilon to keep within, >= 0. inf asks for no privacy.
      delta: as in `epsilon`.
      sampling_probability: as in `epsilon`.
      num_steps: as in `epsilon`.
      accountant: as in `epsilon`.

    Returns:
      A noise multiplier at most 0.01 % above the smallest one that holds; 0.0 if no
      noise is needed (`target_epsilon` is inf, or there is nothing to protect since
      `num_steps` or `sampling_probability` is 0).

    Raises:
      TypeError: an argument is not a number, or `num_steps` not an integer.
      ValueError: an argument is out of its range, or the target is so small that no
        noise multiplier up to 2**40 reaches it.

    Example:
      >>> sigma = noise_multiplier(
      ...     1.0, delta=1e-5, sampling_probability=1.0, num_steps=1
      ... )
      >>> epsilon(sigma, 1.0, 1, delta=1e-5) <= 1.0
      True
    """
    target = _at_least_0("target_epsilon", target_epsilon)
    delta = _delta(delta)
    q = _probability("sampling_probability", sampling_probability)
    steps = _count("num_steps", num_steps)
    _check_accountant(accountant)
    if target == math.inf or q == 0 or steps == 0:
        return 0.0

    def within_target(sigma: float, accountant: Accountant) -> bool:
        return _epsilon({(sigma, q): steps}, delta, accountant).value <= target

    most = 2.0**40
    if not within_target(most, "rdp"):
        raise ValueError(
            f"target_epsilon={target} cannot be reached with num_steps={steps}, "
            f"sampling_probability={q}, delta={delta} by any noise multiplier up to "
            "2**40: raise target_epsilon or delta, or take fewer steps"
        )
    # The RDP answer is cheap, and an upper end for the other accountant.
    rdp_sigma = _least_true(lambda sigma: within_target(sigma, "rdp"), start=1.0)
    if accountant == "rdp":
        return rdp_sigma
    return _least_true(lambda sigma: within_target(sigma, accountant), start=rdp_sigma)


def num_steps(
    target_epsilon: SupportsFloat,
    *,
    noise_multiplier: SupportsFloat,
    sampling_probability: SupportsFloat,
    delta: SupportsFloat,
    accountant: Accountant = "rdp",
) -> int:
    """Returns the largest number of steps that keeps within a target epsilon.

    Args:
      target_epsilon: the epsilon to keep within, finite and >= 0.
      noise_multiplier: as in `epsilon`.
      sampling_probability: as in `epsilon`.
      delta: as in `epsilon`.
      accountant: as in `epsilon`.

    Returns:
      The largest integer n with `epsilon(..., num_steps=n, ...)` at most the target;
      0 if not even one step holds.

    Raises:
      TypeError: an argument is not a number.
      ValueError: an argument is out of its range, or there is no largest number:
        `target_epsilon` or `noise_multiplier` is inf, `sampling_probability` is 0,
        or more than 2**53 steps would hold.

    Example:
      >>> num_steps(1.0, noise_multiplier=4.0, sampling_probability=0.01, delta=1e-5)
      9378
    """
    target = _at_least_0("target_epsilon", target_epsilon)
    sigma = _at_least_0("noise_multiplier", noise_multiplier)
    q = _probability("sampling_probability", sampling_probability)
    delta = _delta(delta)
    _check_accountant(accountant)

    def within_target(steps: int) -> bool:
        return _epsilon({(sigma, q): steps}, delta, accountant).value <= target

    if target == math.inf or sigma == math.inf or q == 0:
        unbounded = True
    else:
        unbounded = _epsilon({(sigma, q): _MOST_STEPS}, delta, "rdp").value <= target
    if unbounded:
        raise ValueError(
            f"there is no largest number of steps for target_epsilon={target}, "
            f"noise_multiplier={sigma}, sampling_probability={q}: more than 2**53 hold;"
            " choose the number of steps yourself"
        )
    if not within_target(1):
        return 0
    holds = 1
    while within_target(2 * holds):
        holds *= 2
    exceeds = 2 * holds
    while exceeds - holds > 1:
        middle = (holds + exceeds) // 2
        if within_target(middle):
            holds = middle
        else:
            exceeds = middle
    return holds


@dataclasses.dataclass(frozen=True)
class LedgerEntry:
    """Steps with the same parameters; see `epsilon` for their meaning."""

    noise_multiplier: float
    sampling_probability: float
    count: int

    def __post_init__(self) -> None:
        """Validates and normalises the fields to Python numbers."""
        set_field = functools.partial(object.__setattr__, self)
        set_field(
            "noise_multiplier", _at_least_0("noise_multiplier", self.noise_multiplier)
        )
        set_field(
            "sampling_probability",
            _probability("sampling_probability", self.sampling_probability),
        )
        set_field("count", _count("count", self.count))
        if self.count == 0:
            raise ValueError("count=0: an entry holds at least one step; leave it out")


@dataclasses.dataclass(frozen=True)
class Ledger:
    """The steps that actually ran, in order, and what they cost together.

    A ledger is a value: `compose` returns a new one. Keep it beside the parameters,
    put `to_json` into every checkpoint, and the epsilon survives restarts and changes
    of the noise multiplier or the batch size. A step counts also when its sampled
    batch was empty.

    Attributes:
      entries: what ran; neighbours differ in their parameters when the ledger was
        made by `compose` or `from_json`.

    Example:
      >>> ledger = Ledger()
      >>> for _ in range(100):
      ...     ledger = ledger.compose(noise_multiplier=1.0, sampling_probability=0.01)
      >>> ledger = ledger.compose(
      ...     noise_multiplier=2.0, sampling_probability=0.01, num_steps=900
      ... )
      >>> ledger.num_steps, len(ledger.entries)
      (1000, 2)
      >>> Ledger.from_json(ledger.to_json()) == ledger
      True
    """

    entries: tuple[LedgerEntry, ...] = ()

    @property
    def num_steps(self) -> int:
        """The number of steps that ran."""
        return sum(entry.count for entry in self.entries)

    def compose(
        self,
        *,
        noise_multiplier: SupportsFloat,
        sampling_probability: SupportsFloat,
        num_steps: SupportsIndex = 1,
    ) -> "Ledger":
        """Returns the ledger with more steps; see `epsilon` for the arguments."""
        count = _count("num_steps", num_steps)
        sigma = _at_least_0("noise_multiplier", noise_multiplier)
        q = _probability("sampling_probability", sampling_probability)
        if count == 0:
            return self
        entry = LedgerEntry(sigma, q, count)
        return Ledger(_merge((*self.entries[-1:], entry), before=self.entries[:-1]))

    def epsilon(self, delta: SupportsFloat, accountant: Accountant = "rdp") -> float:
        """Returns the epsilon of all steps together.

        Args:
          delta: as in `dpjax.accounting.epsilon`.
          accountant: as in `dpjax.accounting.epsilon`.

        Returns:
          As `dpjax.accounting.epsilon`, whose warning and errors apply too.
        """
        delta = _delta(delta)
        _check_accountant(accountant)
        steps: Counter[tuple[float, float]] = Counter()
        for entry in self.entries:
            key = (entry.noise_multiplier, entry.sampling_probability)
            steps[key] += entry.count
        return _value_or_warn(_epsilon(steps, delta, accountant))

    def to_json(self) -> str:
        """Returns the ledger as JSON, from which `from_json` restores it exactly."""
        return json.dumps(
            {
                "format": _LEDGER_FORMAT,
                "version": _LEDGER_VERSION,
                "adjacency": "add_or_remove_one",
                "sampling": "poisson",
                "entries": [
                    # JSON has no infinity.
                    [
                        "inf" if e.noise_multiplier == math.inf else e.noise_multiplier,
                        e.sampling_probability,
                        e.count,
                    ]
                    for e in self.entries
                ],
            },
            allow_nan=False,
        )

    @classmethod
    def from_json(cls, text: str) -> "Ledger":
        """Returns the ledger that `to_json` wrote.

        Args:
          text: the JSON.

        Returns:
          The ledger, equal to the one written.

        Raises:
          ValueError: `text` is not a ledger, or of another version; one line tells
            what was found.
        """
        try:
            content = json.loads(text)
        except (TypeError, ValueError) as error:
            raise _foreign(f"it is not JSON ({error})") from None
        if not isinstance(content, dict):
            raise _foreign(f"it is a {type(content).__name__}, expected an object")
        expected = json.loads(Ledger().to_json())
        if content.keys() != expected.keys():
            raise _foreign(f"keys {sorted(content)}, expected {sorted(expected)}")
        for key in ("format", "version", "adjacency", "sampling"):
            if content[key] != expected[key]:
                raise _foreign(f"{key} {content[key]!r}, expected {expected[key]!r}")
        if not isinstance(content["entries"], list):
            raise _foreign(f"entries {content['entries']!r}, expected a list")
        return cls(_merge(map(_entry_from_json, content["entries"])))


def _entry_from_json(item: Any) -> LedgerEntry:
    expected = "[noise multiplier, sampling probability, count]"
    if not isinstance(item, list) or len(item) != 3:
        raise _foreign(f"entry {item!r}, expected {expected}")
    sigma, q, count = item
    if sigma == "inf":
        sigma = math.inf
    if any(isinstance(x, bool) or not isinstance(x, int | float) for x in (sigma, q)):
        raise _foreign(f"entry {item!r}, expected {expected}")
    try:
        return LedgerEntry(sigma, q, count)
    except (TypeError, ValueError) as error:
        raise _foreign(f"entry {item!r}: {error}") from None


def _foreign(found: str) -> ValueError:
    return ValueError(
        f"text is no dpjax ledger: {found}; pass what Ledger.to_json wrote"
    )


def _merge(
    entries: Iterable[LedgerEntry], before: tuple[LedgerEntry, ...] = ()
) -> tuple[LedgerEntry, ...]:
    """Joins neighbours with equal parameters; `before` is put first untouched."""
    merged: list[LedgerEntry] = []
    for entry in entries:
        if merged and (
            (merged[-1].noise_multiplier, merged[-1].sampling_probability)
            == (entry.noise_multiplier, entry.sampling_probability)
        ):
            entry = dataclasses.replace(entry, count=merged.pop().count + entry.count)
        merged.append(entry)
    return (*before, *merged)


@dataclasses.dataclass(frozen=True)
class _Bound:
    """An epsilon, and a sentence that says why it may be loose, if it may."""

    value: float
    loose: str = ""


def _value_or_warn(bound: _Bound) -> float:
    if bound.loose:
        warnings.warn(bound.loose, UserWarning, stacklevel=3)
    return bound.value


def _epsilon(steps: _Steps, delta: float, accountant: Accountant) -> _Bound:
    """Returns the epsilon of steps whose parameters have been validated."""
    paid = {
        (min(sigma, _MOST_NOISE), q): count
        for (sigma, q), count in steps.items()
        if count > 0 and q > 0 and sigma < math.inf
    }
    if not paid:
        return _Bound(0.0)
    if any(sigma < _LEAST_NOISE for sigma, _ in paid):
        return _Bound(math.inf)
    bound = _rdp_epsilon(paid, delta)
    if accountant == "rdp":
        return bound
    value = bound.value
    # Each round's grid suits the epsilon found so far.
    while 0 < value < math.inf:
        tighter = _pld_epsilon(paid, delta, value)
        if tighter > value / 2:
            value = min(value, tighter)
            break
        value = tighter
    return bound if value == bound.value else _Bound(value)


def _rdp_epsilon(steps: _Steps, delta: float) -> _Bound:
    """Returns the smallest epsilon over the orders of the Rényi divergence.

    (order - 1) times the divergence is convex in the order, and so is what the
    conversion adds to it, hence epsilon as a function of the order falls, then rises
    (a convex function over order - 1 is quasi-convex). Doubling brackets the best
    integer order, golden sections find it and then the best order around it.
    """

    @functools.cache
    def at(order: float) -> float:
        return _rdp_epsilon_at(steps, delta, order)

    def at_index(index: int) -> float:
        return at(_fractional_order(index))

    # The lowest order decides whether delta alone, by the total variation, is enough.
    if at_index(0) == 0:
        return _Bound(0.0)
    upper = 2
    while upper < _MOST_ORDER and at(2 * upper) < at(upper):
        upper *= 2
    best = _least_of_unimodal(at, max(upper // 2, 2), min(2 * upper, _MOST_ORDER))
    if best > _MOST_SMALL_ORDER:
        if at(best + best // 8) < math.inf:
            return _Bound(at(best))
        excess = -math.log(delta) / (best - 1)
        return _Bound(
            at(best),
            f"epsilon may be too large by up to {excess:.1e}: its best Rényi order is "
            f"above {best}, the last one within reach; the bound is valid, "
            'accountant="pld" may be tighter',
        )
    first = 0 if best == 2 else _fractional_index(best - 1)
    index = _least_of_unimodal(at_index, first, _fractional_index(best + 1))
    if index == 0:
        return _Bound(
            at_index(0),
            "epsilon may be too large by about 1 %: its best Rényi order is below "
            f"{1 + _LEAST_ORDER_MINUS_1}, the first one tried; the bound is valid, but "
            "so large that it promises next to nothing: raise noise_multiplier",
        )
    return _Bound(min(at(best), at_index(index)))


def _fractional_order(index: int) -> float:
    return 1 + _LEAST_ORDER_MINUS_1 * _ORDER_RATIO**index


def _fractional_index(order: int) -> int:
    return round(math.log((order - 1) / _LEAST_ORDER_MINUS_1, _ORDER_RATIO))


def _least_of_unimodal(at: Callable[[int], float], lower: int, upper: int) -> int:
    """Returns where a function is least in [lower, upper].

    Args:
      at: a function that falls, then rises.
      lower: the first argument to consider.
      upper: the last.
    """
    golden = (math.sqrt(5) - 1) / 2
    while upper - lower > 3:
        step = round(golden * (upper - lower))
        left, right = upper - step, lower + step
        if at(left) <= at(right):
            upper = right
        else:
            lower = left
    return min(range(lower, upper + 1), key=at)


def _rdp_epsilon_at(steps: _Steps, delta: float, order: float) -> float:
    divergence = sum(
        count * _rdp_of_one_step(sigma, q, order) for (sigma, q), count in steps.items()
    )
    return float(rdp.compute_epsilon([order], [divergence], delta)[0])


@functools.lru_cache(maxsize=2**16)
def _rdp_of_one_step(sigma: float, q: float, order: float) -> float:
    """Returns an upper bound on the Rényi divergence of one step, 0 < q <= 1.

    Between the integers dp-accounting's values are upper bounds, up to thirty times
    the divergence (sigma 10, q 0.3, order 1.2) and inf at places, and at integers its
    sum has as many terms as the order, so there the defining integral is evaluated.
    """
    if q < 1 and (order > _MOST_SMALL_ORDER or order != int(order)):
        value = _rdp_by_quadrature(sigma, q, order)
    else:
        event = dp_accounting.PoissonSampledDpEvent(
            q, dp_accounting.GaussianDpEvent(sigma)
        )
        value = float(rdp.RdpAccountant([order]).compose(event).rdp[0])
    if q == 1:
        return value
    # Both ways take a logarithm near 0 of terms near 1, so that the absolute error is
    # a few 1e-15 of the weight of the terms that depend on q (3e-15 measured against
    # an all-positive sum, 3,000 random parameters). Without this margin noise in the
    # thousands gives divergences of 0 or below.
    return max(value, 0.0) + 1e-14 * min(1.0, order * q) / min(1.0, order - 1)


def _rdp_by_quadrature(sigma: float, q: float, order: float) -> float:
    """Returns log(E[L**order]) / (order - 1), L = 1 - q + q exp((2x - 1) / 2 sigma**2).

    The expectation is over x ~ N(0, sigma**2); Mironov, Talwar and Zhang 2019, section
    3.1. As E[L] = 1, that of L**order - 1 - order * (L - 1) >= 0 is taken, which keeps
    the digits of a small divergence. The trapezoidal rule converges exponentially fast
    on this analytic integrand (Trefethen and Weideman 2014, SIAM Review 56(3)).

    The integrand's peaks lie between 0 and `order`. Where w is the share of the second
    term in L, they have x = order * w and order * w * (1 - w) < sigma**2. If `order`
    is much larger than sigma**2, that puts them near its two ends, and the stretch
    between is left out.

    Returns:
      The divergence, or inf if the integral would need too many points.
    """
    steps_per_sigma = 32
    reach = 12 * sigma + 2 * sigma**2
    pieces = [(-12 * sigma, order + 12 * sigma)]
    if order > 2 * reach:
        pieces = [(-12 * sigma, reach), (order - reach, order + 12 * sigma)]
    step = sigma / steps_per_sigma
    counts = [(upper - lower) / step for lower, upper in pieces]
    if sum(counts) > _MOST_POINTS:
        return math.inf
    x = np.concatenate(
        [
            lower + step * np.arange(math.ceil(count) + 1)
            for (lower, _), count in zip(pieces, counts, strict=True)
        ]
    )
    log_weight = -((x / sigma) ** 2) / 2 - math.log(
        steps_per_sigma * math.sqrt(2 * math.pi)
    )
    z = (2 * x - 1) / (2 * sigma**2)
    log_ratio = np.where(
        z < 30,
        np.log1p(q * np.expm1(np.minimum(z, 30))),
        np.logaddexp(math.log1p(-q), math.log(q) + z),
    )
    power = order * log_ratio
    # log(1 + order * (L - 1)), for L > 1.
    log_linear = np.log1p(order * np.expm1(np.clip(log_ratio, 0, 600)))
    log_linear += np.maximum(log_ratio - 600, 0)
    with np.errstate(divide="ignore"):
        log_excess = np.where(
            power < 1,
            np.log(
                np.maximum(
                    np.expm1(np.minimum(power, 1))
                    - order * q * np.expm1(np.minimum(z, 600)),
                    0,
                )
            ),
            power + np.log(np.maximum(-np.expm1(np.minimum(log_linear - power, 0)), 0)),
        )
    log_terms = log_weight + log_excess
    top = float(np.max(log_terms))
    if top == -math.inf:
        return 0.0
    log_sum = top + math.log(np.exp(log_terms - top).sum())
    # The exponents above are as large as (order / sigma)**2 and rounded.
    log_sum += 1e-15 * (1 + (order / sigma) ** 2)
    return float(np.logaddexp(0, log_sum)) / (order - 1)


def _pld_epsilon(steps: _Steps, delta: float, about: float) -> float:
    """Returns the epsilon of the privacy loss distribution, inf if out of its reach.

    Args:
      steps: what ran, each with 0 < q <= 1 and a finite noise multiplier > 0.
      delta: the delta.
      about: the magnitude of the epsilon, which sets the fineness of the grid.

    Returns:
      An upper bound.
    """
    total = sum(steps.values())
    # Its Fourier transforms round: against closed forms, the delta of the returned
    # epsilon was found up to 4e-12 + 3e-17 * total too small.
    reachable_delta = delta - (1e-11 + 1e-15 * total)
    if reachable_delta <= 0:
        return math.inf
    # Discretisation acts like noise of about one interval in every step's loss, so
    # that it costs a fraction of about (interval * sqrt(total) / epsilon)**2.
    interval = about / (32 * math.sqrt(total))
    # Losses of one step lie within its mean and about ten standard deviations.
    widest = max(1 / (2 * sigma**2) + 10 / sigma for sigma, _ in steps)
    if widest > 2**18:
        return math.inf
    interval = min(max(interval, widest / 2**18), 1.0)
    # A power of two, lest small changes of the parameters shift the grid.
    interval = 2.0 ** math.floor(math.log2(interval))
    accountant = pld.PLDAccountant(value_discretization_interval=interval)
    for (sigma, q), count in steps.items():
        event: dp_accounting.DpEvent = dp_accounting.GaussianDpEvent(sigma)
        if q < 1:
            event = dp_accounting.PoissonSampledDpEvent(q, event)
        accountant.compose(event, count)
    return max(0.0, float(accountant.get_epsilon(reachable_delta)))


def _least_true(holds: Callable[[float], bool], start: float) -> float:
    """Returns a value where `holds`, at most 0.01 % above the least such one.

    Args:
      holds: false below some value > 0, true from there on.
      start: where to look first.

    Returns:
      A value for which `holds` has returned true.
    """
    upper = start
    while not holds(upper):
        upper *= 2
    lower = upper / 2
    while lower > _LEAST_NOISE and holds(lower):
        upper, lower = lower, lower / 2
    while upper / lower > 1 + 1e-4:
        middle = math.sqrt(lower * upper)
        if holds(middle):
            upper = middle
        else:
            lower = middle
    return upper


def _number(name: str, value: SupportsFloat) -> float:
    if isinstance(value, str | bytes):
        raise TypeError(f"{name}={value!r}: expected a number")
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name}={value!r}: expected a number") from None
    if math.isnan(number):
        raise ValueError(f"{name}=nan: expected a number; find where the NaN arose")
    return number


def _at_least_0(name: str, value: SupportsFloat) -> float:
    number = _number(name, value)
    if number < 0:
        raise ValueError(f"{name}={number}: expected {name} >= 0")
    return number + 0.0  # Turns -0.0 into 0.0.


def _probability(name: str, value: SupportsFloat) -> float:
    number = _at_least_0(name, value)
    if number > 1:
        raise ValueError(
            f"{name}={number}: expected a probability in [0, 1], such as the expected "
            "batch size over the number of examples"
        )
    return number


def _delta(value: SupportsFloat) -> float:
    number = _number("delta", value)
    if not 0 < number < 1:
        raise ValueError(
            f"delta={number}: expected delta in (0, 1), well below one over the number "
            "of examples, such as 1e-5"
        )
    return number


def _count(name: str, value: SupportsIndex) -> int:
    if isinstance(value, bool):
        raise TypeError(f"{name}={value!r}: expected an integer")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(
            f"{name}={value!r}: expected an integer; round it yourself, so that no "
            "step is lost"
        ) from None
    if number < 0:
        raise ValueError(f"{name}={number}: expected {name} >= 0")
    if number > _MOST_STEPS:
        raise ValueError(f"{name}={number}: expected {name} <= 2**53")
    return number


def _check_accountant(accountant: str) -> None:
    if accountant not in ("rdp", "pld"):
        raise ValueError(f'accountant={accountant!r}: expected "rdp" or "pld"')
