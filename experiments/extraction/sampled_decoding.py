"""Continuations drawn at random, and how likely a sampling scheme is to draw a suffix.

A scheme samples the next token from softmax(logits / temperature) over the k tokens of
largest logit. What is drawn and what a suffix's probability is follow from the same
modified logits, so that the one is the frequency of the other: a single teacher-forced
pass replaces any number of draws (Hayes et al. 2025, arXiv 2410.19482).

Names of axes: P prompts, C tokens of a prompt, N draws for each, R = P N rows, T
generated tokens, V vocabulary.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import seeds
from experiments.errors import UsageError
from experiments.extraction import shared_prompts, verdicts
from experiments.extraction.verdicts import SUFFIX_LENGTH, Scores


@dataclasses.dataclass(frozen=True)
class SamplingScheme:
    """How the next token is drawn.

    Attributes:
      temperature: Logits are divided by this; 1 leaves the model as it is.
      top_k: Only so many tokens of largest logit can be drawn, of equal ones those with
        the lowest ids; None: all.
    """

    temperature: float = 1.0
    top_k: int | None = None

    def __post_init__(self) -> None:
        """Raises `UsageError` about values that mean nothing."""
        if not 0 < self.temperature < float("inf"):
            raise UsageError(
                f"temperature={self.temperature}, expected a positive number: for the "
                "most likely token, give top_k=1"
            )
        if self.top_k is not None and self.top_k < 1:
            raise UsageError(
                f"top_k={self.top_k}, expected at least 1: leave it out to draw from "
                "all tokens"
            )

    def check(self, vocabulary_size: int) -> None:
        """Raises `UsageError` if `top_k` is more than the vocabulary has."""
        if self.top_k is not None and self.top_k > vocabulary_size:
            raise UsageError(
                f"top_k={self.top_k}, expected at most {vocabulary_size}, the tokens "
                "of the vocabulary: lower it"
            )

    def modified(self, logits_xV: jax.Array) -> jax.Array:
        """The logits of the scheme, up to a constant: of the tokens left out -inf.

        NaN stay NaN.

        Raises:
          UsageError: `top_k` is more than the vocabulary has.

        Example:
          >>> logits_V = jnp.array([1.0, 3.0, 2.0, 3.0, 2.0])
          >>> SamplingScheme(temperature=0.5, top_k=3).modified(logits_V).tolist()
          [-inf, 0.0, -2.0, 0.0, -inf]
        """
        scaled_xV = logits_xV
        if self.temperature != 1:
            # From the largest one, or a low temperature would make them so large that
            # what tells them apart is lost to rounding.
            largest_xx1 = jnp.max(logits_xV, axis=-1, keepdims=True)
            scaled_xV = (logits_xV - largest_xx1) / self.temperature
        if self.top_k is None:
            return scaled_xV
        self.check(logits_xV.shape[-1])
        # The last of them has the highest id of those with its logit.
        values_xK, ids_xK = jax.lax.top_k(logits_xV, self.top_k)
        least_xx1, last_xx1 = values_xK[..., -1:], ids_xK[..., -1:]
        ids_V = jax.lax.broadcasted_iota(jnp.int32, logits_xV.shape, logits_xV.ndim - 1)
        is_kept_xV = (logits_xV > least_xx1) | (
            (logits_xV == least_xx1) & (ids_V <= last_xx1)
        )
        return jnp.where(is_kept_xV | jnp.isnan(logits_xV), scaled_xV, -jnp.inf)


def score(
    model: Any,
    params: Any,
    tokens_BxT: jax.Array,
    *,
    contexts: tuple[int, ...],
    scheme: SamplingScheme,
) -> Scores:
    """Scores suffixes as `verdicts.score` does, under a sampling scheme.

    The sum of the log-probabilities is that of drawing the suffix in one try. It is
    -inf where the scheme leaves one of its tokens out.

    Args:
      model: A causal language model of `experiments.models`.
      params: Its parameters.
      tokens_BxT: i32, windows of at least `max(contexts) + 50` tokens.
      contexts: Lengths of the prompts, each at least 1.
      scheme: How tokens are drawn.

    Returns:
      Scores of shape [B, K, 50].
    """
    return verdicts.score(
        _Modified(model, scheme), params, tokens_BxT, contexts=contexts
    )


class _Modified:
    """A language model with the logits of a sampling scheme."""

    def __init__(self, model: Any, scheme: SamplingScheme):
        self.config = model.config
        self._model, self._scheme = model, scheme

    def apply(self, params: Any, *arrays: Any, method: str) -> Any:
        result = self._model.apply(params, *arrays, method=method)
        return self._scheme.modified(result) if method == "logits" else result


def draw_keys(seed: int, context: int, window_ids_P: Any, trials_N: Any) -> jax.Array:
    """A random key for each window and trial, [P, N].

    A draw depends on its seed, context, window and trial alone, not on what else is
    drawn at the same time, but for rounding of the logits. Models that are given the
    same keys meet the same luck.

    Args:
      seed: Of all draws.
      context: Tokens of the prompts.
      window_ids_P: Whole numbers from 0 to 2^32 - 1.
      trials_N: The same.

    Raises:
      UsageError: A number is outside these limits.
    """
    root = jax.random.fold_in(seeds.key(seed, seeds.Stream.SAMPLING), context)

    def key(window_id: jax.Array, trial: jax.Array) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(root, window_id), trial)

    of_window = jax.vmap(key, in_axes=(None, 0))
    return jax.vmap(of_window, in_axes=(0, None))(
        _words("window ids", window_ids_P), _words("trials", trials_N)
    )


def _words(what: str, numbers_N: Any) -> jax.Array:
    numbers_N = np.asarray(numbers_N)
    outside_K = numbers_N[(numbers_N < 0) | (numbers_N >= 2**32)]
    if len(outside_K):
        raise UsageError(
            f"{outside_K[0]} among the {what}, expected 0 to 2^32 - 1: number them anew"
        )
    return jnp.asarray(numbers_N, jnp.uint32)


def sample(
    model: Any,
    params: Any,
    prompts_PxC: jax.Array,
    keys_PxN: jax.Array,
    *,
    scheme: SamplingScheme,
    num_tokens: int = SUFFIX_LENGTH,
) -> jax.Array:
    """Draws N continuations of each prompt, in one program.

    Args:
      model: A causal language model of `experiments.models`; `C + num_tokens - 1` must
        not exceed its positions.
      params: Its parameters.
      prompts_PxC: i32, at least one token each.
      keys_PxN: From `draw_keys`.
      scheme: How tokens are drawn.
      num_tokens: How many tokens to draw, T; no token ends a continuation early.

    Returns:
      i32[P, N, T]; from where logits are NaN on, the vocabulary's size, which is no id.
    """

    def sample_rows(prompts_PxC: jax.Array, keys_PxN: jax.Array) -> jax.Array:
        return _sample(model, params, prompts_PxC, keys_PxN, scheme, num_tokens)

    return shared_prompts.map_prompts(
        sample_rows,
        model.config,
        prompts_PxC,
        keys_PxN,
        num_continuations=keys_PxN.shape[1],
        num_tokens=num_tokens,
    )


def _sample(
    model: Any,
    params: Any,
    prompts_PxC: jax.Array,
    keys_PxN: jax.Array,
    scheme: SamplingScheme,
    num_tokens: int,
) -> jax.Array:
    num_prompts, context = prompts_PxC.shape
    keys_R = keys_PxN.reshape(-1)
    num_rows = keys_R.shape[0]

    def draw(hidden_RxSxD: jax.Array, place: jax.Array) -> jax.Array:
        logits_Rx1xV = model.apply(params, hidden_RxSxD[:, -1:], method="logits")
        logits_RxV = scheme.modified(logits_Rx1xV[:, 0])
        keys_at_R = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys_R, place)
        drawn_R = jax.vmap(jax.random.categorical)(keys_at_R, logits_RxV)
        is_finite_R = jnp.isfinite(logits_RxV.max(axis=-1))
        return jnp.where(is_finite_R, drawn_R, model.config.vocabulary_size)

    def step(carry: tuple[Any, jax.Array], place: jax.Array) -> tuple[Any, jax.Array]:
        own, token_R = carry
        hidden_Rx1xD, own = model.apply(
            params, token_R[:, None], own, prompts, method="extend"
        )
        return (own, draw(hidden_Rx1xD, place)), token_R

    hidden_PxCxD, prompts = model.apply(
        params, prompts_PxC, model.init_cache(num_prompts, context), method="extend"
    )
    last_RxSxD = jnp.repeat(hidden_PxCxD[:, -1:], num_rows // num_prompts, axis=0)
    first_R = draw(last_RxSxD, jnp.int32(0))
    # The last token is never read; a cache has room for one at least.
    own = model.init_cache(num_rows, max(num_tokens - 1, 1))
    (_, last_R), tokens_TxR = jax.lax.scan(
        step, (own, first_R), jnp.arange(1, num_tokens)
    )
    tokens_TxR = jnp.concatenate([tokens_TxR, last_R[None]])
    return tokens_TxR.T.reshape(num_prompts, -1, num_tokens)
