"""From a function to a jaxpr in which parameters meet data in the open.

A function of ONE example is traced and rewritten, by evaluating its jaxpr again, until

- there are no plain calls (`jit`, `closed_call`): their equations stand in line. So do
  those of `remat`, unless they are to be kept;
- the body of a `scan` in which parameters meet data holds no equation on parameters
  alone. Those are moved in front of the loop: once if every step computes the same
  (casts, the concatenation of an LSTM's kernels), else for all steps together (by
  `vmap` over scanned weights, or by a loop of their own if they carry something);
- so a loop sees parameters only as a constant, which all steps share, or as a scanned
  input, of which each step has its own slice. Where a parameter starts what a loop
  carries (a learned first state), a zero from the example side, the *anchor*, is added
  to it in front of the loop: there it meets data.

The values are those of the function as it stood; only where they are computed moves.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import primitives

from dpjax import _compat, sides
from dpjax.sides import Side


class _Sided(NamedTuple):
    """A traced value and what it depends on."""

    value: Any
    side: Side


class _How(NamedTuple):
    """How a function is rewritten: with which anchor, and whether `remat` is kept."""

    anchor: Any
    keep_remat: bool


def trace(
    fun: Callable[..., list],
    specs: Sequence[Any],
    num_leaves: int,
    *,
    keep_remat: bool = False,
) -> _compat.ClosedJaxpr:
    """Traces a function of one example to a jaxpr in normal form.

    Args:
      fun: takes the values that `specs` describe, returns a list of arrays.
      specs: `jax.ShapeDtypeStruct`s of the parameter leaves, of the anchor (a floating
        point scalar of the example) and of the example's arrays.
      num_leaves: how many of them are parameter leaves.
      keep_remat: leave `remat` in place; parameters alone are moved out of it, too.
    """
    nested = jax.make_jaxpr(fun)(*specs)

    def evaluate(*values: Any) -> list[Any]:
        args = [
            _Sided(value, Side.PARAMETER if i < num_leaves else Side.DATA)
            for i, value in enumerate(values)
        ]
        how = _How(values[num_leaves], keep_remat)
        results = _evaluate(nested.jaxpr, nested.consts, args, how)
        return [result.value for result in results]

    return jax.make_jaxpr(evaluate)(*specs)


def _evaluate(
    jaxpr: Any, consts: Sequence[Any], args: Sequence[_Sided], how: _How
) -> list[_Sided]:
    known = {
        variable: _Sided(value, Side.CONSTANT)
        for variable, value in zip(jaxpr.constvars, consts, strict=True)
    }
    known.update(zip(jaxpr.invars, args, strict=True))

    def read(atom: _compat.Atom) -> _Sided:
        if isinstance(atom, _compat.Literal):
            return _Sided(atom.val, Side.CONSTANT)
        return known[atom]

    for equation in jaxpr.eqns:
        operands = [read(atom) for atom in equation.invars]
        called = _compat.called(equation)
        is_kept = how.keep_remat and equation.primitive is primitives.remat_p
        if called is not None and not is_kept:
            results = _evaluate(*called, operands, how)
        elif is_kept and _mixes(operands):
            results = _evaluate_remat(equation, operands, how)
        elif _mixes(operands) and (scan := _compat.as_scan(equation)) is not None:
            options = _compat.scan_options(equation)
            results = _Loop(scan, options, operands, how).evaluate()
        else:
            values = _compat.evaluate(equation, [o.value for o in operands])
            found = sides.of_results(equation, [o.side for o in operands])
            results = list(map(_Sided, values, found))
        known.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _mixes(operands: Sequence[_Sided]) -> bool:
    """Whether parameters may meet data in an equation."""
    found = {operand.side for operand in operands}
    return {Side.PARAMETER, Side.DATA} <= found


def _flat(
    jaxpr: Any, consts: Sequence[Any], inside: Sequence[Side], how: _How
) -> tuple[_compat.ClosedJaxpr, dict[_compat.Var, Side]]:
    """A body in normal form, with the anchor as its first input, and all sides."""

    def evaluate(anchor: Any, *values: Any) -> list[Any]:
        args = list(map(_Sided, values, inside))
        results = _evaluate(jaxpr, consts, args, how._replace(anchor=anchor))
        return [result.value for result in results]

    specs = [v.aval for v in jaxpr.invars]
    closed = jax.make_jaxpr(evaluate)(jax.typeof(how.anchor), *specs)
    return closed, sides.of_values(closed.jaxpr, [Side.DATA, *inside])


def _evaluate_remat(
    equation: _compat.Equation, operands: Sequence[_Sided], how: _How
) -> list[_Sided]:
    """A `remat` in which parameters meet data, around the equations on data alone."""
    called = _compat.called(equation)
    assert called is not None
    closed, side = _flat(*called, [operand.side for operand in operands], how)
    body = closed.jaxpr
    values = [how.anchor, *(operand.value for operand in operands)]
    known = dict(zip(body.constvars, closed.consts, strict=True))
    known.update(zip(body.invars, values, strict=True))
    within = []
    for inner in body.eqns:
        if any(side[variable] == Side.DATA for variable in inner.outvars):
            within.append(inner)
            continue
        results = _compat.evaluate(inner, _read_all(known, inner.invars))
        known.update(zip(inner.outvars, results, strict=True))
    outputs = _variables(body.outvars, lambda v: side[v] == Side.DATA)
    used = [atom for inner in within for atom in inner.invars]
    inputs = {v: known[v] for v in _variables([*used, *outputs], known.__contains__)}

    def evaluate(values: list[Any]) -> list[Any]:
        local = {**known, **dict(zip(inputs, values, strict=True))}
        for inner in within:
            results = _compat.evaluate(inner, _read_all(local, inner.invars))
            local.update(zip(inner.outvars, results, strict=True))
        return _read_all(local, outputs)

    checkpointed = jax.checkpoint(evaluate, **_compat.remat_options(equation))
    results = checkpointed(list(inputs.values()))
    known.update(zip(outputs, results, strict=True))
    return [
        _Sided(_read(known, atom), sides.of_atom(side, atom)) for atom in body.outvars
    ]


def _anchored(value: Any, anchor: Any) -> Any:
    """The value plus a zero from the example side, if it carries derivatives."""
    if not jnp.issubdtype(value.dtype, jnp.inexact):
        return value
    return value + anchor.astype(value.dtype)


class _Loop:
    """One scan in which parameters meet data, being rewritten.

    Args:
      scan: the loop.
      options: its length, direction and unrolling.
      operands: its operands.
      how: how to rewrite its body.
    """

    def __init__(
        self,
        scan: _compat.Scan,
        options: dict[str, Any],
        operands: Sequence[_Sided],
        how: _How,
    ):
        self._options = options
        self._num_carry = scan.num_carry
        self._anchor = how.anchor
        inside = sides.in_scan_body(scan, [o.side for o in operands])
        closed, self._side = _flat(scan.jaxpr, scan.consts, inside, how)
        self._body = closed.jaxpr
        inputs = self._body.invars[1:]
        consts, carried = inputs[: scan.num_consts], inputs[scan.carried]
        scanned = inputs[scan.end_of_carry :]
        values = dict(zip(inputs, (o.value for o in operands), strict=True))
        self._first = dict(zip(inputs, operands, strict=True))

        # Values in front of the loop: the same for all steps, or stacked over them.
        self._same = dict(zip(self._body.constvars, closed.consts, strict=True))
        self._same[self._body.invars[0]] = how.anchor
        self._same.update((v, values[v]) for v in consts)
        self._stacked = {v: values[v] for v in scanned}
        next_carried = self._body.outvars[: self._num_carry]
        self._next = dict(zip(carried, next_carried, strict=True))
        for variable, after in self._next.items():
            if variable is after:
                self._same[variable] = values[variable]
        self._carried = [v for v in carried if v not in self._same]
        self._last: dict[_compat.Var, Any] = {}

    def _is_data(self, atom: _compat.Atom) -> bool:
        return sides.of_atom(self._side, atom) == Side.DATA

    def evaluate(self) -> list[_Sided]:
        """The scan's results."""
        varying = self._move_out()
        self._stack(varying)
        carried, outputs = self._loop_over_data()
        for variable in self._next:
            if variable in self._same:
                carried[variable] = self._same[variable]
        results = [_Sided(carried[v], self._side[v]) for v in self._next]
        for atom in self._body.outvars[self._num_carry :]:
            side = sides.of_atom(self._side, atom)
            results.append(_Sided(self._over_steps(atom, outputs), side))
        return results

    def _move_out(self) -> list[_compat.Equation]:
        """Evaluates what is the same in all steps; returns what else lacks data."""
        varying = []
        for equation in self._body.eqns:
            if any(map(self._is_data, equation.outvars)):
                continue
            operands = equation.invars
            if not all(
                isinstance(a, _compat.Literal) or a in self._same for a in operands
            ):
                varying.append(equation)
                continue
            results = _compat.evaluate(equation, _read_all(self._same, operands))
            self._same.update(zip(equation.outvars, results, strict=True))
        return varying

    def _stack(self, varying: list[_compat.Equation]) -> None:
        """Evaluates equations without data for all steps."""
        carried = [v for v in self._carried if not self._is_data(v)]
        made = [v for equation in varying for v in equation.outvars]
        if not made and not carried:
            return
        scanned = {v: x for v, x in self._stacked.items() if not self._is_data(v)}

        def step(before: list[Any], entries: dict[_compat.Var, Any]) -> Any:
            known = {**self._same, **entries, **dict(zip(carried, before, strict=True))}
            for equation in varying:
                results = _compat.evaluate(equation, _read_all(known, equation.invars))
                known.update(zip(equation.outvars, results, strict=True))
            after = _read_all(known, [self._next[v] for v in carried])
            return after, [known[v] for v in (*carried, *made)]

        variables = list(scanned)
        entries = list(scanned.values())
        first = [self._first[v].value for v in carried]

        def one(before: list[Any], values: list[Any]) -> Any:
            return step(before, dict(zip(variables, values, strict=True)))

        if carried:
            last, stacked = jax.lax.scan(one, first, entries, **self._options)
        else:
            last, (_, stacked) = [], jax.vmap(lambda values: one([], values))(entries)
        self._stacked.update(zip((*carried, *made), stacked, strict=True))
        self._last = dict(zip(carried, last, strict=True))

    def _loop_over_data(self) -> tuple[dict[_compat.Var, Any], dict[_compat.Atom, Any]]:
        """The loop that is left; last values of what it carries, and its outputs."""
        carried = [v for v in self._carried if self._is_data(v)]
        equations = [
            equation
            for equation in self._body.eqns
            if any(map(self._is_data, equation.outvars))
        ]
        outputs = _variables(self._body.outvars[self._num_carry :], self._is_data)
        used = {
            a
            for equation in equations
            for a in equation.invars
            if isinstance(a, _compat.Var)
        }
        used.update(a for a in self._body.outvars if isinstance(a, _compat.Var))
        scanned = {v: x for v, x in self._stacked.items() if v in used}
        variables = list(scanned)

        def step(before: list[Any], entries: list[Any]) -> Any:
            known = dict(self._same)
            known.update(zip(carried, before, strict=True))
            known.update(zip(variables, entries, strict=True))
            for equation in equations:
                results = _compat.evaluate(equation, _read_all(known, equation.invars))
                known.update(zip(equation.outvars, results, strict=True))
            after = []
            for variable in carried:
                value = _read(known, self._next[variable])
                if sides.of_atom(self._side, self._next[variable]) == Side.PARAMETER:
                    value = _anchored(value, self._anchor)
                after.append(value)
            return after, _read_all(known, outputs)

        first = []
        for variable in carried:
            value, side = self._first[variable]
            is_met = side == Side.PARAMETER
            first.append(_anchored(value, self._anchor) if is_met else value)
        last, stacked = jax.lax.scan(
            step, first, list(scanned.values()), **self._options
        )
        results = {**self._last, **dict(zip(carried, last, strict=True))}
        return results, dict(zip(outputs, stacked, strict=True))

    def _over_steps(self, atom: _compat.Atom, outputs: dict[_compat.Atom, Any]) -> Any:
        """What a step puts out, for all steps."""
        if not isinstance(atom, _compat.Literal):
            for known in (outputs, self._stacked):
                if atom in known:
                    return known[atom]
        value = jnp.asarray(_read(self._same, atom))
        return jnp.broadcast_to(value, (self._options["length"], *value.shape))


def _variables(
    atoms: Sequence[_compat.Atom], wanted: Callable[[_compat.Var], bool]
) -> list[_compat.Var]:
    """The wanted variables among some atoms, each once."""
    variables = dict.fromkeys(a for a in atoms if isinstance(a, _compat.Var))
    return [variable for variable in variables if wanted(variable)]


def _read(known: dict[_compat.Var, Any], atom: _compat.Atom) -> Any:
    return atom.val if isinstance(atom, _compat.Literal) else known[atom]


def _read_all(
    known: dict[_compat.Var, Any], atoms: Sequence[_compat.Atom]
) -> list[Any]:
    return [_read(known, atom) for atom in atoms]
