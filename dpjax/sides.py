"""What a value depends on: nothing, parameters alone, or the example."""

import enum
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import primitives

from dpjax import _compat

WITHOUT_DERIVATIVE = frozenset(
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


def of_results(equation: _compat.Equation, sides: Sequence[Side]) -> list[Side]:
    """The sides of an equation's results, given those of its operands.

    What is computed from parameters without a derivative (integers, booleans,
    `stop_gradient`) is a constant.
    """
    if equation.primitive is primitives.scan_p:
        return _of_scan_results(equation, sides)
    called = _compat.called(equation)
    if called is not None:
        jaxpr, _ = called
        return of_outputs(jaxpr, sides)
    side = max(sides, default=Side.CONSTANT)
    stopped = equation.primitive in WITHOUT_DERIVATIVE
    return [_of_result(v.aval, side, stopped) for v in equation.outvars]


def _of_result(aval: Any, side: Side, stopped: bool) -> Side:
    loose = stopped or not is_floating(aval)
    return Side.CONSTANT if loose and side == Side.PARAMETER else side


def of_values(jaxpr: Any, sides: Sequence[Side]) -> dict[_compat.Var, Side]:
    """The side of every variable of a jaxpr, given those of its inputs."""
    found = dict.fromkeys(jaxpr.constvars, Side.CONSTANT)
    found.update(zip(jaxpr.invars, sides, strict=True))
    for equation in jaxpr.eqns:
        operands = [of_atom(found, atom) for atom in equation.invars]
        results = of_results(equation, operands)
        found.update(zip(equation.outvars, results, strict=True))
    return found


def of_atom(sides: Mapping[_compat.Var, Side], atom: _compat.Atom) -> Side:
    """The side of a variable or literal."""
    return Side.CONSTANT if isinstance(atom, _compat.Literal) else sides[atom]


def of_outputs(jaxpr: Any, sides: Sequence[Side]) -> list[Side]:
    """The sides of a jaxpr's outputs, given those of its inputs."""
    found = of_values(jaxpr, sides)
    return [of_atom(found, atom) for atom in jaxpr.outvars]


def in_scan_body(equation: _compat.Equation, sides: Sequence[Side]) -> list[Side]:
    """The sides of a scan body's inputs, given those of the scan's operands.

    What is carried has the side of its first value or of what a step makes of it,
    whichever is larger.
    """
    num_consts = equation.params["num_consts"]
    num_carry = equation.params["num_carry"]
    body = equation.params["jaxpr"].jaxpr
    sides = list(sides)
    while True:
        outputs = of_outputs(body, sides)
        carried = range(num_consts, num_consts + num_carry)
        joined = [max(sides[i], outputs[i - num_consts]) for i in carried]
        if joined == sides[num_consts : num_consts + num_carry]:
            return sides
        sides[num_consts : num_consts + num_carry] = joined


def _of_scan_results(equation: _compat.Equation, sides: Sequence[Side]) -> list[Side]:
    inside = in_scan_body(equation, sides)
    num_consts = equation.params["num_consts"]
    num_carry = equation.params["num_carry"]
    outputs = of_outputs(equation.params["jaxpr"].jaxpr, inside)
    return [*inside[num_consts : num_consts + num_carry], *outputs[num_carry:]]
