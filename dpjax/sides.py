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
    scan = _compat.as_scan(equation)
    if scan is not None:
        inside = in_scan_body(scan, sides)
        stacked = of_outputs(scan.jaxpr, inside)[scan.num_carry :]
        return [*inside[scan.carried], *stacked]
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


def in_scan_body(scan: _compat.Scan, sides: Sequence[Side]) -> list[Side]:
    """The sides of a scan body's inputs, given those of the scan's operands.

    What is carried has the side of its first value or of what a step makes of it,
    whichever is larger.
    """
    sides = list(sides)
    while True:
        after = of_outputs(scan.jaxpr, sides)[: scan.num_carry]
        before = sides[scan.carried]
        joined = list(map(max, before, after))
        if joined == before:
            return sides
        sides[scan.carried] = joined
