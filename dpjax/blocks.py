"""The equations that depend on the example, as a tree of blocks.

The function itself is one block; so is the body of each loop (or `remat`) in which
parameters meet data. A block finds its taps when it is made, and registers what a run
has to leave behind for them: activations (values to record) and cotangents (variables
to perturb). When it runs, it evaluates its equations with the perturbations added, and
loops stack what their steps leave behind.
"""

import abc
import functools
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend.core import primitives

from dpjax import _compat, sides
from dpjax.sides import Side, is_floating
from dpjax.taps import Operand, Tap, read_all

LocalNorm: TypeAlias = Callable[[Sequence[Any], Sequence[Any]], jax.Array]
"""(one step's operands, cotangents) -> some numbers that add up over taps and steps."""


class Run(NamedTuple):
    """What one run adds to the evaluation of the equations.

    Attributes:
      perturbations: by index, zeros whose derivatives are wanted.
      records: indices of the values to leave behind.
      local: by tap, numbers to compute on the way back.
      probe: a zero for each of these numbers; None if there are none.
    """

    perturbations: Mapping[int, Any]
    records: frozenset[int]
    local: Mapping[int, LocalNorm]
    probe: Any


class Recorded(NamedTuple):
    """Where a tap's values are among those that a run leaves behind."""

    activations: tuple[int, ...]
    cotangents: tuple[int, ...]


class Registry:
    """What the blocks of one function register.

    Attributes:
      taps: the taps, in the order of evaluation.
      recorded: for each tap, where its values are.
      perturbations: shapes and dtypes, by index.
      has_remat: whether there are taps inside a `remat`.
    """

    def __init__(self) -> None:
        self.has_remat = False
        self.taps: list[Tap] = []
        self.recorded: list[Recorded] = []
        self.perturbations: list[jax.ShapeDtypeStruct] = []
        self._num_records = 0

    def add_tap(self, tap: Tap, recorded: Recorded) -> int:
        """Adds a tap; returns its index."""
        self.taps.append(tap)
        self.recorded.append(recorded)
        return len(self.taps) - 1

    def new_perturbation(self, shape: Sequence[int], dtype: Any) -> int:
        """Adds a perturbation; returns its index."""
        self.perturbations.append(jax.ShapeDtypeStruct(tuple(shape), dtype))
        return len(self.perturbations) - 1

    def new_record(self) -> int:
        """The index of one more value to leave behind."""
        self._num_records += 1
        return self._num_records - 1


class Block:
    """The data-side equations of the function, or of the body of one loop in it.

    Args:
      registry: where taps, perturbations and records are registered.
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
        registry: Registry,
        jaxpr: Any,
        results: Sequence[_compat.Atom],
        side: Mapping[_compat.Var, Side],
        operands: Mapping[_compat.Atom, Operand],
        loops: tuple[int, ...],
        outer: "Block | None" = None,
        scanned: Mapping[_compat.Atom, _compat.Atom] = types.MappingProxyType({}),
    ):
        self._registry = registry
        self._jaxpr = jaxpr
        self._side = side
        self._operands = operands
        self._loops = loops
        self._outer = outer
        self._scanned = scanned
        self._records: dict[_compat.Atom, int] = {}
        self._perturbed: dict[_compat.Var, int] = {}
        self._bodies: dict[int, _Body] = {}
        self._tap_at: dict[int, int] = {}
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
        kinds = self.sides_of(equation)
        scan = _compat.as_scan(equation)
        if scan is not None and _is_open_loop(scan, kinds):
            self._bodies[id(equation)] = _LoopBody(self, equation, scan)
            return
        if _is_open_remat(equation, kinds):
            self._bodies[id(equation)] = _RematBody(self, equation)
            self._registry.has_remat = True
            return
        known = {i: a for i, a in enumerate(equation.invars) if self.is_known(a)}
        data = tuple(i for i in range(len(equation.invars)) if i not in known)
        tap = Tap(
            equation,
            self._loops,
            {i: self.operand(atom) for i, atom in known.items()},
            parameters,
            data,
            outputs,
        )
        recorded = Recorded(
            tuple(self.record(equation.invars[i]) for i in data),
            tuple(self._perturb(equation.outvars[i]) for i in outputs),
        )
        self._tap_at[id(equation)] = self._registry.add_tap(tap, recorded)

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
            self._records[variable] = self._registry.new_record()
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
            index = self._registry.new_perturbation(shape, variable.aval.dtype)
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

    def body(
        self,
        jaxpr: Any,
        kinds: Sequence[Side],
        operands: Mapping[_compat.Atom, Operand],
        loops: tuple[int, ...],
        scanned: Mapping[_compat.Atom, _compat.Atom],
    ) -> "Block":
        """The block of a body in this block, given its inputs' sides."""
        found = sides.of_values(jaxpr, kinds)
        return Block(
            self._registry, jaxpr, jaxpr.outvars, found, operands, loops, self, scanned
        )

    def sides_of(self, equation: _compat.Equation) -> list[Side]:
        """The sides of an equation's operands."""
        return [sides.of_atom(self._side, atom) for atom in equation.invars]

    def is_known(self, atom: _compat.Atom) -> bool:
        """Whether a value is known in front of all loops."""
        return isinstance(atom, _compat.Literal) or atom in self._operands

    @property
    def loops(self) -> tuple[int, ...]:
        """The number of steps of each loop around the block, outermost first."""
        return self._loops

    def run(self, known: dict[_compat.Var, Any], run: Run) -> dict[int, Any]:
        """Evaluates the block; adds to `known`, returns what it leaves behind."""
        records: dict[int, Any] = {}
        for equation in self._equations:
            operands = read_all(known, equation.invars)
            body = self._bodies.get(id(equation))
            if body is None:
                results = _compat.evaluate(equation, operands)
            else:
                results, inside = body.run(operands, run)
                records.update(inside)
            tap = self._tap_at.get(id(equation), -1)
            if tap in run.local:
                positions = self._registry.taps[tap].output_positions
                probed = _probed(
                    run.local[tap], [results[i] for i in positions], operands, run.probe
                )
                for i, result in zip(positions, probed, strict=True):
                    results[i] = result
            for i, variable in enumerate(equation.outvars):
                index = self._perturbed.get(variable, -1)
                if index in run.perturbations:
                    perturb = jnp.add if self._outer is not None else _perturbed
                    results[i] = perturb(results[i], run.perturbations[index])
            known.update(zip(equation.outvars, results, strict=True))
        records.update(
            (i, known[v]) for v, i in self._records.items() if i in run.records
        )
        return records


class _Body(abc.ABC):
    """What is evaluated inside one equation of a block.

    Attributes:
      block: the equations.
    """

    block: Block

    @abc.abstractmethod
    def run(
        self, operands: Sequence[Any], run: Run
    ) -> tuple[list[Any], dict[int, Any]]:
        """The equation's results, and what it leaves behind."""

    def _inside(self, run: Run) -> dict[int, Any]:
        indices = self.block.perturbations
        return {i: run.perturbations[i] for i in indices if i in run.perturbations}


class _LoopBody(_Body):
    """The body of a loop.

    Args:
      outer: the block that the loop is in.
      equation: the scan.
      scan: the same, taken apart.
    """

    def __init__(self, outer: Block, equation: _compat.Equation, scan: _compat.Scan):
        self._scan = scan
        self._options = _compat.scan_options(equation)
        operands: dict[_compat.Atom, Operand] = {}
        behind: dict[_compat.Atom, _compat.Atom] = {}
        for i, (variable, atom) in enumerate(
            zip(scan.jaxpr.invars, equation.invars, strict=True)
        ):
            if scan.num_consts <= i < scan.end_of_carry:
                continue
            is_scanned = i >= scan.end_of_carry
            if outer.is_known(atom):
                found, scanned = outer.operand(atom)
                operands[variable] = Operand(found, (*scanned, is_scanned))
            elif is_scanned:
                behind[variable] = atom
        kinds = sides.in_scan_body(scan, outer.sides_of(equation))
        loops = (*outer.loops, self._options["length"])
        self.block = outer.body(scan.jaxpr, kinds, operands, loops, behind)

    def run(
        self, operands: Sequence[Any], run: Run
    ) -> tuple[list[Any], dict[int, Any]]:
        """See `_Body`; what is left behind is stacked over the steps."""
        scan = self._scan
        consts = operands[: scan.num_consts]

        def step(carried: list[Any], entries: Any) -> Any:
            scanned, perturbations = entries
            known = dict(zip(scan.jaxpr.constvars, scan.consts, strict=True))
            values = [*consts, *carried, *scanned]
            known.update(zip(scan.jaxpr.invars, values, strict=True))
            inside = run._replace(perturbations=perturbations)
            records = self.block.run(known, inside)
            results = read_all(known, scan.jaxpr.outvars)
            return results[: scan.num_carry], (results[scan.num_carry :], records)

        scanned = operands[scan.end_of_carry :]
        last, (stacked, records) = jax.lax.scan(
            step,
            list(operands[scan.carried]),
            (list(scanned), self._inside(run)),
            **self._options,
        )
        return [*last, *stacked], records


class _RematBody(_Body):
    """The body of a `remat`.

    Args:
      outer: the block that the equation is in.
      equation: the equation.
    """

    def __init__(self, outer: Block, equation: _compat.Equation):
        self._equation = equation
        called = _compat.called(equation)
        assert called is not None
        self._jaxpr, self._consts = called
        operands = {
            variable: outer.operand(atom)
            for variable, atom in zip(self._jaxpr.invars, equation.invars, strict=True)
            if outer.is_known(atom)
        }
        kinds = outer.sides_of(equation)
        self.block = outer.body(self._jaxpr, kinds, operands, outer.loops, {})

    def run(
        self, operands: Sequence[Any], run: Run
    ) -> tuple[list[Any], dict[int, Any]]:
        """See `_Body`."""

        def evaluate(operands: list[Any], perturbations: Any, probe: Any) -> Any:
            known = dict(zip(self._jaxpr.constvars, self._consts, strict=True))
            known.update(zip(self._jaxpr.invars, operands, strict=True))
            inside = run._replace(perturbations=perturbations, probe=probe)
            records = self.block.run(known, inside)
            return read_all(known, self._jaxpr.outvars), records

        checkpointed = jax.checkpoint(evaluate, **_compat.remat_options(self._equation))
        return checkpointed(list(operands), self._inside(run), run.probe)


def _is_open_loop(scan: _compat.Scan, kinds: Sequence[Side]) -> bool:
    """Whether a loop is in normal form, so that its body can be looked into."""
    inside = sides.in_scan_body(scan, kinds)
    carried = [*kinds[scan.carried], *inside[scan.carried]]
    return Side.PARAMETER not in carried and _lacks_parameters(scan.jaxpr, inside)


def _is_open_remat(equation: _compat.Equation, kinds: Sequence[Side]) -> bool:
    """The same for a `remat`."""
    called = _compat.called(equation)
    return called is not None and _lacks_parameters(called[0], kinds)


def _lacks_parameters(jaxpr: Any, kinds: Sequence[Side]) -> bool:
    """Whether a body makes or passes on no value from parameters alone."""
    found = sides.of_values(jaxpr, kinds)
    made = [v for inner in jaxpr.eqns for v in inner.outvars]
    inside = [sides.of_atom(found, atom) for atom in (*jaxpr.outvars, *made)]
    return Side.PARAMETER not in inside


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

    Not their sum itself: nothing then reads the zeros in the forward pass. Not for
    bodies: inside a scan, JAX mistakes the batch axis of a custom_jvp's tangents where
    its value is the same for all examples.
    """
    del perturbation
    return value


@_perturbed.defjvp
def _perturbed_jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
    return primals[0], tangents[0] + tangents[1]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _probed(
    norm: LocalNorm, results: list[Any], operands: Sequence[Any], probe: Any
) -> list[Any]:
    """The results; on the way back, the numbers of `norm` as the probe's derivative."""
    del norm, operands, probe
    return results


def _probed_forward(
    norm: LocalNorm, results: list[Any], operands: Sequence[Any], probe: Any
) -> Any:
    del norm, probe
    return results, operands


def _probed_backward(
    norm: LocalNorm, operands: Sequence[Any], cotangents: list[Any]
) -> Any:
    return cotangents, None, norm(operands, cotangents)


_probed.defvjp(_probed_forward, _probed_backward)
