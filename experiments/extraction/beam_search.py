"""Beam search over continuations, in one compiled program.

Of all continuations by one more token the b most likely ones are kept, b = 100 in
Carlini et al. 2023 (arXiv 2202.07646, Section 4.5). All have the same number of tokens:
there is no length penalty, no continuation ends early, and no token is masked, that
between documents included. With b = 1 this is greedy decoding.

Names of axes: P prompts, C tokens of a prompt, N beams, R = P N rows, T generated
tokens, V vocabulary.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from experiments.errors import UsageError
from experiments.extraction import row_groups, shared_prompts
from experiments.extraction.verdicts import SUFFIX_LENGTH
from experiments.models import decoder

# Putting the beams' own caches in order takes up to half of the time on CPU, and the
# less the shorter they are. They grow by so many tokens; each length is compiled.
_STAGE = 17


class Beams(NamedTuple):
    """The most likely continuations that were found, the best one first.

    Attributes:
      tokens_PxNxT: i32. With `scores_PxN` NaN they mean nothing.
      scores_PxN: f32, natural log of the probability of these T tokens; NaN if logits
        of the prompt or of one of its beams were not finite. It is -inf where fewer
        than N continuations have a probability above 0.
    """

    tokens_PxNxT: jax.Array
    scores_PxN: jax.Array


def search(
    model: Any,
    params: Any,
    prompts_PxC: jax.Array,
    *,
    num_beams: int,
    num_tokens: int = SUFFIX_LENGTH,
    num_returned: int | None = None,
) -> Beams:
    """Continues each prompt by the most likely tokens that a beam search finds.

    Of equally likely candidates, that of the best beam comes first, and of this beam
    that with the lowest token id.

    Args:
      model: A causal language model of `experiments.models`; `C + num_tokens - 1` must
        not exceed its positions.
      params: Its parameters.
      prompts_PxC: i32, at least one token each.
      num_beams: How many continuations are followed, N.
      num_tokens: How many tokens to generate, T.
      num_returned: How many of the beams to return; None: all.

    Raises:
      UsageError: More beams than the vocabulary has tokens.
    """
    check_num_beams(num_beams, model.config.vocabulary_size)

    def search_rows(prompts_PxC: jax.Array) -> Beams:
        beams = _search(model, params, prompts_PxC, num_beams, num_tokens)
        return jax.tree.map(lambda x: x[:, :num_returned], beams)

    return shared_prompts.map_prompts(
        search_rows,
        model.config,
        prompts_PxC,
        num_continuations=num_beams,
        num_tokens=num_tokens,
    )


def check_num_beams(num_beams: int, vocabulary_size: int) -> None:
    """Raises `UsageError` unless the first step can fill the beams.

    Example:
      >>> check_num_beams(100, vocabulary_size=64)
      Traceback (most recent call last):
      ...
      experiments.errors.UsageError: 100 beams, expected 1 to 64 ...
    """
    # Candidates, one for each beam and token, are numbered in 32 bits.
    most = min(vocabulary_size, (2**31 - 1) // vocabulary_size)
    if not 1 <= num_beams <= most:
        raise UsageError(
            f"{num_beams} beams, expected 1 to {most} for a vocabulary of "
            f"{vocabulary_size} tokens: change the number of beams"
        )


class _State(NamedTuple):
    """Where a search stands.

    Attributes:
      own: The cache of what the beams generated, R rows.
      token_PxN: i32, the latest token of each beam, which the cache does not have yet.
      behind_PxN: f32, score less that of the best beam.
      best_P: f32, score of the best beam.
      is_finite_P: bool, all logits so far were finite.
    """

    own: Any
    token_PxN: jax.Array
    behind_PxN: jax.Array
    best_P: jax.Array
    is_finite_P: jax.Array


def _search(
    model: Any, params: Any, prompts_PxC: jax.Array, num_beams: int, num_tokens: int
) -> Beams:
    num_prompts, context = prompts_PxC.shape
    vocabulary_size = model.config.vocabulary_size
    first_row_Px1 = num_beams * jnp.arange(num_prompts)[:, None]

    def log_probabilities(hidden_RxSxD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Of the next token, [P, R/P, V], and whether all logits are finite, [P]."""
        logits_Rx1xV = model.apply(params, hidden_RxSxD[:, -1:], method="logits")
        logits_PxNxV = logits_Rx1xV.reshape(num_prompts, -1, vocabulary_size)
        is_finite_PxN = jnp.isfinite(logits_PxNxV.max(axis=-1))
        return jax.nn.log_softmax(logits_PxNxV), is_finite_PxN.all(axis=-1)

    def best(candidates_PxNxV: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Scores, beams and tokens of the best candidates, [P, N] each."""
        # Of equal ones, top_k takes that with the lowest index. Without the barrier XLA
        # merges it with what reads a part of its results and sorts all candidates.
        scores_PxN, index_PxN = jax.lax.optimization_barrier(
            jax.lax.top_k(candidates_PxNxV.reshape(num_prompts, -1), num_beams)
        )
        return scores_PxN, *jnp.divmod(index_PxN, vocabulary_size)

    def relative(scores_PxN: jax.Array, best_P: jax.Array) -> tuple[Any, Any]:
        # At -150 the next float32 is 1.5e-5 away: tokens that greedy decoding tells
        # apart would tie. Beams differ by less than their scores.
        return scores_PxN - scores_PxN[:, :1], best_P + scores_PxN[:, 0]

    def step(state: _State, _: None) -> tuple[_State, tuple[jax.Array, jax.Array]]:
        hidden_Rx1xD, own = model.apply(
            params, state.token_PxN.reshape(-1, 1), state.own, prompts, method="extend"
        )
        log_probability_PxNxV, is_finite_P = log_probabilities(hidden_Rx1xD)
        scores_PxN, parent_PxN, token_PxN = best(
            state.behind_PxN[..., None] + log_probability_PxNxV
        )
        behind_PxN, best_P = relative(scores_PxN, state.best_P)
        own = row_groups.take_rows(own, (first_row_Px1 + parent_PxN).reshape(-1))
        is_finite_P &= state.is_finite_P
        state = _State(own, token_PxN, behind_PxN, best_P, is_finite_P)
        return state, (parent_PxN, token_PxN)

    def backtrack(
        beam_PxN: jax.Array, chosen: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        """From beams after a step to those before it, and the tokens in between."""
        parent_PxN, token_PxN = (
            jnp.take_along_axis(x_PxN, beam_PxN, axis=1) for x_PxN in chosen
        )
        return parent_PxN, token_PxN

    hidden_PxCxD, prompts = model.apply(
        params, prompts_PxC, model.init_cache(num_prompts, context), method="extend"
    )
    log_probability_Px1xV, is_finite_P = log_probabilities(hidden_PxCxD)
    scores_PxN, *chosen = best(log_probability_Px1xV)
    behind_PxN, best_P = relative(scores_PxN, jnp.zeros(num_prompts))
    own = model.init_cache(num_prompts * num_beams, 0)
    state = _State(own, chosen[1], behind_PxN, best_P, is_finite_P)
    parts = [tuple(x_PxN[None] for x_PxN in chosen)]
    for length in _stages(num_tokens):
        state = state._replace(own=decoder.with_room(state.own, length))
        state, chosen_LxPxN = jax.lax.scan(step, state, None, length=length)
        parts.append(chosen_LxPxN)
    chosen_TxPxN = jax.tree.map(lambda *parts: jnp.concatenate(parts), *parts)
    last_PxN = jnp.broadcast_to(jnp.arange(num_beams)[None], (num_prompts, num_beams))
    _, tokens_TxPxN = jax.lax.scan(backtrack, last_PxN, chosen_TxPxN, reverse=True)
    scores_PxN = state.best_P[:, None] + state.behind_PxN
    scores_PxN = jnp.where(state.is_finite_P[:, None], scores_PxN, jnp.nan)
    return Beams(jnp.moveaxis(tokens_TxPxN, 0, -1), scores_PxN)


def _stages(num_tokens: int) -> list[int]:
    """How many steps there are with caches of one length, and then of the next.

    Example:
      >>> _stages(50), _stages(5)
      ([17, 17, 15], [4])
    """
    # The last token is never read, and the first step, from the prompt, is not counted.
    return [
        min(_STAGE, num_tokens - 1 - start)
        for start in range(0, num_tokens - 1, _STAGE)
    ]
