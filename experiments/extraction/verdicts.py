"""Whether a model would generate a window's suffix, without generating it.

A suffix is *extractable* with `k` tokens of context if greedy decoding from the `k`
tokens before it reproduces its 50 tokens (Carlini et al. 2023, arXiv 2202.07646,
Definition 3.1). As long as the greedy tokens equal the suffix, decoding reads the same
tokens as one *teacher-forced* pass over prompt and suffix. So the suffix is extractable
exactly when, in that pass, each of the 50 positions before a suffix token has this
token as its argmax, and it takes one pass instead of 50 steps.

Argmax ties go to the lowest id. A tie, or a margin within rounding, is a verdict that
another machine or batch size may turn around, so both are recorded.

Names of axes: B windows, K contexts, S = 50 suffix tokens, D width, V vocabulary.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.extraction import row_groups

SUFFIX_LENGTH = 50

# The largest block of logits that is alive at once, in bytes. Larger blocks were no
# faster on CPU, and at 50,257 entries and 32 windows all 50 positions take 320 MB.
_LOGITS_BYTES = 64 * 2**20


class Scores(NamedTuple):
    """How each token of a suffix stands against the rest of the vocabulary.

    The arrays have one shape, such as [B, K, S], on the device or off it.

    Attributes:
      margin: f32, its logit minus the largest other logit: positive where it is the
        argmax, zero at a tie.
      correct: bool, whether it is the argmax; of equal logits the lowest id is.
      log_probability: f32, its natural log-probability; NaN where the logits are not
        finite (one of them NaN or +inf, or all of them -inf).
    """

    margin: Any
    correct: Any
    log_probability: Any


@dataclasses.dataclass(frozen=True)
class Verdicts:
    """What a suffix's scores amount to; every array has shape [B, K].

    Attributes:
      extracted: bool, greedy decoding reproduces the suffix.
      first_mismatch: i32, index of the first suffix token that is not the argmax; 50 if
        there is none.
      tokens_correct: i32, how many suffix tokens are the argmax given the true ones
        before them.
      min_margin: f32, least margin over the suffix.
      tie: bool, some suffix token shares the largest logit.
      suffix_logprob: f32, natural log of the probability of the suffix given the
        prompt.
    """

    extracted: np.ndarray
    first_mismatch: np.ndarray
    tokens_correct: np.ndarray
    min_margin: np.ndarray
    tie: np.ndarray
    suffix_logprob: np.ndarray


def score(
    model: Any, params: Any, tokens_BxT: jax.Array, *, contexts: tuple[int, ...]
) -> Scores:
    """Scores the suffixes after several contexts, in one teacher-forced pass.

    A causal model's output at a position depends on the tokens up to it only, so the
    pass over the longest context serves the shorter ones too.

    Args:
      model: A causal language model of `experiments.models`.
      params: Its parameters.
      tokens_BxT: i32, windows of at least `max(contexts) + 50` tokens; what lies beyond
        is not read.
      contexts: Lengths of the prompts, each at least 1.

    Returns:
      Scores of shape [B, K, S].
    """
    # Of the last suffix token it is only asked how likely it is.
    num_read = max(contexts) + SUFFIX_LENGTH - 1

    def score_rows(tokens_NxT: jax.Array) -> Scores:
        hidden_NxTxD = model.apply(params, tokens_NxT[:, :num_read], method="hidden")
        suffixes = [
            score_tokens(
                model,
                params,
                hidden_NxTxD[:, context - 1 : context - 1 + SUFFIX_LENGTH],
                tokens_NxT[:, context : context + SUFFIX_LENGTH],
            )
            for context in contexts
        ]
        return jax.tree.map(lambda *scores: jnp.stack(scores, axis=1), *suffixes)

    num_rows = row_groups.rows_at_once(
        tokens_BxT.shape[0], num_read, jax.default_backend()
    )
    return row_groups.map_rows(score_rows, num_rows, tokens_BxT)


def score_tokens(
    model: Any, params: Any, hidden_BxSxD: jax.Array, targets_BxS: jax.Array
) -> Scores:
    """Scores `targets_BxS` by the head, with few logits alive at once.

    Args:
      model: A causal language model of `experiments.models`.
      params: Its parameters.
      hidden_BxSxD: Hidden states at the positions *before* the targets.
      targets_BxS: i32 token ids.

    Returns:
      Scores of shape [B, S].
    """
    batch_size, num_positions = targets_BxS.shape
    bytes_per_position = 4 * batch_size * model.config.vocabulary_size
    num_columns = row_groups.largest_divisor(
        num_positions, max(1, _LOGITS_BYTES // bytes_per_position)
    )

    def score_columns(hidden_NxBxD: jax.Array, targets_NxB: jax.Array) -> Scores:
        logits_NxBxV = model.apply(params, hidden_NxBxD, method="logits")
        return score_logits(logits_NxBxV, targets_NxB)

    scores_SxB = row_groups.map_rows(
        score_columns, num_columns, jnp.swapaxes(hidden_BxSxD, 0, 1), targets_BxS.T
    )
    return jax.tree.map(jnp.transpose, scores_SxB)


def score_logits(logits_BxSxV: jax.Array, targets_BxS: jax.Array) -> Scores:
    """Compares the logits of `targets_BxS` with those of all other tokens.

    Args:
      logits_BxSxV: f32.
      targets_BxS: i32 token ids below V.

    Returns:
      Scores of shape [B, S].

    Example:
      >>> logits_1x2x3 = jnp.array([[[2.0, 2.0, 0.0], [0.0, 1.0, 3.0]]])
      >>> scores = score_logits(logits_1x2x3, jnp.array([[1, 2]]))
      >>> scores.margin.tolist(), scores.correct.tolist()
      ([[0.0, 2.0]], [[False, True]])
    """
    ids_1x1xV = jnp.arange(logits_BxSxV.shape[-1])[None, None]
    targets_BxSx1 = targets_BxS[..., None]
    target_BxS = jnp.take_along_axis(logits_BxSxV, targets_BxSx1, axis=-1)[..., 0]

    # Two plain maxima: XLA's argmax, which carries the index along, is slower on CPU.
    def largest_where(mask_BxSxV: jax.Array) -> jax.Array:
        return jnp.max(jnp.where(mask_BxSxV, logits_BxSxV, -jnp.inf), axis=-1)

    below_BxS = largest_where(ids_1x1xV < targets_BxSx1)
    above_BxS = largest_where(ids_1x1xV > targets_BxSx1)
    other_BxS = jnp.maximum(below_BxS, above_BxS)
    top_BxS = jnp.maximum(target_BxS, other_BxS)
    normalizer_BxS = top_BxS + jnp.log(
        jnp.sum(jnp.exp(logits_BxSxV - top_BxS[..., None]), axis=-1)
    )
    log_probability_BxS = jnp.where(
        jnp.isfinite(normalizer_BxS), target_BxS - normalizer_BxS, jnp.nan
    )
    return Scores(
        margin=target_BxS - other_BxS,
        correct=(target_BxS > below_BxS) & (target_BxS >= above_BxS),
        log_probability=log_probability_BxS,
    )


def judge(scores: Scores) -> Verdicts:
    """Turns scores of shape [B, K, S] into verdicts of shape [B, K].

    Example:
      >>> correct_1x1x3 = np.array([[[True, False, True]]])
      >>> margin_1x1x3 = np.array([[[2.0, -1.0, 0.5]]], np.float32)
      >>> verdicts = judge(Scores(margin_1x1x3, correct_1x1x3, margin_1x1x3 - 3))
      >>> verdicts.extracted.item(), verdicts.first_mismatch.item()
      (False, 1)
      >>> verdicts.tokens_correct.item(), verdicts.min_margin.item()
      (2, -1.0)
    """
    correct_BxKxS = np.asarray(scores.correct)
    margin_BxKxS = np.asarray(scores.margin)
    return Verdicts(
        extracted=np.asarray(correct_BxKxS.all(axis=-1)),
        first_mismatch=first_false(correct_BxKxS),
        tokens_correct=correct_BxKxS.sum(axis=-1, dtype=np.int32),
        min_margin=margin_BxKxS.min(axis=-1),
        tie=(margin_BxKxS == 0).any(axis=-1),
        suffix_logprob=np.asarray(scores.log_probability).sum(axis=-1),
    )


def finite(scores: Scores) -> np.ndarray:
    """Whether all logits behind scores of shape [..., S] are finite, bool[...]."""
    return ~np.isnan(np.asarray(scores.log_probability)).any(axis=-1)


def first_false(flags_xS: np.ndarray) -> np.ndarray:
    """Index of the first False along the last axis, i32; its length if there is none.

    Example:
      >>> first_false(np.array([[True, False, False], [True, True, True]])).tolist()
      [1, 3]
    """
    length = flags_xS.shape[-1]
    first = np.where(flags_xS.all(axis=-1), length, flags_xS.argmin(axis=-1))
    return first.astype(np.int32)
