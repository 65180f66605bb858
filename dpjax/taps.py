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

import dataclasses
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend.core import primitives

from dpjax import _compat, sides
from dpjax.precision import is_narrow, widened
from dpjax.sides import Side, is_floating

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


class _Recorded(NamedTuple):
    """Where a tap's values are among those that a run leaves behind."""

    activations: tuple[int, ...]
    cotangents: tuple[int, ...]


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
        kinds = [Side.PARAMETER] * num_leaves
        kinds += [Side.DATA] * len(self._example_inputs)
        self._side = sides.of_values(inner, kinds)
        self.unbatched_equations = [
            equation
            for equation in inner.eqns
            if all(self.side(v) != Side.DATA for v in equation.outvars)
        ]
        self.taps: list[Tap] = []
        self._recorded: list[_Recorded] = []
        self._perturbations: list[jax.ShapeDtypeStruct] = []
        self._num_records = 0
        unbatched = {
            variable: Operand(variable, ())
            for variable, side in self._side.items()
            if side != Side.DATA
        }
        loss = inner.outvars[:1]
        self._block = _Block(self, inner, loss, self._side, unbatched, ())
        bending = (primitives.custom_vjp_call_p, primitives.reduce_precision_p)
        self.scales_with_loss = not any(
            equation.primitive in bending
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
            results = _compat.evaluate(equation, _read_all(values, equation.invars))
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

        def perturbed(perturbations: list[Any]) -> tuple[Any, Any]:
            known = dict(values)
            known.update(zip(self._example_inputs, example, strict=True))
            records = self._block.run(known, dict(enumerate(perturbations)))
            outputs = _read_all(known, self._outputs)
            return outputs[0], (outputs, [records[i] for i in sorted(records)])

        zeros = [jnp.zeros(spec.shape, spec.dtype) for spec in self._perturbations]
        loss, pullback, (outputs, records) = jax.vjp(perturbed, zeros, has_aux=True)
        (cotangents,) = pullback(jnp.ones_like(loss))
        return outputs, [
            TapValues(
                [records[i] for i in recorded.activations],
                [cotangents[i] for i in recorded.cotangents],
            )
            for recorded in self._recorded
        ]

    def add_tap(self, tap: Tap, recorded: _Recorded) -> None:
        """Registers a tap (for the blocks)."""
        self.taps.append(tap)
        self._recorded.append(recorded)

    def new_perturbation(self, shape: Sequence[int], dtype: Any) -> int:
        """Registers a perturbation (for the blocks); returns its index."""
        self._perturbations.append(jax.ShapeDtypeStruct(tuple(shape), dtype))
        return len(self._perturbations) - 1

    def new_record(self) -> int:
        """Registers a value to leave behind (for the blocks); returns its index."""
        self._num_records += 1
        return self._num_records - 1

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
                results = _read_all(local, equation.invars)
                if not wide:
                    results = _compat.evaluate(equation, results)
                elif equation.primitive is not primitives.convert_element_type_p:
                    results = _compat.evaluate_wide(
                        equation, list(map(widened, results))
                    )
                local.update(zip(equation.outvars, results, strict=True))
            return _read_all(local, variables)

        return function


class _Block:
    """The data-side equations of the function, or of the body of one loop in it.

    Args:
      function: where taps, perturbations and records are registered.
      jaxpr: the equations.
      results: the jaxpr's outputs on which the loss may depend; what reaches none of
        them is no tap.
      side: of every variable in it.
      operands: the variables that are known in front of all loops.
      loops: the number of steps of each loop around the block, outermost first.
      outer: for a loop's body, the block that the loop is in.
      scanned: for a loop's body, its data-side scanned inputs, and the loop's operands
        behind them. What is wanted of an input is taken from that operand, which is
        stacked already.
    """

    def __init__(
        self,
        function: TappedFunction,
        jaxpr: Any,
        results: Sequence[_compat.Atom],
        side: Mapping[_compat.Var, Side],
        operands: Mapping[_compat.Atom, Operand],
        loops: tuple[int, ...],
        outer: "_Block | None" = None,
        scanned: Mapping[_compat.Atom, _compat.Atom] = types.MappingProxyType({}),
    ):
        self._function = function
        self._jaxpr = jaxpr
        self._side = side
        self._operands = operands
        self._loops = loops
        self._outer = outer
        self._scanned = scanned
        self._records: dict[_compat.Atom, int] = {}
        self._perturbed: dict[_compat.Var, int] = {}
        self._bodies: dict[int, _Body] = {}
        self._uses = _only_uses(jaxpr)
        reaching = _reaching(jaxpr, results)
        self._made_by = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
        self._equations = [
            equation
            for equation in jaxpr.eqns
            if any(variable not in operands for variable in equation.outvars)
        ]
        for equation in self._equations:
            if not reaching.isdisjoint(equation.outvars):
                self._add(equation)

    def _known(self, atom: _compat.Atom) -> bool:
        return isinstance(atom, _compat.Literal) or atom in self._operands

    def _add(self, equation: _compat.Equation) -> None:
        parameters = tuple(
            i
            for i, atom in enumerate(equation.invars)
            if sides.of_atom(self._side, atom) == Side.PARAMETER
        )
        outputs = tuple(
            i for i, v in enumerate(equation.outvars) if is_floating(v.aval)
        )
        if not parameters or not outputs:
            return
        if _is_open(equation, [sides.of_atom(self._side, a) for a in equation.invars]):
            self._bodies[id(equation)] = _Body(self, equation)
            return
        known = {i: a for i, a in enumerate(equation.invars) if self._known(a)}
        data = tuple(i for i in range(len(equation.invars)) if i not in known)
        tap = Tap(
            equation,
            self._loops,
            {i: self.operand(atom) for i, atom in known.items()},
            parameters,
            data,
            outputs,
        )
        recorded = _Recorded(
            tuple(self.record(equation.invars[i]) for i in data),
            tuple(self._perturb(equation.outvars[i]) for i in outputs),
        )
        self._function.add_tap(tap, recorded)

    def operand(self, atom: _compat.Atom) -> Operand:
        """The operand behind a literal or a variable that is known outside."""
        if isinstance(atom, _compat.Literal):
            return Operand(atom, (False,) * len(self._loops))
        return self._operands[atom]

    def record(self, variable: _compat.Atom) -> int:
        """Has a variable's value left behind; returns the index."""
        if self._outer is not None and variable in self._scanned:
            return self._outer.record(self._scanned[variable])
        if variable not in self._records:
            self._records[variable] = self._function.new_record()
        return self._records[variable]

    def _perturb(self, variable: Any) -> int:
        """Has a variable perturbed; returns the perturbation's index.

        Where the variable is only added to another of its shape, the sum is perturbed
        instead: the cotangent is the same, and the taps on both sides share it. Where
        the sum has a scanned input as a term, that input's cotangents are the same and
        are stacked already.
        """
        while (following := self._uses.get(variable)) is not None:
            if not _is_sum(following):
                break
            (result,) = following.outvars
            if not _have_same_type(result, variable):
                break
            variable = result
        scanned = self._scanned_term(variable)
        if scanned is not None and self._outer is not None:
            return self._outer._perturb(scanned)
        if variable not in self._perturbed:
            shape = (*self._loops, *variable.aval.shape)
            index = self._function.new_perturbation(shape, variable.aval.dtype)
            self._perturbed[variable] = index
        return self._perturbed[variable]

    def _scanned_term(self, variable: _compat.Var) -> _compat.Var | None:
        """The loop's operand behind an input used only as a term of `variable`."""
        equation = self._made_by.get(variable)
        if self._outer is None or equation is None or not _is_sum(equation):
            return None
        for term in equation.invars:
            behind = self._scanned.get(term)
            is_only_use = self._uses.get(term) is equation
            if behind is None or not is_only_use or not _have_same_type(term, variable):
                continue
            if behind in self._outer._made_by and behind in self._outer._uses:
                return behind
        return None

    @property
    def perturbations(self) -> list[int]:
        """Indices of the perturbations in this block and in the loops inside it."""
        inside = [i for body in self._bodies.values() for i in body.block.perturbations]
        return [*self._perturbed.values(), *inside]

    def new_body(self, equation: _compat.Equation) -> "_Block":
        """The block of a loop's body."""
        parameters = equation.params
        body = parameters["jaxpr"].jaxpr
        first = parameters["num_consts"]
        last_carry = first + parameters["num_carry"]
        kinds = [sides.of_atom(self._side, atom) for atom in equation.invars]
        operands: dict[_compat.Atom, Operand] = {}
        behind: dict[_compat.Atom, _compat.Atom] = {}
        for i, (variable, atom) in enumerate(
            zip(body.invars, equation.invars, strict=True)
        ):
            if first <= i < last_carry:
                continue
            is_scanned = i >= last_carry
            if self._known(atom):
                found, scanned = self.operand(atom)
                operands[variable] = Operand(found, (*scanned, is_scanned))
            elif is_scanned:
                behind[variable] = atom

        return _Block(
            self._function,
            body,
            body.outvars,
            sides.of_values(body, sides.in_scan_body(equation, kinds)),
            operands,
            (*self._loops, parameters["length"]),
            self,
            behind,
        )

    def run(
        self, known: dict[_compat.Var, Any], perturbations: Mapping[int, Any]
    ) -> dict[int, Any]:
        """Evaluates the block; adds to `known`, returns what it leaves behind."""
        records: dict[int, Any] = {}
        for equation in self._equations:
            operands = _read_all(known, equation.invars)
            body = self._bodies.get(id(equation))
            if body is None:
                results = _compat.evaluate(equation, operands)
            else:
                results, inside = body.run(operands, perturbations)
                records.update(inside)
            for i, variable in enumerate(equation.outvars):
                if variable in self._perturbed:
                    perturbation = perturbations[self._perturbed[variable]]
                    results[i] = _perturbed(results[i], perturbation)
            known.update(zip(equation.outvars, results, strict=True))
        records.update((i, known[v]) for v, i in self._records.items())
        return records


class _Body:
    """The body of one loop in a block.

    Args:
      outer: the block that the loop is in.
      equation: the scan.
    """

    def __init__(self, outer: _Block, equation: _compat.Equation):
        self._equation = equation
        self.block = outer.new_body(equation)

    def run(
        self, operands: Sequence[Any], perturbations: Mapping[int, Any]
    ) -> tuple[list[Any], dict[int, Any]]:
        """The loop's results, and what it leaves behind, stacked over the steps."""
        parameters = self._equation.params
        body = parameters["jaxpr"]
        first, num_carry = parameters["num_consts"], parameters["num_carry"]
        consts, carried = operands[:first], operands[first : first + num_carry]
        scanned = operands[first + num_carry :]
        indices = self.block.perturbations

        def step(carried: list[Any], entries: Any) -> Any:
            scanned, perturbations = entries
            known = dict(zip(body.jaxpr.constvars, body.consts, strict=True))
            values = [*consts, *carried, *scanned]
            known.update(zip(body.jaxpr.invars, values, strict=True))
            records = self.block.run(
                known, dict(zip(indices, perturbations, strict=True))
            )
            results = _read_all(known, body.jaxpr.outvars)
            return results[:num_carry], (results[num_carry:], records)

        last, (stacked, records) = jax.lax.scan(
            step,
            list(carried),
            (list(scanned), [perturbations[i] for i in indices]),
            length=parameters["length"],
            reverse=parameters["reverse"],
            unroll=parameters["unroll"],
        )
        return [*last, *stacked], records


def _is_open(equation: _compat.Equation, kinds: Sequence[Side]) -> bool:
    """Whether an equation is a loop in normal form, whose body can be looked into."""
    if equation.primitive is not primitives.scan_p or not equation.params["length"]:
        return False
    first, num_carry = equation.params["num_consts"], equation.params["num_carry"]
    body = equation.params["jaxpr"].jaxpr
    found = sides.of_values(body, sides.in_scan_body(equation, kinds))
    made = [v for inner in body.eqns for v in inner.outvars]
    passed = [*body.outvars, *body.invars[first : first + num_carry], *made]
    starts = kinds[first : first + num_carry]
    inside = [sides.of_atom(found, atom) for atom in passed]
    return Side.PARAMETER not in (*starts, *inside)


def _reaching(jaxpr: Any, results: Sequence[_compat.Atom]) -> set[_compat.Atom]:
    """The variables on whose derivatives some of a jaxpr's outputs depend."""
    found: set[_compat.Atom] = set()

    def add(atoms: Iterable[_compat.Atom]) -> None:
        variables = (atom for atom in atoms if isinstance(atom, _compat.Var))
        found.update(v for v in variables if is_floating(v.aval))

    add(results)
    for equation in reversed(jaxpr.eqns):
        has_derivative = equation.primitive not in sides.WITHOUT_DERIVATIVE
        if has_derivative and not found.isdisjoint(equation.outvars):
            add(equation.invars)
    return found


def _only_uses(jaxpr: Any) -> dict[_compat.Var, _compat.Equation]:
    """For each variable that is used once, and by an equation: that equation."""
    found: dict[_compat.Var, list[Any]] = {}
    for equation in jaxpr.eqns:
        for atom in equation.invars:
            if isinstance(atom, _compat.Var):
                found.setdefault(atom, []).append(equation)
    for atom in jaxpr.outvars:
        if isinstance(atom, _compat.Var):
            found.setdefault(atom, []).append(None)
    return {
        variable: uses[0]
        for variable, uses in found.items()
        if len(uses) == 1 and uses[0] is not None
    }


def _is_sum(equation: _compat.Equation) -> bool:
    return equation.primitive in (primitives.add_p, primitives.add_jaxvals_p)


def _have_same_type(first: Any, second: Any) -> bool:
    one, other = first.aval, second.aval
    return (one.shape, one.dtype) == (other.shape, other.dtype)


@jax.custom_jvp
def _perturbed(value: jax.Array, perturbation: jax.Array) -> jax.Array:
    """The value; its derivative by the perturbation is that of their sum.

    Not their sum itself: nothing then reads the zeros in the forward pass.
    """
    del perturbation
    return value


@_perturbed.defjvp
def _perturbed_jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
    return primals[0], tangents[0] + tangents[1]


def read(values: Values, atom: _compat.Atom) -> Any:
    """The value of a variable or literal."""
    return atom.val if isinstance(atom, _compat.Literal) else values[atom]


def _read_all(values: Values, atoms: Iterable[_compat.Atom]) -> list[Any]:
    return [read(values, atom) for atom in atoms]
