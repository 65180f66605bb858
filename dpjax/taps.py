"""What a tap is: an equation in which a parameter meets data.

See `dpjax.tapped_function` for the whole idea.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax

from dpjax import _compat
from dpjax.precision import widened

Values: TypeAlias = Mapping[_compat.Var, Any]


class Operand(NamedTuple):
    """A tap's operand that does not depend on the example.

    Attributes:
      variable: the value, in front of all loops.
      scanned: for each loop around the tap, outermost first, whether each step has its
        own entry (along a leading axis of the value) or all share it.
    """

    variable: _compat.Atom
    scanned: tuple[bool, ...]


@dataclasses.dataclass(frozen=True)
class Tap:
    """An equation in which parameter-side values meet data.

    Attributes:
      equation: the jaxpr equation.
      loops: the number of steps of each loop around it, outermost first.
      operands: by position, the operands that do not depend on the example.
      parameter_positions: which of those are parameter-side.
      data_positions: the other operands' positions.
      output_positions: which of its outputs carry derivatives.
    """

    equation: _compat.Equation
    loops: tuple[int, ...]
    operands: Mapping[int, Operand]
    parameter_positions: tuple[int, ...]
    data_positions: tuple[int, ...]
    output_positions: tuple[int, ...]

    def outputs(self) -> list[Any]:
        """The avals, for one step, of the outputs that carry derivatives."""
        return [self.equation.outvars[i].aval for i in self.output_positions]

    def apply(self, operands: Sequence[Any]) -> list[Any]:
        """The differentiable outputs for one example's operands, for all steps."""
        return self.over_steps(self._apply_once, operands)

    def apply_wide(self, operands: Sequence[Any]) -> list[Any]:
        """As `apply`, but with floating point operands and outputs widened."""
        return self.over_steps(self._apply_wide_once, operands)

    def over_steps(
        self, function: Callable[..., Any], operands: Sequence[Any], *others: Any
    ) -> Any:
        """Maps a function of one step's operands, and of others, over all steps.

        Args:
          function: takes a list of operands and the others.
          operands: all operands; those in `self.operands` as these say, the rest with a
            leading axis for each loop.
          *others: arrays with a leading axis for each loop.
        """
        for loop in reversed(range(len(self.loops))):
            axes = [
                None if i in self.operands and not self.operands[i].scanned[loop] else 0
                for i in range(len(operands))
            ]
            function = jax.vmap(function, in_axes=(axes, *[0] * len(others)))
        return function(list(operands), *others)

    def _apply_once(self, operands: Sequence[Any]) -> list[Any]:
        results = _compat.evaluate(self.equation, operands)
        return [results[i] for i in self.output_positions]

    def _apply_wide_once(self, operands: Sequence[Any]) -> list[Any]:
        results = _compat.evaluate_wide(self.equation, list(map(widened, operands)))
        return [results[i] for i in self.output_positions]


class TapValues(NamedTuple):
    """What meets at one tap, for one example (or, under `vmap`, for a batch).

    Attributes:
      activations: the tap's data-side operands, in the order of `data_positions`.
      cotangents: derivatives of the loss by the outputs, as in `output_positions`.
      Each with a leading axis for each loop around the tap.
    """

    activations: Sequence[Any]
    cotangents: Sequence[Any]


def read(values: Values, atom: _compat.Atom) -> Any:
    """The value of a variable or literal."""
    return atom.val if isinstance(atom, _compat.Literal) else values[atom]


def read_all(values: Values, atoms: Iterable[_compat.Atom]) -> list[Any]:
    return [read(values, atom) for atom in atoms]
