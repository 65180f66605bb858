"""Which method a call goes by, settled from its traced function."""

from typing import Literal, NamedTuple, TypeAlias

import jax.numpy as jnp

from dpjax import planning, tracing
from dpjax.calling import Call
from dpjax.tracing import Traced

Method: TypeAlias = Literal["auto", "bookkeeping", "reweight", "vmap"]


class Settled(NamedTuple):
    """A method, never "auto", and what it works on (nothing, for "vmap")."""

    method: Method
    traced: Traced | None


def settle(
    call: Call,
    method: Method,
    *,
    must_form: bool,
    is_one_group: bool,
    num_examples: int,
    memory_budget_bytes: int | None,
    strict: bool,
) -> Settled:
    """Settles a call's method.

    "auto" is "vmap" where gradients must be formed. It is "reweight", if one weight for
    each example is enough, where the function holds `remat`, which asks for memory
    rather than time, or where book-keeping would hold more than the budget. Else it is
    "bookkeeping", which is the fastest. "reweight" is "bookkeeping" where a weighted
    loss does not weight the gradients exactly (`TappedFunction.scales_with_loss`).

    Args:
      call: the call.
      method: what was asked for.
      must_form: whether only formed gradients will do.
      is_one_group: whether each example has one weight.
      num_examples: how many are processed at once.
      memory_budget_bytes: see `dpjax.clipped_grad`.
      strict: raise ValueError, naming the parameters, if any falls back.
    """
    is_complex = any(jnp.iscomplexobj(leaf) for leaf in call.leaves)
    if method == "auto" and (must_form or is_complex):
        method = "vmap"
    if method == "vmap" and not strict:
        return Settled(method, None)
    budget = None
    if memory_budget_bytes is not None:
        budget = memory_budget_bytes // max(num_examples, 1)
    may_reweight = method == "reweight" or (method == "auto" and is_one_group)
    traced = tracing.trace(call, keep_remat=may_reweight, budget=budget)
    if strict:
        tracing.require_no_fallback(traced, call.paths)
    if method == "vmap":
        return Settled(method, None)
    function = traced.function
    wants_memory = function.has_remat or (
        budget is not None and planning.held_bytes(function, traced.components) > budget
    )
    is_asked = method == "reweight" or (may_reweight and wants_memory)
    if is_asked and function.scales_with_loss:
        return Settled("reweight", traced)
    if function.has_remat:
        traced = tracing.trace(call, budget=budget)
    return Settled("bookkeeping", traced)
