"""Evaluation sets whose verdicts are known: suffixes that a model itself generates.

The reference decodes by the full forward pass of the model at every step, without a
cache: argmax over V by NumPy, which takes the lowest of equal ids.
"""

import pathlib
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from experiments import models
from experiments.extraction import evaluation_set

GOLDEN = pathlib.Path(__file__).parents[1] / "models" / "golden"
VOCABULARY_SIZE = 96
"""Ids below this; the golden models have 128 rows, as padded vocabularies do."""


def continued(folder: pathlib.Path, prompts_NxC: np.ndarray, num_tokens: int = 50):
    """`prompts_NxC` and what greedy decoding adds, i32[N, C + num_tokens]."""
    model, params = models.load(folder)
    num_rows, context = prompts_NxC.shape
    tokens_NxT = np.zeros((num_rows, context + num_tokens), np.int32)
    tokens_NxT[:, :context] = prompts_NxC
    # The zeros after t do not reach the logits at t.
    forward = jax.jit(model.apply)
    for t in range(context, context + num_tokens):
        logits_NxTxV = np.asarray(forward(params, tokens_NxT[:, :-1]))
        tokens_NxT[:, t] = logits_NxTxV[:, t - 1].argmax(axis=-1)
    return tokens_NxT


def spoiled(tokens_NxT: np.ndarray, first_wrong_N: Sequence[int]) -> np.ndarray:
    """Windows whose suffix token `first_wrong` is another one; 50 leaves them as is."""
    spoiled_NxT = tokens_NxT.copy()
    for row, wrong in enumerate(first_wrong_N):
        if wrong < 50:
            place = tokens_NxT.shape[1] - 50 + wrong
            spoiled_NxT[row, place] = (tokens_NxT[row, place] + 1) % VOCABULARY_SIZE
    return spoiled_NxT


def write(
    folder: pathlib.Path,
    windows_by_length: Mapping[int, np.ndarray],
    tokenizer: pathlib.Path | None = None,
    **manifest,
) -> pathlib.Path:
    """An evaluation set of tokens_NxL for each length L; buckets take turns."""
    folder.mkdir(parents=True)
    parts = []
    for length, tokens_NxL in windows_by_length.items():
        numbers_N = np.arange(len(tokens_NxL))
        assert tokens_NxL.shape[1] == length
        parts.append(
            evaluation_set.rows(
                tokens_NxL,
                bucket_K=numbers_N % 3,
                count_K=numbers_N + 1,
                position_K=10 * numbers_N,
                cluster_K=numbers_N // 2,
            )
        )
    values = {"eos_id": 1, "tokenizer_fingerprint": None, **manifest}
    evaluation_set.write(folder, parts, values, tokenizer)
    return folder
