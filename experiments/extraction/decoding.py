"""Greedy decoding with a cache of keys and values, in one compiled program.

All rows of a batch have prompts of one length and get the same number of tokens. No
token ends a row early and none is masked: a suffix may well contain the token between
documents (Carlini et al. 2023, arXiv 2202.07646, generate 50 tokens in any case).
"""

from typing import Any

import jax
import jax.numpy as jnp

from experiments.extraction.verdicts import SUFFIX_LENGTH


def greedy_token(logits_BxV: jax.Array) -> jax.Array:
    """The id of the largest logit, i32[B]; the lowest one if several share it.

    A row with a NaN gets V, which is no id.

    Example:
      >>> nan = float("nan")
      >>> greedy_token(jnp.array([[0.0, 2.0, 2.0], [1.0, nan, 0.0]])).tolist()
      [1, 3]
    """
    vocabulary_size = logits_BxV.shape[-1]
    top_Bx1 = jnp.max(logits_BxV, axis=-1, keepdims=True)
    # Two plain reductions: XLA's argmax, which carries the index along, is slower on
    # CPU. A NaN is the maximum of its row and equals nothing.
    ids_1xV = jnp.arange(vocabulary_size, dtype=jnp.int32)[None]
    candidates_BxV = jnp.where(logits_BxV == top_Bx1, ids_1xV, vocabulary_size)
    return jnp.min(candidates_BxV, axis=-1)


def generate(
    model: Any, params: Any, prompts_BxT: jax.Array, *, num_tokens: int = SUFFIX_LENGTH
) -> jax.Array:
    """Continues each prompt by its most likely tokens.

    Args:
      model: A causal language model of `experiments.models`; `T + num_tokens - 1` must
        not exceed its positions.
      params: Its parameters.
      prompts_BxT: i32, at least one token each.
      num_tokens: How many tokens to generate, N.

    Returns:
      i32[B, N]; from where logits are NaN on, the vocabulary's size, which is no id.
    """
    batch_size, prompt_length = prompts_BxT.shape
    # The last generated token is never read.
    cache = model.init_cache(batch_size, prompt_length + num_tokens - 1)

    def next_token(hidden_Bx1xD: jax.Array) -> jax.Array:
        logits_Bx1xV = model.apply(params, hidden_Bx1xD, method="logits")
        return greedy_token(logits_Bx1xV[:, 0])

    def step(carry: tuple[Any, jax.Array], _: None) -> tuple[Any, jax.Array]:
        cache, token_B = carry
        hidden_Bx1xD, cache = model.apply(
            params, token_B[:, None], cache, method="extend"
        )
        return (cache, next_token(hidden_Bx1xD)), token_B

    hidden_BxTxD, cache = model.apply(params, prompts_BxT, cache, method="extend")
    (_, last_B), tokens_NxB = jax.lax.scan(
        step, (cache, next_token(hidden_BxTxD[:, -1:])), None, length=num_tokens - 1
    )
    return jnp.concatenate([tokens_NxB, last_B[None]]).T
