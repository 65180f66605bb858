"""Reweight: the gradient of a weighted sum of losses, by a second backward pass.

Lee & Kifer 2021, algorithm ReweightGP: with weights s_i held constant, the gradient of
sum_i s_i loss_i is sum_i s_i g_i. Unlike book-keeping it keeps no cotangents.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dpjax.calling import Call


def weighted_sum(
    call: Call,
    examples: Sequence[jax.Array],
    weights_B: jax.Array,
    vmap: Callable[..., Any],
) -> list[jax.Array]:
    """Sum of weighted per-example gradients, for each parameter leaf.

    An example of weight zero contributes nothing, whatever it holds: a zero times the
    NaN of its backward pass would be NaN, so such rows are replaced by a row of
    non-zero weight, whose gradient is finite.

    Args:
      call: the call.
      examples: the batch's arrays.
      weights_B: one weight for each example.
      vmap: `jax.vmap`, perhaps with a mesh axis for the batch.
    """
    if weights_B.shape[0] == 0:
        return [jnp.zeros_like(leaf) for leaf in call.leaves]
    counts = weights_B != 0
    rows = jnp.where(counts, jnp.arange(counts.shape[0]), jnp.argmax(counts))
    examples = [array[rows] for array in examples]

    def losses(leaves: list[jax.Array]) -> jax.Array:
        return vmap(lambda example: call.one_example(leaves, example)[0])(examples)

    values_B, pullback = jax.vjp(losses, call.leaves)
    (gradients,) = pullback(_rounded_down(weights_B, values_B.dtype))
    return [jnp.where(jnp.any(counts), g, jnp.zeros_like(g)) for g in gradients]


def _rounded_down(weights: jax.Array, dtype: Any) -> jax.Array:
    """Non-negative weights in another dtype, never larger than they were."""
    rounded = weights.astype(dtype)
    exceeds = rounded.astype(weights.dtype) > weights
    return jnp.where(exceeds, jnp.nextafter(rounded, jnp.zeros_like(rounded)), rounded)
