"""One forward and one backward pass of a batch, and what they leave behind."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dpjax.local_norms import LocalNorms
from dpjax.outer_products import SquaredNorm
from dpjax.planning import Use
from dpjax.precision import is_narrow
from dpjax.tapped_function import TappedFunction
from dpjax.taps import TapValues, Values

Vmap = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Records:
    """Everything that the two passes left behind, for a batch.

    Attributes:
      function: the tapped function.
      values: its unbatched values.
      outputs: its outputs, with a leading batch axis.
      taps: what met at each tap, with a leading batch axis; None where only norms are
        left.
      local: the squared norms left by such taps, or None.
      weighted_gradients: from weights of shape [B] to the gradients, by the chosen
        leaves, of the weighted sum of losses: a second backward pass.
      vmap: `jax.vmap`, perhaps with a mesh axis for the batch.
    """

    function: TappedFunction
    values: Values
    outputs: Sequence[Any]
    taps: Sequence[TapValues | None]
    local: SquaredNorm | None
    weighted_gradients: Callable[[jax.Array], list[jax.Array]]
    vmap: Vmap

    def met(self, use: Use) -> TapValues:
        """What met where a parameter is used."""
        values = self.taps[use.tap]
        assert values is not None
        return values

    def operands(self, use: Use, activations: Sequence[Any]) -> list[Any]:
        """One example's operands of the tap at which a parameter is used."""
        tap = self.function.taps[use.tap]
        return self.function.operands(tap, self.values, activations)


def record(
    function: TappedFunction,
    leaves: Sequence[Any],
    examples: Sequence[Any],
    vmap: Vmap,
    local: LocalNorms | None = None,
    chosen: Sequence[int] = (),
) -> Records:
    """Runs a tapped function on a batch, forward and backward.

    Args:
      function: the tapped function.
      leaves: parameter leaves.
      examples: its other inputs, each with a leading batch axis.
      vmap: `jax.vmap`, perhaps with a mesh axis for the batch.
      local: norms to compute on the way back.
      chosen: the leaves of `Records.weighted_gradients`.
    """
    at_taps = local.at_taps if local else {}
    batch_size = examples[0].shape[0]
    zeros = function.zeros(at_taps), local.zeros() if local else None
    zeros_B = jax.tree.map(lambda x: jnp.zeros((batch_size, *x.shape), x.dtype), zeros)

    def losses(parameters: list[Any], zeros_B: Any) -> Any:
        filled = list(leaves)
        for i, parameter in zip(chosen, parameters, strict=True):
            filled[i] = parameter
        values = function.unbatched_values(filled)

        def one(example: list[Any], zeros: Any) -> Any:
            outputs, records = function.run(
                values, example, zeros[0], at_taps, zeros[1]
            )
            return outputs[0], (outputs, records)

        losses_B, left = vmap(one)(list(examples), zeros_B)
        return losses_B, left

    parameters = [leaves[i] for i in chosen]
    losses_B, pullback, (outputs, records) = jax.vjp(
        losses, parameters, zeros_B, has_aux=True
    )
    _, (cotangents, numbers) = pullback(jnp.ones_like(losses_B))
    records, cotangents = _pinned((records, cotangents))
    return Records(
        function,
        function.unbatched_values(leaves),
        outputs,
        function.tap_values(records, cotangents, at_taps),
        None if numbers is None else SquaredNorm(numbers[:, 0], numbers[:, 1]),
        lambda weights_B: pullback(weights_B.astype(losses_B.dtype))[0],
        vmap,
    )


def _pinned(values: Any) -> Any:
    """The values, with narrow floating point ones rounded once and for all.

    XLA may leave out the rounding of a value narrower than float32 where it is read in
    the computation that makes it: a norm and a sum could then see different values.
    """
    leaves, tree = jax.tree.flatten(values)
    narrow = [i for i, leaf in enumerate(leaves) if is_narrow(leaf)]
    if narrow:
        pinned = jax.lax.optimization_barrier([leaves[i] for i in narrow])
        for i, leaf in zip(narrow, pinned, strict=True):
            leaves[i] = leaf
    return jax.tree.unflatten(tree, leaves)
