"""The rule that always holds: the equation's own derivative."""

from collections.abc import Sequence
from typing import Any

import jax

from dpjax.taps import Tap


def gradients(tap: Tap, operands: Sequence[Any], cotangents: Sequence[Any]) -> list:
    """Gradients of the parameter operands of any differentiable equation.

    Args:
      tap: the equation, with n parameter operands.
      operands: all operands, for one example; in loops as `Tap.over_steps` takes them.
      cotangents: as in `TapValues`.

    Returns:
      n arrays shaped like those operands.
    """

    def apply(*parameters: Any) -> list[Any]:
        filled = list(operands)
        for i, value in zip(tap.parameter_positions, parameters, strict=True):
            filled[i] = value
        return tap.apply(filled)

    _, pullback = jax.vjp(apply, *(operands[i] for i in tap.parameter_positions))
    return list(pullback(list(cotangents)))
