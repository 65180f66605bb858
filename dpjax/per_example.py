"""Per-example gradients, formed: the reference that every other way must equal."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from dpjax.calling import Call
from dpjax.clip_factors import global_norm

PyTree: TypeAlias = Any


class ClippedBatch(NamedTuple):
    """What clipping a batch by its formed gradients yields.

    Attributes:
      total: the sum, a pytree like the (transformed) gradient.
      values: losses, of shape [B].
      norms: gradient norms before clipping, float[B].
      aux: what the function returned beside the loss, with a leading batch axis.
    """

    total: PyTree
    values: jax.Array
    norms: jax.Array
    aux: PyTree


def clipped_sum(
    call: Call,
    examples: Sequence[jax.Array],
    is_padding: jax.Array,
    clip: Callable[[PyTree], PyTree],
    vmap: Callable[..., Any],
) -> ClippedBatch:
    """Forms and clips every example's gradient at once, and sums.

    An example whose gradient is not finite is taken again by itself: batched
    convolutions multiply what belongs to other examples by zero, so that one NaN
    becomes everybody's.

    Args:
      call: the call.
      examples: the batch's arrays.
      is_padding: examples to leave out, bool[B].
      clip: from one example's gradient pytree to what it contributes.
      vmap: `jax.vmap`, perhaps with a mesh axis for the batch.
    """

    def one(example: Sequence[Any]) -> Any:
        (value, aux), gradients = _value_and_gradient(call, example)
        tree = jax.tree.unflatten(call.parameter_tree, gradients)
        return clip(tree), value, global_norm(gradients), aux

    def masked_sum(gradients: jax.Array) -> jax.Array:
        mask = left_out.reshape(-1, *[1] * (gradients.ndim - 1))
        kept = jnp.where(mask, jnp.zeros((), gradients.dtype), gradients)
        return jnp.sum(kept, axis=0, dtype=gradients.dtype)

    clipped, values, norms, aux = vmap(one)(list(examples))
    is_poisoned = ~jnp.isfinite(norms) & ~is_padding
    left_out = is_padding | is_poisoned
    added = add_one_by_one(
        ExactlyAdded(jax.tree.map(masked_sum, clipped), norms),
        is_poisoned,
        lambda index: jax.tree.unflatten(
            call.parameter_tree, gradient(call, examples, index)
        ),
        clip,
    )
    return ClippedBatch(added.total, values, added.norms, aux)


def gradient(
    call: Call, examples: Sequence[jax.Array], index: jax.Array
) -> list[jax.Array]:
    """One example's gradient, leaf by leaf."""
    return _value_and_gradient(call, [array[index] for array in examples])[1]


def _value_and_gradient(call: Call, example: Sequence[Any]) -> Any:
    return jax.value_and_grad(call.one_example, has_aux=True)(call.leaves, example)


class ExactlyAdded(NamedTuple):
    """A sum and the norms behind it, after some examples were added one by one."""

    total: PyTree
    norms: jax.Array


def add_one_by_one(
    before: ExactlyAdded,
    chosen: jax.Array,
    gradient: Callable[[jax.Array], PyTree],
    clip: Callable[[PyTree], PyTree],
) -> ExactlyAdded:
    """Forms, clips and adds the gradients of the chosen examples, in turn.

    Takes no time when none is chosen.

    Args:
      before: the sum so far, and all norms; those of the chosen are replaced.
      chosen: which examples, bool[B].
      gradient: from an example's index to its gradient pytree.
      clip: from that to what it contributes.
    """
    is_known = not isinstance(chosen, jax.core.Tracer)
    if chosen.shape[0] == 0 or (is_known and not chosen.any()):
        return before

    def add_next(state: tuple[ExactlyAdded, jax.Array]) -> Any:
        (total, norms), remaining = state
        i = jnp.argmax(remaining)
        tree = gradient(i)
        total = jax.tree.map(lambda x, y: x + y.astype(x.dtype), total, clip(tree))
        norm = global_norm(jax.tree.leaves(tree)).astype(norms.dtype)
        return ExactlyAdded(total, norms.at[i].set(norm)), remaining.at[i].set(False)

    after, _ = jax.lax.while_loop(
        lambda state: jnp.any(state[1]), add_next, (before, chosen)
    )
    return after
