"""The few things about jaxprs that differ, or may differ, between JAX releases.

Everything here rests on `jax.extend.core` and on what a jaxpr equation carries itself.
Supported: JAX 0.10 to 0.12.
"""

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

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


def evaluate(equation: Equation, operands: Sequence[Any]) -> list[Any]:
    """Applies one equation to values, under whatever transformations are in force.

    The equation's own primitive is bound, so `custom_jvp` and `custom_vjp` functions
    keep their rules.
    """
    return _bind(equation, operands, equation.params)


def evaluate_wide(equation: Equation, operands: Sequence[Any]) -> list[Any]:
    """As `evaluate`, for operands that are wider than the equation was traced for.

    A product prefers no narrower dtype than float32 either.
    """
    parameters = dict(equation.params)
    preferred = parameters.get("preferred_element_type")
    if preferred is not None:
        wide = wide_dtype(preferred)
        parameters["preferred_element_type"] = wide
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
    if name is None:
        return None
    inner = equation.params[name]
    return getattr(inner, "jaxpr", inner), getattr(inner, "consts", ())


def all_equations(jaxpr: Any) -> Iterator[Equation]:
    """The equations of a jaxpr and of all jaxprs inside it."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in core.jaxprs_in_params(equation.params):
            yield from all_equations(inner)
