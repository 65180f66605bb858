"""Verdicts alone, for less: most windows betray themselves in a few tokens.

A first pass reads the prompt and the first suffix tokens. Where one of these is not the
argmax the window is rejected; only the others have the rest of their suffix read, from
the keys and values that the first pass kept.

These passes have other shapes than the full one of `verdicts.score`, so their logits
differ from its by rounding. A verdict that hinges on less than `near_tie` is left to
the full pass, and so the verdicts are the same.
"""

from typing import Any

import jax
import numpy as np

from experiments.extraction import row_groups
from experiments.extraction.verdicts import SUFFIX_LENGTH, Scores, score_tokens

# Suffix tokens of the first pass. Of the windows that models of 0.1 to 4 million
# parameters did not reproduce, 12 to 36 % were still in the running after six; with
# four or with eight, as many tokens were read in all.
FIRST_TOKENS = 6


def score_first(
    model: Any, params: Any, tokens_BxT: jax.Array, *, context: int
) -> tuple[Scores, Any]:
    """Scores the first tokens of the suffix.

    Args:
      model: A causal language model of `experiments.models`.
      params: Its parameters.
      tokens_BxT: i32, windows of at least `context + 50` tokens.
      context: Length of the prompt, at least 1.

    Returns:
      Scores of shape [B, FIRST_TOKENS], and the cache after all of these but the last,
      with room for the rest.
    """
    num_read = context + FIRST_TOKENS - 1

    def score_rows(tokens_NxT: jax.Array) -> tuple[Scores, Any]:
        cache = model.init_cache(tokens_NxT.shape[0], context + SUFFIX_LENGTH - 1)
        hidden_NxTxD, cache = model.apply(
            params, tokens_NxT[:, :num_read], cache, method="extend"
        )
        targets_NxF = tokens_NxT[:, context : context + FIRST_TOKENS]
        scores = score_tokens(
            model, params, hidden_NxTxD[:, context - 1 :], targets_NxF
        )
        return scores, cache

    num_rows = row_groups.rows_at_once(
        tokens_BxT.shape[0], num_read, jax.default_backend()
    )
    return row_groups.map_rows(score_rows, num_rows, tokens_BxT)


def score_rest(
    model: Any,
    params: Any,
    tokens_BxT: jax.Array,
    cache: Any,
    rows_N: jax.Array,
    *,
    context: int,
) -> Scores:
    """Scores the rest of the suffix in some rows of a batch.

    Args:
      model: A causal language model of `experiments.models`.
      params: Its parameters.
      tokens_BxT: i32, what `score_first` was given.
      cache: What it returned.
      rows_N: i32, rows of the batch.
      context: Length of the prompt.

    Returns:
      Scores of shape [N, 50 - FIRST_TOKENS].
    """
    tokens_NxT = tokens_BxT[rows_N]
    start, end = context + FIRST_TOKENS, context + SUFFIX_LENGTH
    hidden_NxRxD, _ = model.apply(
        params,
        tokens_NxT[:, start - 1 : end - 1],
        row_groups.take_rows(cache, rows_N),
        method="extend",
    )
    return score_tokens(model, params, hidden_NxRxD, tokens_NxT[:, start:end])


def least_margin(scores: Scores) -> np.ndarray:
    """The least margin of each row, f32[B]; NaN where logits are not finite."""
    margin_BxF = np.where(
        np.isnan(scores.log_probability), np.nan, np.asarray(scores.margin)
    )
    return margin_BxF.min(axis=-1)
