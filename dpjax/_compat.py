"""The few things about jaxprs that differ, or may differ, between JAX releases.

Everything here rests on `jax.extend.core` and on what a jaxpr equation carries itself.
Supported: JAX 0.10 to 0.12.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
from jax.extend import core
from jax.extend.core import primitives

from dpjax.precision import wide_dtype

ClosedJaxpr: TypeAlias = Any
Equation: TypeAlias = Any
Atom: TypeAlias = Any
Var = core.Var
Literal = core.Literal

_CALLS = {
    primitives.jit_p: "jaxpr",
    primitives.remat_p: "jaxpr",
    primitives.closed_call_p: "call_jaxpr",
}


_EXACT = (jax.lax.Precision.HIGHEST, jax.lax.Precision.HIGHEST)


def evaluate(equation: Equation, operands: Sequence[Any]) -> list[Any]:
    """Applies one equation to values, under whatever transformations are in force.

    The equation's own primitive is bound, so `custom_jvp` and `custom_vjp` functions
    keep their rules.
    """
    return _bind(equation, operands, equation.params)


def evaluate_wide(equation: Equation, operands: Sequence[Any]) -> list[Any]:
    """As `evaluate`, for operands that are wider than the equation was traced for.

    A product prefers no narrower dtype than float32 either, and rounds no factor.
    """
    parameters = dict(equation.params)
    preferred = parameters.get("preferred_element_type")
    if preferred is not None:
        wide = wide_dtype(preferred)
        parameters["preferred_element_type"] = wide
    if "precision" in parameters:
        parameters["precision"] = _EXACT
    return _bind(equation, operands, parameters)


def _bind(equation: Equation, operands: Sequence[Any], parameters: Any) -> list[Any]:
    parameters = equation.primitive.get_bind_params(parameters)
    with equation.ctx.manager:
        result = equation.primitive.bind(*operands, **parameters)
    return list(result) if equation.primitive.multiple_results else [result]


def varying_axes(array: Any) -> frozenset[Any]:
    """The `jax.shard_map` axes over which an array is known to differ."""
    manual = getattr(jax.typeof(array), "manual_axis_type", None)
    return getattr(manual, "varying", frozenset())


def called(equation: Equation) -> tuple[Any, Sequence[Any]] | None:
    """The jaxpr and constants that a plain call runs, or None for other equations."""
    name = _CALLS.get(equation.primitive)
    return None if name is None else _opened(equation.params[name])


def rounds_factors(equation: Equation) -> bool:
    """Whether an equation may be a product of float32 values rounded to less.

    GPUs and TPUs do that by default (to TensorFloat-32 and to bfloat16).
    """
    precision = equation.params.get("precision", _EXACT)
    if precision in (_EXACT, jax.lax.Precision.HIGHEST):
        return False
    is_hint = precision is None or isinstance(precision, tuple | jax.lax.Precision)
    return jax.default_backend() != "cpu" or not is_hint


class Scan(NamedTuple):
    """A `scan` equation, taken apart.

    Attributes:
      jaxpr: one step: constants, what is carried, scanned entries -> what is carried
        on, and outputs.
      consts: the values of the jaxpr's own constants.
      num_consts: how many operands all steps share; they come first.
      num_carry: how many are carried; they come next, and first among the results.
    """

    jaxpr: Any
    consts: Sequence[Any]
    num_consts: int
    num_carry: int

    @property
    def end_of_carry(self) -> int:
        """The index of the first scanned operand."""
        return self.num_consts + self.num_carry

    @property
    def carried(self) -> slice:
        """The carried operands."""
        return slice(self.num_consts, self.end_of_carry)


def as_scan(equation: Equation) -> Scan | None:
    """The parts of a `scan` of at least one step, or None for other equations.

    What is scanned or stacked has one more axis outside than in a step; the names under
    which an equation keeps these counts differ between releases.
    """
    if equation.primitive is not primitives.scan_p or not equation.params["length"]:
        return None
    jaxpr, consts = _opened(equation.params["jaxpr"])

    def is_same(outside: Atom, inside: Atom) -> bool:
        return outside.aval.ndim == inside.aval.ndim

    num_unscanned = sum(map(is_same, equation.invars, jaxpr.invars))
    num_carry = sum(map(is_same, equation.outvars, jaxpr.outvars))
    return Scan(jaxpr, consts, num_unscanned - num_carry, num_carry)


def scan_options(equation: Equation) -> dict[str, Any]:
    """The arguments of `jax.lax.scan` that an equation of it was made with."""
    return {name: equation.params[name] for name in ("length", "reverse", "unroll")}


def _opened(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """A jaxpr, perhaps closed, and the values of its constants."""
    return getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())


def remat_options(equation: Equation) -> dict[str, Any]:
    """The arguments of `jax.checkpoint` that an equation of it was made with."""
    return {name: equation.params[name] for name in ("prevent_cse", "policy")}


def all_equations(jaxpr: Any) -> Iterator[Equation]:
    """The equations of a jaxpr and of all jaxprs inside it."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in core.jaxprs_in_params(equation.params):
            yield from all_equations(inner)
