"""From one call's arguments to a tapped function and a plan."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dpjax import normal_form, planning
from dpjax.calling import Call
from dpjax.planning import Component, Rule
from dpjax.tapped_function import TappedFunction


@dataclasses.dataclass(frozen=True)
class Traced:
    """A call's function of one example, traced and planned.

    Attributes:
      function: takes an anchor (a zero of shape [B]) before the example's arrays.
      components: the plan.
      aux_tree: the tree of the outputs behind the loss.
    """

    function: TappedFunction
    components: list[Component]
    aux_tree: Any


def trace(call: Call, *, keep_remat: bool = False, budget: int | None = None) -> Traced:
    """Traces the loss of one example and plans every parameter's norm.

    The loss gets a zero from the example side added to it, the anchor, so that a loss
    that depends on parameters alone (a regulariser) still meets data somewhere.

    Args:
      call: the call.
      keep_remat: leave `remat` in place, see `dpjax.normal_form`.
      budget: see `dpjax.planning.plan`.
    """
    aux_tree = None

    def flat(*arrays: Any) -> list[Any]:
        nonlocal aux_tree
        count = len(call.leaves)
        leaves, anchor, example = arrays[:count], arrays[count], arrays[count + 1 :]
        loss, aux = call.one_example(leaves, example)
        aux_leaves, aux_tree = jax.tree.flatten(aux)
        return [loss + anchor.astype(loss.dtype), *map(jnp.asarray, aux_leaves)]

    specs = call.specs()
    count = len(call.leaves)
    specs.insert(count, jax.ShapeDtypeStruct((), jnp.float32))
    jaxpr = normal_form.trace(flat, specs, count, keep_remat=keep_remat)
    function = TappedFunction(jaxpr, count)
    return Traced(function, planning.plan(function, budget), aux_tree)


def require_no_fallback(traced: Traced, paths: Sequence[str]) -> None:
    """Raises ValueError naming the parameters that need per-example gradients."""
    found = [c for c in traced.components if c.rule is Rule.FALLBACK]
    if not found:
        return
    described = "; ".join(
        f"{', '.join(paths[i] for i in component.leaves)} "
        f"(in {operations(traced.function, component)})"
        for component in found
    )
    raise ValueError(
        f"strict=True, but these parameters need per-example gradients: {described}; "
        "change how they are used, or accept the cost with strict=False"
    )


def operations(function: TappedFunction, component: Component) -> str:
    """The operations in which a component's parameters meet data."""
    names = [function.taps[use.tap].equation.primitive.name for use in component.uses]
    counted = {name: names.count(name) for name in names}
    return ", ".join(
        name if count == 1 else f"{name} x{count}" for name, count in counted.items()
    )
