"""The dataflow interpreter: where parameters meet data.

A function of ONE example is traced to a jaxpr (`dpjax.normal_form`) and every value in
it is sorted into constant, parameter-side (computed from parameters and constants only)
and data-side. An equation that takes a parameter-side and a data-side operand is a
*tap*. A parameter reaches the loss through taps alone, so per-example gradients are
fully described by what meets at each tap: its data-side operands (the *activations*)
and the derivative of the loss with respect to its outputs (the *cotangents*). Both come
from one forward and one backward pass in which no parameter gradient is formed:

    loss      = f(..., tap(parameter_operand, activation) + perturbation, ...)
    cotangent = d loss / d perturbation   at perturbation = 0

A tap inside a loop meets data once for each step: its activations and cotangents are
stacked over the steps, and its parameter operand is either one that all steps share or
one that has an entry for each.

The equations are evaluated as they stand, so whatever derivative rules they carry
(custom_jvp, custom_vjp) keep applying. For one example only: `jax.vmap` does the batch.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import primitives

from dpjax import _compat, blocks, sides
from dpjax.blocks import Block, LocalNorm, Run
from dpjax.precision import is_narrow, widened
from dpjax.sides import Side
from dpjax.taps import Operand, Tap, TapValues, Values, read, read_all


class TappedFunction:
    """A single-example function with its taps found.

    Args:
      jaxpr: closed jaxpr in normal form. Inputs: the parameter leaves, then the arrays
        that make one example. First output: the loss, a floating point scalar that
        depends on the example.
      num_leaves: how many inputs are parameters.

    Attributes:
      leaves: the jaxpr's variables for the parameter leaves.
      taps: the taps, in the order of evaluation.
      unbatched_equations: the equations that do not depend on the example.
      has_remat: whether parameters meet data inside a `remat` that was kept.
      scales_with_loss: whether weighting the loss weights all gradients: there is no
        `custom_vjp` rule, which need not be linear, and nothing narrower than float32,
        in which a weight is rounded to a larger one, be it a factor inside a product.
    """

    def __init__(self, jaxpr: _compat.ClosedJaxpr, num_leaves: int):
        inner = jaxpr.jaxpr
        self._constants = dict(zip(inner.constvars, jaxpr.consts, strict=True))
        self._outputs = list(inner.outvars)
        self.leaves = list(inner.invars[:num_leaves])
        self._example_inputs = list(inner.invars[num_leaves:])
        kinds = [Side.PARAMETER] * num_leaves
        kinds += [Side.DATA] * len(self._example_inputs)
        self._side = sides.of_values(inner, kinds)
        self.unbatched_equations = [
            equation
            for equation in inner.eqns
            if all(self.side(v) != Side.DATA for v in equation.outvars)
        ]
        registry = blocks.Registry()
        unbatched = {
            variable: Operand(variable, ())
            for variable, side in self._side.items()
            if side != Side.DATA
        }
        loss = inner.outvars[:1]
        self._block = Block(registry, inner, loss, self._side, unbatched, ())
        self.taps = registry.taps
        self.has_remat = registry.has_remat
        self._recorded = registry.recorded
        self._perturbations = registry.perturbations
        bending = (primitives.custom_vjp_call_p, primitives.reduce_precision_p)
        self.scales_with_loss = not any(
            equation.primitive in bending
            or _compat.rounds_factors(equation)
            or any(is_narrow(variable.aval) for variable in equation.outvars)
            for equation in _compat.all_equations(inner)
        )

    def side(self, atom: _compat.Atom) -> Side:
        """What a variable or literal of the jaxpr depends on."""
        return sides.of_atom(self._side, atom)

    def unbatched_values(self, leaves: Sequence[Any]) -> Values:
        """Evaluates everything that does not depend on the example."""
        values = dict(self._constants)
        values.update(zip(self.leaves, leaves, strict=True))
        for equation in self.unbatched_equations:
            results = _compat.evaluate(equation, read_all(values, equation.invars))
            values.update(zip(equation.outvars, results, strict=True))
        return values

    def operands(
        self, tap: Tap, values: Values, activations: Sequence[Any]
    ) -> list[Any]:
        """All operands of a tap for one example, in the equation's order."""
        found = dict(zip(tap.data_positions, activations, strict=True))
        return [
            found[i] if i in found else read(values, tap.operands[i].variable)
            for i in range(len(tap.equation.invars))
        ]

    def zeros(self, local: Container[int] = ()) -> dict[int, jax.Array]:
        """The perturbations of one example.

        Args:
          local: indices of taps whose cotangents are not wanted.
        """
        wanted = dict.fromkeys(
            i
            for tap, recorded in enumerate(self._recorded)
            if tap not in local
            for i in recorded.cotangents
        )
        specs = {i: self._perturbations[i] for i in wanted}
        return {i: jnp.zeros(spec.shape, spec.dtype) for i, spec in specs.items()}

    def run(
        self,
        values: Values,
        example: Sequence[Any],
        perturbations: Mapping[int, Any],
        local: Mapping[int, LocalNorm],
        probe: Any,
    ) -> tuple[list[Any], dict[int, Any]]:
        """One example forward, ready to be differentiated.

        The derivative of the loss by a perturbation is a cotangent. At the taps in
        `local`, only a few numbers are left behind: the derivative of the loss by the
        probe is their sum. They are computed in the backward pass as soon as a tap's
        cotangents are known; neither these nor its activations are kept then, beyond
        what that pass needs anyway.

        Args:
          values: from `unbatched_values`.
          example: the example's inputs.
          perturbations: from `zeros(local)`.
          local: by tap index, the numbers; they add up over taps and over steps.
          probe: an array of zeros like those numbers; None if `local` is empty.

        Returns:
          The outputs (loss first), and records for `tap_values`.
        """
        kept = [r for i, r in enumerate(self._recorded) if i not in local]
        wanted = frozenset(i for recorded in kept for i in recorded.activations)
        known = dict(values)
        known.update(zip(self._example_inputs, example, strict=True))
        records = self._block.run(known, Run(perturbations, wanted, local, probe))
        return read_all(known, self._outputs), records

    def tap_values(
        self,
        records: Mapping[int, Any],
        cotangents: Mapping[int, Any],
        local: Container[int] = (),
    ) -> list[TapValues | None]:
        """What met at each tap; None for those in `local`.

        Args:
          records: from `run`.
          cotangents: derivatives of the loss by the perturbations.
          local: as for `run`.
        """
        return [
            None
            if tap in local
            else TapValues(
                [records[i] for i in recorded.activations],
                [cotangents[i] for i in recorded.cotangents],
            )
            for tap, recorded in enumerate(self._recorded)
        ]

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
        self, variables: Sequence[_compat.Var], values: Values, *, wide: bool = False
    ) -> Callable[[Sequence[Any]], list[Any]]:
        """The differentiable map from the leaves of `parameter_side` to `variables`.

        Args:
          variables: parameter-side values.
          values: from `unbatched_values`.
          wide: whether to compute in at least float32, without the changes of dtype
            on the way.
        """
        leaves, equations = self.parameter_side(variables)

        def function(leaf_values: Sequence[Any]) -> list[Any]:
            local = dict(values)
            local.update(
                zip((self.leaves[i] for i in leaves), leaf_values, strict=True)
            )
            for equation in equations:
                results = read_all(local, equation.invars)
                if not wide:
                    results = _compat.evaluate(equation, results)
                elif equation.primitive is not primitives.convert_element_type_p:
                    results = _compat.evaluate_wide(
                        equation, list(map(widened, results))
                    )
                local.update(zip(equation.outvars, results, strict=True))
            return read_all(local, variables)

        return function
