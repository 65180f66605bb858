"""The dataflow interpreter: where parameters meet data.

A function of ONE example is traced to a jaxpr and every value in it is sorted into
constant, parameter-side (computed from parameters and constants only) and data-side.
An equation that takes a parameter-side and a data-side operand is a *tap*. A parameter
reaches the loss through taps alone, so per-example gradients are fully described by
what meets at each tap: its data-side operands (the *activations*) and the derivative of
the loss with respect to its outputs (the *cotangents*). Both come from one forward and
one backward pass in which no parameter gradient is formed:

    loss      = f(..., tap(parameter_operand, activation) + perturbation, ...)
    cotangent = d loss / d perturbation   at perturbation = 0

The equations are evaluated as they stand, so whatever derivative rules they carry
(custom_jvp, custom_vjp) keep applying. For one example only: `jax.vmap` does the batch.
"""

import dataclasses
import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend.core import primitives

from dpjax import _compat
from dpjax.precision import is_narrow, widened

Values: TypeAlias = Mapping[_compat.Var, Any]

_WITHOUT_DERIVATIVE = frozenset(
    {
        primitives.ceil_p,
        primitives.floor_p,
        primitives.round_p,
        primitives.sign_p,
        primitives.stop_gradient_p,
    }
)


class Side(enum.IntEnum):
    """What a value depends on; an equation's result takes the largest of its inputs."""

    CONSTANT = 0
    PARAMETER = 1
    DATA = 2


def is_floating(aval: Any) -> bool:
    """Whether derivatives flow through a value (floating point or complex)."""
    return jnp.issubdtype(aval.dtype, jnp.inexact)


@dataclasses.dataclass(frozen=True)
class Tap:
    """An equation in which parameter-side values meet data.

    Attributes:
      equation: the jaxpr equation.
      parameter_positions: which of its operands are parameter-side.
      data_positions: which of its operands are data-side; the rest are constants.
      output_positions: which of its outputs carry derivatives.
    """

    equation: _compat.Equation
    parameter_positions: tuple[int, ...]
    data_positions: tuple[int, ...]
    output_positions: tuple[int, ...]

    def outputs(self) -> list[Any]:
        """The avals of the outputs that carry derivatives."""
        return [self.equation.outvars[i].aval for i in self.output_positions]

    def apply(self, operands: Sequence[Any]) -> list[Any]:
        """The differentiable outputs for one example's operands."""
        results = _compat.evaluate(self.equation, operands)
        return [results[i] for i in self.output_positions]

    def apply_wide(self, operands: Sequence[Any]) -> list[Any]:
        """As `apply`, but with floating point operands and outputs widened."""
        results = _compat.evaluate_wide(self.equation, list(map(widened, operands)))
        return [results[i] for i in self.output_positions]


class TapValues(NamedTuple):
    """What meets at one tap, for one example (or, under `vmap`, for a batch).

    Attributes:
      activations: the tap's data-side operands, in the order of `data_positions`.
      cotangents: derivatives of the loss by the outputs, as in `output_positions`.
    """

    activations: Sequence[Any]
    cotangents: Sequence[Any]


class TappedFunction:
    """A single-example function with its taps found.

    Args:
      jaxpr: closed jaxpr without plain calls. Inputs: the parameter leaves, then the
        arrays that make one example. First output: the loss, a floating point scalar
        that depends on the example.
      num_leaves: how many inputs are parameters.

    Attributes:
      leaves: the jaxpr's variables for the parameter leaves.
      taps: the taps, in the order of evaluation.
      unbatched_equations: the equations that do not depend on the example.
      scales_with_loss: whether weighting the loss weights all gradients: there is no
        `custom_vjp` rule, which need not be linear, and nothing narrower than float32,
        in which a weight is rounded to a larger one.
    """

    def __init__(self, jaxpr: _compat.ClosedJaxpr, num_leaves: int):
        inner = jaxpr.jaxpr
        self._constants = dict(zip(inner.constvars, jaxpr.consts, strict=True))
        self._outputs = list(inner.outvars)
        self.leaves = list(inner.invars[:num_leaves])
        self._example_inputs = list(inner.invars[num_leaves:])
        self._side: dict[_compat.Var, Side] = {}
        self.unbatched_equations: list[_compat.Equation] = []
        self._batched: list[_compat.Equation] = []
        self._tap_index: dict[int, int] = {}
        self.taps: list[Tap] = []
        self._sort_values(inner.eqns)
        bending = (primitives.custom_vjp_call_p, primitives.reduce_precision_p)
        self.scales_with_loss = not any(
            equation.primitive in bending
            or any(is_narrow(variable.aval) for variable in equation.outvars)
            for equation in _compat.all_equations(inner)
        )

    def _sort_values(self, equations: Iterable[_compat.Equation]) -> None:
        self._side.update(dict.fromkeys(self._constants, Side.CONSTANT))
        self._side.update(dict.fromkeys(self.leaves, Side.PARAMETER))
        self._side.update(dict.fromkeys(self._example_inputs, Side.DATA))
        for equation in equations:
            sides = [self.side(atom) for atom in equation.invars]
            side = max(sides, default=Side.CONSTANT)
            stopped = equation.primitive in _WITHOUT_DERIVATIVE
            for variable in equation.outvars:
                # Integers and booleans computed from parameters carry no derivative.
                loose = stopped or not is_floating(variable.aval)
                is_constant = loose and side == Side.PARAMETER
                self._side[variable] = Side.CONSTANT if is_constant else side
            if side != Side.DATA:
                self.unbatched_equations.append(equation)
                continue
            self._batched.append(equation)
            self._add_tap(equation, sides)

    def _add_tap(self, equation: _compat.Equation, sides: Sequence[Side]) -> None:
        tap = Tap(
            equation,
            tuple(i for i, side in enumerate(sides) if side == Side.PARAMETER),
            tuple(i for i, side in enumerate(sides) if side == Side.DATA),
            tuple(i for i, v in enumerate(equation.outvars) if is_floating(v.aval)),
        )
        if tap.parameter_positions and tap.output_positions:
            self._tap_index[id(equation)] = len(self.taps)
            self.taps.append(tap)

    def side(self, atom: _compat.Atom) -> Side:
        """What a variable or literal of the jaxpr depends on."""
        if isinstance(atom, _compat.Literal):
            return Side.CONSTANT
        return self._side[atom]

    def unbatched_values(self, leaves: Sequence[Any]) -> Values:
        """Evaluates everything that does not depend on the example."""
        values = dict(self._constants)
        values.update(zip(self.leaves, leaves, strict=True))
        for equation in self.unbatched_equations:
            results = _compat.evaluate(equation, _read_all(values, equation.invars))
            values.update(zip(equation.outvars, results, strict=True))
        return values

    def operands(
        self, tap: Tap, values: Values, activations: Sequence[Any]
    ) -> list[Any]:
        """All operands of a tap for one example, in the equation's order."""
        found = dict(zip(tap.data_positions, activations, strict=True))
        return [
            found[i] if i in found else read(values, atom)
            for i, atom in enumerate(tap.equation.invars)
        ]

    def run(
        self, values: Values, example: Sequence[Any]
    ) -> tuple[list[Any], list[TapValues]]:
        """One example's outputs, and what meets at each tap.

        Args:
          values: from `unbatched_values`.
          example: the example's inputs.

        Returns:
          The outputs (loss first) and one `TapValues` for each of `self.taps`.
        """

        def perturbed(perturbations: list[list[Any]]) -> tuple[Any, Any]:
            outputs, activations = self._forward(values, example, perturbations)
            return outputs[0], (outputs, activations)

        zeros = [
            [jnp.zeros(out.shape, out.dtype) for out in tap.outputs()]
            for tap in self.taps
        ]
        loss, pullback, (outputs, activations) = jax.vjp(perturbed, zeros, has_aux=True)
        (cotangents,) = pullback(jnp.ones_like(loss))
        return outputs, list(map(TapValues, activations, cotangents))

    def _forward(
        self,
        unbatched: Values,
        example: Sequence[Any],
        perturbations: Sequence[Sequence[Any]],
    ) -> tuple[list[Any], list[list[Any]]]:
        values = dict(unbatched)
        values.update(zip(self._example_inputs, example, strict=True))
        activations: list[list[Any]] = []
        for equation in self._batched:
            operands = _read_all(values, equation.invars)
            results = _compat.evaluate(equation, operands)
            index = self._tap_index.get(id(equation))
            if index is not None:
                tap = self.taps[index]
                activations.append([operands[i] for i in tap.data_positions])
                for i, zero in zip(
                    tap.output_positions, perturbations[index], strict=True
                ):
                    results[i] = results[i] + zero
            values.update(zip(equation.outvars, results, strict=True))
        return _read_all(values, self._outputs), activations

    def parameter_side(
        self, variables: Sequence[_compat.Var]
    ) -> tuple[list[int], list[_compat.Equation]]:
        """The leaves that some parameter-side variables come from, and the way there.

        Returns:
          Indices into `self.leaves`, and the equations on the way, in order.
        """
        wanted = set(variables)
        equations = []
        for equation in reversed(self.unbatched_equations):
            if wanted.isdisjoint(equation.outvars):
                continue
            equations.append(equation)
            wanted.update(
                atom for atom in equation.invars if self.side(atom) == Side.PARAMETER
            )
        leaves = [i for i, leaf in enumerate(self.leaves) if leaf in wanted]
        return leaves, equations[::-1]

    def parameter_function(
        self, variables: Sequence[_compat.Var], values: Values, *, casts: bool = True
    ) -> Callable[[Sequence[Any]], list[Any]]:
        """The differentiable map from the leaves of `parameter_side` to `variables`.

        Args:
          variables: parameter-side values.
          values: from `unbatched_values`.
          casts: whether changes of dtype on the way are made or left out.
        """
        leaves, equations = self.parameter_side(variables)

        def function(leaf_values: Sequence[Any]) -> list[Any]:
            local = dict(values)
            local.update(
                zip((self.leaves[i] for i in leaves), leaf_values, strict=True)
            )
            for equation in equations:
                results = _read_all(local, equation.invars)
                if casts or equation.primitive is not primitives.convert_element_type_p:
                    results = _compat.evaluate(equation, results)
                local.update(zip(equation.outvars, results, strict=True))
            return _read_all(local, variables)

        return function


def read(values: Values, atom: _compat.Atom) -> Any:
    """The value of a variable or literal."""
    return atom.val if isinstance(atom, _compat.Literal) else values[atom]


def _read_all(values: Values, atoms: Iterable[_compat.Atom]) -> list[Any]:
    return [read(values, atom) for atom in atoms]
