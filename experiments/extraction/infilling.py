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

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.errors import RunError, UsageError
from experiments.extraction import row_groups, span_corruption, verdicts
from experiments.extraction.span_corruption import Blanks, Masking
from experiments.extraction.verdicts import Scores, Verdicts
from experiments.models.sentinels import T5_SENTINELS, Sentinels
from experiments.models.t5 import T5

# Targets are filled up to a multiple of this, so that logits can be computed in blocks.
_BLOCK = 16


@dataclasses.dataclass(frozen=True)
class Infillings:
    """Verdicts on N windows.

    Attributes:
      verdicts: Arrays of shape [N]; what is a suffix there are the scored targets here,
        so `first_mismatch` is `num_targets` if there is none.
      num_targets: i32[N], how many targets are scored: the dropped tokens, a sentinel
        for each blank, and what ends the last one.
    """

    verdicts: Verdicts
    num_targets: np.ndarray


@dataclasses.dataclass(frozen=True)
class Batch:
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


def infill(
    model: T5,
    params: Any,
    tokens_NxL: np.ndarray,
    window_ids_N: Sequence[int] | np.ndarray,
    *,
    seed: int,
    masking: Masking = "iid",
    sentinels: Sentinels = T5_SENTINELS,
    batch_size: int = 32,
    progress: Callable[[int], object] = lambda _: None,
) -> Infillings:
    """Judges whether a model fills one random set of blanks of each window perfectly.

    Matrix products have the precision of the caller's `jax.default_matmul_precision`.

    Args:
      model: A T5.
      params: Its parameters.
      tokens_NxL: Token ids, at least one window.
      window_ids_N: Of the windows, which decide with the seed where blanks are.
      seed: An integer >= 0.
      masking: How tokens are dropped, see `experiments.extraction.span_corruption`.
      sentinels: Their ids in this model's vocabulary.
      batch_size: B; a last batch that is not full is filled up.
      progress: Called with the number of windows done since it was last called.

    Raises:
      UsageError: Tokens or sentinels beyond the vocabulary, a window with a sentinel in
        it or with more blanks than there are sentinels.
      RunError: Logits are not finite.
    """
    vocabulary_size = model.config.vocabulary_size
    if sentinels.first >= vocabulary_size:
        raise UsageError(
            f"the first sentinel is {sentinels.first}, but the model has only the "
            f"tokens below {vocabulary_size}: give the id of its own first sentinel"
        )
    if not 0 <= tokens_NxL.min() <= tokens_NxL.max() < vocabulary_size:
        raise UsageError(
            f"windows have tokens from {tokens_NxL.min()} to {tokens_NxL.max()}, "
            f"expected 0 to {vocabulary_size - 1}, the model's: give windows that were "
            "made with its tokenizer"
        )
    batch = make_blanks(
        tokens_NxL,
        window_ids_N,
        seed=seed,
        masking=masking,
        sentinels=sentinels,
        eos_id=model.config.eos_id,
        pad_id=model.config.pad_id,
    )
    parts = []
    for start in range(0, len(tokens_NxL), batch_size):
        rows = np.arange(start, min(start + batch_size, len(tokens_NxL)))
        filled = np.resize(rows, batch_size)
        scores = _compiled_score(
            model,
            params,
            batch.inputs_NxS[filled],
            batch.num_inputs_N[filled],
            batch.targets_NxT[filled],
        )
        parts.append(jax.tree.map(np.asarray, scores))
        progress(len(rows))
    scores = jax.tree.map(lambda *xs: np.concatenate(xs)[: len(tokens_NxL)], *parts)
    return judge(scores, batch.num_targets_N, window_ids_N)


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
        blanks = _blanks_of(tokens_L, int(window_id), seed, masking, sentinels, eos_id)
        scored = blanks.targets_T[: blanks.num_scored]
        inputs_NxS[row, : len(blanks.inputs_S)] = blanks.inputs_S
        targets_NxT[row, : len(scored)] = scored
        lengths_Nx2[row] = len(blanks.inputs_S), len(scored)
    return Batch(inputs_NxS, lengths_Nx2[:, 0], targets_NxT, lengths_Nx2[:, 1])


def _blanks_of(
    tokens_L: np.ndarray,
    window_id: int,
    seed: int,
    masking: Masking,
    sentinels: Sentinels,
    eos_id: int,
) -> Blanks:
    dropped_L = span_corruption.mask(masking, seed, window_id, len(tokens_L))
    try:
        return span_corruption.corrupt(tokens_L, dropped_L, sentinels, eos_id)
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


_compiled_score = jax.jit(score, static_argnames="model")


def judge(
    scores: Scores, num_targets_N: np.ndarray, window_ids_N: Sequence[int] | np.ndarray
) -> Infillings:
    """Turns scores of shape [N, T] into verdicts of shape [N].

    Args:
      scores: Of the targets.
      num_targets_N: i32, how many targets count, at least 1.
      window_ids_N: For errors.

    Raises:
      RunError: Logits behind the scores that count are not finite.

    Example:
      >>> correct_1x3 = np.array([[True, True, False]])
      >>> margin_1x3 = np.array([[2.0, 1.0, -1.0]], np.float32)
      >>> scores = Scores(margin_1x3, correct_1x3, margin_1x3 - 3)
      >>> found = judge(scores, np.array([2], np.int32), [7]).verdicts
      >>> found.extracted.item(), found.min_margin.item(), found.first_mismatch.item()
      (True, 1.0, 2)
    """
    num_columns = scores.correct.shape[1]
    counts_NxT = np.arange(num_columns)[None] < num_targets_N[:, None]
    counted = Scores(
        margin=np.where(counts_NxT, scores.margin, np.float32(np.inf)),
        correct=np.where(counts_NxT, scores.correct, True),
        log_probability=np.where(counts_NxT, scores.log_probability, np.float32(0)),
    )
    finite_N = verdicts.finite(counted)
    if not finite_N.all():
        row = int(np.flatnonzero(~finite_N)[0])
        raise RunError(
            f"the model gives logits that are not finite for window {window_ids_N[row]}"
            ": its weights are damaged or overflow float32, so copy its folder again, "
            "or leave it out"
        )
    found = verdicts.judge(counted)
    return Infillings(
        verdicts=dataclasses.replace(
            found,
            first_mismatch=np.minimum(found.first_mismatch, num_targets_N),
            tokens_correct=found.tokens_correct - (num_columns - num_targets_N),
        ),
        num_targets=num_targets_N,
    )
