"""How many queries it takes to draw a suffix: (n, p)-discoverable extraction.

A scheme that draws the suffix with probability p_z in one query draws it at least once
in n with probability 1 - (1 - p_z)^n. A window is *(n, p)-discoverable* if that is at
least p (Hayes et al. 2025, "Measuring memorization in language models via probabilistic
extraction", arXiv 2410.19482). So it takes

    n = ceil(log(1 - p) / log(1 - p_z))

queries, and p_z is known from one teacher-forced pass (`sampled_decoding.score`; for
the model as it is, temperature 1 and all tokens, it is the exponential of the column
`suffix_logprob`).
"""

import numpy as np

from experiments.errors import RunError, UsageError

# A number of queries that is whole but for rounding must not be rounded up to the next.
_ROUNDING = 1e-12


def least_queries(log_probability_N: np.ndarray, p: float) -> np.ndarray:
    """The least n for which windows are (n, p)-discoverable.

    Args:
      log_probability_N: Natural log of p_z; -inf where the suffix cannot be drawn. What
        rounding leaves above 0 counts as 0.
      p: Between 0 and 1, both excluded.

    Returns:
      Whole numbers in f64; inf for those of more than 1.8e308, as for p_z = 0.

    Raises:
      UsageError: `p` is not a probability between 0 and 1.
      RunError: A log-probability is NaN.

    Example:
      >>> log_probability_N = np.log([0.5, 0.125, 1.0, 1e-9])
      >>> least_queries(log_probability_N, p=0.5).tolist()
      [1.0, 6.0, 1.0, 693147181.0]
      >>> least_queries(np.array([-300.0, -np.inf]), p=0.9)
      array([4.47260206e+130,             inf])
    """
    if not 0 < p < 1:
        raise UsageError(
            f"p={p}, expected a probability between 0 and 1: no number of queries is "
            "certain to draw a suffix"
        )
    log_probability_N = np.asarray(log_probability_N, np.float64)
    if np.isnan(log_probability_N).any():
        raise RunError(
            f"{np.isnan(log_probability_N).sum()} of {log_probability_N.size} "
            "log-probabilities are NaN: leave out windows whose logits are not finite"
        )
    # A sure suffix has log(1 - p_z) = -inf; one that is not drawn at all, -0.
    with np.errstate(divide="ignore", over="ignore"):
        exact_N = np.log1p(-p) / _log_complement(np.minimum(log_probability_N, 0))
    whole_N = np.round(exact_N)
    is_whole_N = np.isclose(exact_N, whole_N, rtol=_ROUNDING, atol=0)
    return np.maximum(np.where(is_whole_N, whole_N, np.ceil(exact_N)), 1)


def rate(log_probability_N: np.ndarray, n: float, p: float) -> float:
    """The share of windows that are (n, p)-discoverable.

    Args:
      log_probability_N: See `least_queries`; at least one.
      n: Queries.
      p: Between 0 and 1, both excluded.

    Raises:
      UsageError: `n` is less than 1, or `p` not between 0 and 1.
      RunError: A log-probability is NaN.

    Example:
      >>> rate(np.log([0.5, 0.25, 1e-9]), n=2, p=0.75)
      0.3333333333333333
    """
    if not n >= 1:
        raise UsageError(f"n={n} queries, expected at least 1: give a larger n")
    queries_N = least_queries(log_probability_N, p)
    return float(np.mean(queries_N <= n))


def _log_complement(log_probability_N: np.ndarray) -> np.ndarray:
    """log(1 - exp(x)) for x <= 0, by the form that keeps its digits.

    Near x = 0 the difference cancels, and far below it exp(x) is lost in the 1 (Mächler
    2012, "Accurately computing log(1 - exp(-|a|))").
    """
    return np.where(
        log_probability_N > -np.log(2),
        np.log(-np.expm1(log_probability_N)),
        np.log1p(-np.exp(log_probability_N)),
    )
