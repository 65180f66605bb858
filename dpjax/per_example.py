"""Per-example gradients, formed: the reference that every other way must equal."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from dpjax.calling import Call
from dpjax.clip_factors import Clipping, clip_example, global_norm

PyTree: TypeAlias = Any


class ClippedExample(NamedTuple):
    """One example's contribution (leaves) and what else its pass yields."""

    gradient: PyTree
    value: jax.Array
    norm: jax.Array
    aux: PyTree


class ExampleClipper(NamedTuple):
    """Clips one example's gradient by forming it.

    Attributes:
      call: the call.
      clipping: the clip norms.
      nan_safe: whether NaN and infinite entries become zero before clipping.
      dtype: of the gradient before it is clipped; None for its own.
      pre_clipping_transform: applied to the gradient's pytree before it is clipped.
    """

    call: Call
    clipping: Clipping
    nan_safe: bool
    dtype: Any
    pre_clipping_transform: Callable[[PyTree], PyTree] | None

    def __call__(self, example: Sequence[Any]) -> ClippedExample:
        """Clips the gradient of one example, given as its arrays."""
        (value, aux), gradients = jax.value_and_grad(
            self.call.one_example, has_aux=True
        )(self.call.leaves, example)
        norm = global_norm(gradients)
        tree = jax.tree.unflatten(self.call.parameter_tree, gradients)
        if self.pre_clipping_transform is not None:
            tree = self.pre_clipping_transform(tree)
        leaves, structure = jax.tree.flatten(tree)
        if self.dtype is not None:
            leaves = [leaf.astype(self.dtype) for leaf in leaves]
        clipped = clip_example(
            leaves, self.clipping.groups(tree), self.clipping, nan_safe=self.nan_safe
        )
        return ClippedExample(jax.tree.unflatten(structure, clipped), value, norm, aux)

    def sum(
        self,
        examples: Sequence[jax.Array],
        is_padding: jax.Array,
        vmap: Callable[..., Any],
    ) -> tuple[PyTree, ClippedExample]:
        """Clips a whole batch by `vmap`; returns the sum and everything per example."""
        clipped = vmap(self)(list(examples))

        def masked_sum(gradient: jax.Array) -> jax.Array:
            mask = is_padding.reshape(-1, *[1] * (gradient.ndim - 1))
            return jnp.sum(jnp.where(mask, 0, gradient), axis=0, dtype=gradient.dtype)

        return jax.tree.map(masked_sum, clipped.gradient), clipped

    def add_one_by_one(
        self,
        total: PyTree,
        norms: jax.Array,
        chosen: jax.Array,
        examples: Sequence[jax.Array],
    ) -> tuple[PyTree, jax.Array]:
        """Adds the clipped gradients of the chosen examples, one after another.

        Costs nothing when none is chosen.

        Args:
          total: sum so far.
          norms: per-example norms so far, [B]; those of the chosen are replaced.
          chosen: which examples, bool[B].
          examples: the batch's arrays.
        """
        is_known = not isinstance(chosen, jax.core.Tracer)
        if chosen.shape[0] == 0 or (is_known and not chosen.any()):
            return total, norms

        def add_next(state: tuple[PyTree, jax.Array, jax.Array]) -> Any:
            total, norms, remaining = state
            i = jnp.argmax(remaining)
            clipped = self([array[i] for array in examples])
            total = jax.tree.map(jnp.add, total, clipped.gradient)
            norm = clipped.norm.astype(norms.dtype)
            return total, norms.at[i].set(norm), remaining.at[i].set(False)

        total, norms, _ = jax.lax.while_loop(
            lambda state: jnp.any(state[2]), add_next, (total, norms, chosen)
        )
        return total, norms
