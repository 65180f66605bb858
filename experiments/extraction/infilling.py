"""Whether a T5 fills the blanks of a window perfectly, without generating anything.

A window is *memorized* by an encoder-decoder if it fills all blanks of the window
exactly (Carlini et al. 2023, arXiv 2202.07646, section 5.1); see
`experiments.extraction.span_corruption` for how blanks are made. What is asked is that
greedy decoding, from the inputs alone, writes the targets up to and including what ends
the last blank. All of them count: a sentinel that comes too early or too late, or a
token after the last blank's, makes the fill another one. Decoding reads its own output,
and as long as that equals the targets it reads what one *teacher-forced* pass reads. So
by induction the blanks are filled perfectly exactly when, in that pass, each of these
targets is the argmax at its place. Where it is not, decoding leaves the targets at the
first such place; `tokens_correct`, the margins and the log-probability are those of the
pass, with all targets before a token given. Argmax ties go to the lowest id.

Windows of one length have different numbers of blanks with `iid` dropping. All are
filled up to the most that there can be, with inputs that are masked and targets that
are not scored, so there is one shape, and one program, for each length.

Names of axes: N windows, L their length, B windows in a batch, S inputs, T targets.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.errors import UsageError
from experiments.extraction import row_groups, span_corruption, verdicts
from experiments.extraction.span_corruption import Masking
from experiments.extraction.verdicts import Scores, Verdicts
from experiments.models.sentinels import Sentinels

# Targets are filled up to a multiple of this, so that logits can be computed in blocks.
_BLOCK = 16


class Batch(NamedTuple):
    """Windows with blanks, filled up to common lengths.

    Attributes:
      inputs_NxS: i32.
      num_inputs_N: i32, how many of them are there.
      targets_NxT: i32.
      num_targets_N: i32, how many of them are scored.
    """

    inputs_NxS: np.ndarray
    num_inputs_N: np.ndarray
    targets_NxT: np.ndarray
    num_targets_N: np.ndarray


def check_windows(
    tokens_NxL: np.ndarray,
    window_ids_N: Sequence[int] | np.ndarray,
    *,
    seed: int,
    masking: Masking,
    sentinels: Sentinels,
) -> None:
    """Raises the `UsageError` that `make_blanks` would, for less.

    Args:
      tokens_NxL: Token ids.
      window_ids_N: Of the windows.
      seed: An integer >= 0.
      masking: How tokens are dropped.
      sentinels: Their ids.
    """
    holds_sentinel_N = span_corruption.is_sentinel(tokens_NxL, sentinels).any(axis=1)
    length = tokens_NxL.shape[1]
    are_enough = span_corruption.most_blanks(masking, length) < sentinels.number
    for row in np.flatnonzero(holds_sentinel_N | (not are_enough)):
        window_id = int(window_ids_N[int(row)])
        dropped_L = span_corruption.mask(masking, seed, window_id, length)
        with _about(window_id):
            span_corruption.corrupt(tokens_NxL[row], dropped_L, sentinels, eos_id=0)


def make_blanks(
    tokens_NxL: np.ndarray,
    window_ids_N: Sequence[int] | np.ndarray,
    *,
    seed: int,
    masking: Masking,
    sentinels: Sentinels,
    eos_id: int,
    pad_id: int,
) -> Batch:
    """Drops tokens of windows; the shapes depend on L and on the masking alone.

    Args:
      tokens_NxL: Token ids.
      window_ids_N: Of the windows.
      seed: An integer >= 0.
      masking: How tokens are dropped.
      sentinels: Their ids.
      eos_id: What ends inputs and targets.
      pad_id: What both are filled up with.

    Raises:
      UsageError: See `span_corruption.corrupt`.
    """
    num_windows, length = tokens_NxL.shape
    dropped = span_corruption.num_dropped(length)
    most = span_corruption.most_blanks(masking, length)
    num_targets = dropped + most + 1
    num_targets += -num_targets % _BLOCK
    inputs_NxS = np.full((num_windows, length - dropped + most + 1), pad_id, np.int32)
    targets_NxT = np.full((num_windows, num_targets), pad_id, np.int32)
    lengths_Nx2 = np.zeros((num_windows, 2), np.int32)
    for row, (tokens_L, window_id) in enumerate(
        zip(tokens_NxL, window_ids_N, strict=True)
    ):
        dropped_L = span_corruption.mask(masking, seed, int(window_id), length)
        with _about(window_id):
            blanks = span_corruption.corrupt(tokens_L, dropped_L, sentinels, eos_id)
        scored = blanks.targets_T[: blanks.num_scored]
        inputs_NxS[row, : len(blanks.inputs_S)] = blanks.inputs_S
        targets_NxT[row, : len(scored)] = scored
        lengths_Nx2[row] = len(blanks.inputs_S), len(scored)
    return Batch(inputs_NxS, lengths_Nx2[:, 0], targets_NxT, lengths_Nx2[:, 1])


@contextlib.contextmanager
def _about(window_id: int) -> Iterator[None]:
    """Says which window a `UsageError` is about."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"window {window_id}: {error}") from error


def score(
    model: Any,
    params: Any,
    inputs_BxS: jax.Array,
    num_inputs_B: jax.Array,
    targets_BxT: jax.Array,
) -> Scores:
    """Scores targets in one teacher-forced pass.

    Args:
      model: A T5.
      params: Its parameters.
      inputs_BxS: i32.
      num_inputs_B: i32, how many inputs are there; the others are not seen.
      targets_BxT: i32.

    Returns:
      Scores of shape [B, T].
    """
    batch_size, num_inputs = inputs_BxS.shape
    mask_BxS = jnp.arange(num_inputs)[None] < num_inputs_B[:, None]

    def score_rows(inputs: jax.Array, seen: jax.Array, targets: jax.Array) -> Scores:
        hidden_NxTxD = model.apply(params, inputs, targets, seen, method="hidden")
        return verdicts.score_tokens(model, params, hidden_NxTxD, targets)

    num_rows = row_groups.rows_at_once(
        batch_size, num_inputs + targets_BxT.shape[1], jax.default_backend()
    )
    return row_groups.map_rows(score_rows, num_rows, inputs_BxS, mask_BxS, targets_BxT)


def judge(scores: Scores, num_targets_N: np.ndarray) -> Verdicts:
    """Turns scores of shape [N, T] into verdicts of shape [N].

    What is a suffix in `Verdicts` are the targets that count here, so `first_mismatch`
    is `num_targets_N` if there is none.

    Args:
      scores: Of the targets, and of what fills them up.
      num_targets_N: i32, how many targets count, at least 1.

    Example:
      >>> correct_1x3 = np.array([[True, True, False]])
      >>> margin_1x3 = np.array([[2.0, 1.0, -1.0]], np.float32)
      >>> scores = Scores(margin_1x3, correct_1x3, margin_1x3 - 3)
      >>> found = judge(scores, np.array([2], np.int32))
      >>> found.extracted.item(), found.min_margin.item(), found.first_mismatch.item()
      (True, 1.0, 2)
    """
    found = verdicts.judge(_counted(scores, num_targets_N))
    num_others_N = scores.correct.shape[1] - num_targets_N
    return dataclasses.replace(
        found,
        first_mismatch=np.minimum(found.first_mismatch, num_targets_N),
        tokens_correct=found.tokens_correct - num_others_N,
    )


def finite(scores: Scores, num_targets_N: np.ndarray) -> np.ndarray:
    """Whether the logits of the targets that count are finite, bool[N]."""
    return verdicts.finite(_counted(scores, num_targets_N))


def _counted(scores: Scores, num_targets_N: np.ndarray) -> Scores:
    """With right answers in place of targets that do not count."""
    counts_NxT = np.arange(scores.correct.shape[1])[None] < num_targets_N[:, None]
    return Scores(
        margin=np.where(counts_NxT, scores.margin, np.float32(np.inf)),
        correct=np.where(counts_NxT, scores.correct, True),
        log_probability=np.where(counts_NxT, scores.log_probability, np.float32(0)),
    )
