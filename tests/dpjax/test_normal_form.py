"""Normal form: the same values, with what parameters alone decide in front of loops."""

from collections import Counter
from typing import NamedTuple

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core
from jax.extend.core import primitives

from dpjax import _compat, normal_form

STEPS, WIDTH = 3, 2


def _array(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


X_TxD = _array(STEPS, WIDTH, seed=1)
W_DxD = _array(WIDTH, WIDTH, seed=2)
W_TxDxD = _array(STEPS, WIDTH, WIDTH, seed=3)
V_D = _array(WIDTH, seed=4)


class Case(NamedTuple):
    """A function of leaves, an anchor and the steps' inputs."""

    fun: object
    leaves: tuple


def _same_for_all_steps(w_DxD, v_D, anchor, x_TxD):
    def step(h_D, x_D):
        kernel = jnp.concatenate([w_DxD, v_D[None]])
        h_D = jnp.tanh(jnp.concatenate([h_D[:1], x_D]) @ kernel)
        return h_D, h_D

    return list(jax.lax.scan(step, jnp.zeros(WIDTH), x_TxD))


def _own_for_each_step(w_TxDxD, anchor, x_TxD):
    def step(h_D, entry):
        w_DxD, x_D = entry
        return jnp.tanh((h_D + x_D) @ jnp.cos(w_DxD)), None

    return [jax.lax.scan(step, jnp.zeros(WIDTH), (w_TxDxD, x_TxD))[0]]


def _carried_by_parameters_alone(v_D, decay, anchor, x_TxD):
    def step(carry, x_D):
        h_D, scale_D = carry
        return (jnp.tanh(h_D + scale_D * x_D), jnp.sin(scale_D * decay)), scale_D

    (h_D, last_D), scales_TxD = jax.lax.scan(step, (jnp.zeros(WIDTH), v_D), x_TxD)
    return [h_D, last_D, scales_TxD]


def _learned_first_state(v_D, anchor, x_TxD):
    last_D, before_TxD = jax.lax.scan(
        lambda h_D, x_D: (jnp.tanh(h_D * 2 + x_D), h_D), v_D, x_TxD
    )
    return [last_D, before_TxD]


def _parameter_put_into_the_state(v_D, anchor, x_TxD):
    def step(carry, x_D):
        h_D, before_D = carry
        return (v_D, h_D + before_D * x_D), before_D

    carry, before_TxD = jax.lax.scan(step, (x_TxD[0], x_TxD[1]), x_TxD)
    return [*carry, before_TxD]


def _carried_through(w_DxD, anchor, x_TxD):
    # JAX itself makes it a constant, but does not look into `remat`.
    @jax.checkpoint
    def step(carry, x_D):
        h_D, w_DxD = carry
        return (jnp.tanh((h_D + x_D) @ w_DxD), w_DxD), None

    return list(jax.lax.scan(step, (jnp.zeros(WIDTH), w_DxD), x_TxD)[0])


def _shifted_through_the_state(v_D, anchor, x_TxD):
    """What starts as parameters turns into data two steps later."""

    def step(carry, x_D):
        a_D, b_D, c_D = carry
        return (b_D, c_D, x_D + a_D), a_D * b_D

    carry, products_TxD = jax.lax.scan(step, (v_D, 2 * v_D, x_TxD[0]), x_TxD)
    return [*carry, products_TxD]


def _stacked_results_of_parameters(v_D, anchor, x_TxD):
    def step(h_D, x_D):
        return h_D + x_D, (jnp.exp(v_D), 1.0, h_D)

    last_D, stacked = jax.lax.scan(step, jnp.zeros(WIDTH), x_TxD)
    return [last_D, *map(jnp.asarray, stacked)]


def _backwards_and_unrolled(w_TxDxD, v_D, anchor, x_TxD):
    def step(carry, entry):
        h_D, scale_D = carry
        w_DxD, x_D = entry
        return (jnp.tanh(h_D + x_D @ (w_DxD * scale_D[None])), scale_D * v_D), h_D

    first = jnp.zeros(WIDTH), v_D
    (h_D, _), before_TxD = jax.lax.scan(
        step, first, (w_TxDxD, x_TxD), reverse=True, unroll=2
    )
    return [h_D, before_TxD]


def _loop_in_a_loop(w_TxDxD, v_D, anchor, x_TxD):
    def outer(h_D, w_DxD):
        def inner(h_D, x_D):
            return jnp.tanh(h_D @ w_DxD.T + x_D * jnp.exp(v_D)), None

        return jax.lax.scan(inner, h_D, x_TxD)[0], None

    return [jax.lax.scan(outer, v_D, w_TxDxD)[0]]


CASES = {
    "same for all steps": Case(_same_for_all_steps, (W_DxD, V_D)),
    "own for each step": Case(_own_for_each_step, (W_TxDxD,)),
    "carried by parameters alone": Case(
        _carried_by_parameters_alone, (V_D, np.float32(0.7))
    ),
    "learned first state": Case(_learned_first_state, (V_D,)),
    "parameter put into the state": Case(_parameter_put_into_the_state, (V_D,)),
    "carried through": Case(_carried_through, (W_DxD,)),
    "shifted through the state": Case(_shifted_through_the_state, (V_D,)),
    "stacked results of parameters": Case(_stacked_results_of_parameters, (V_D,)),
    "backwards and unrolled": Case(_backwards_and_unrolled, (W_TxDxD, V_D)),
    "loop in a loop": Case(_loop_in_a_loop, (W_TxDxD, V_D)),
}
with_each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def _specs(*arrays):
    return [jax.ShapeDtypeStruct(np.shape(a), np.float32) for a in arrays]


def _trace(case, **options):
    specs = _specs(*case.leaves, 0.0, X_TxD)
    return normal_form.trace(case.fun, specs, len(case.leaves), **options)


def _equations(jaxpr, name):
    return [equation for equation in jaxpr.eqns if equation.primitive.name == name]


def _names(jaxpr):
    return Counter(equation.primitive.name for equation in jaxpr.eqns)


def _body(scan):
    return scan.params["jaxpr"].jaxpr


def _scans(closed, num_leaves):
    """The outermost scans, and whether each reads the example."""
    inputs = closed.jaxpr.invars
    known = _which_are_data(
        closed.jaxpr, {v: i >= num_leaves for i, v in enumerate(inputs)}
    )
    return [
        (equation, any(known[a] for a in _variables(equation.invars)))
        for equation in _equations(closed.jaxpr, "scan")
    ]


def _variables(atoms):
    return [atom for atom in atoms if isinstance(atom, core.Var)]


def _assert_only_data_in_loops(jaxpr, is_data):
    """Every equation in the body of a loop over data reads data.

    Args:
      jaxpr: the equations.
      is_data: by variable, for its inputs.
    """
    known = _which_are_data(jaxpr, is_data)
    for equation in jaxpr.eqns:
        flags = [isinstance(a, core.Var) and known[a] for a in equation.invars]
        if equation.primitive.name == "scan" and any(flags):
            body, inside = _inside(equation, flags)
            known_inside = _which_are_data(body, inside)
            for inner in body.eqns:
                assert known_inside[inner.outvars[0]], f"{inner} was left in a loop"
            _assert_only_data_in_loops(body, inside)


def _inside(equation, flags):
    """A scan's body, and which of its inputs are data, given which operands are."""
    scan = _compat.as_scan(equation)
    inside = dict(zip(scan.jaxpr.invars, flags, strict=True))
    for _ in range(scan.num_carry):
        known = _which_are_data(scan.jaxpr, inside)
        after = scan.jaxpr.outvars[: scan.num_carry]
        for before, variable in zip(
            scan.jaxpr.invars[scan.carried], after, strict=True
        ):
            inside[before] |= isinstance(variable, core.Var) and known[variable]
    return scan.jaxpr, inside


def _which_are_data(jaxpr, is_data):
    """By variable, whether it depends on an input that is data."""
    known = dict.fromkeys(jaxpr.constvars, False) | is_data
    for equation in jaxpr.eqns:
        flag = any(known[a] for a in _variables(equation.invars))
        known.update(dict.fromkeys(equation.outvars, flag))
    return known


@with_each_case
def test_values_and_derivatives_are_unchanged(case):
    closed = _trace(case)
    args = (*case.leaves, np.float32(0), X_TxD)
    rewritten = core.jaxpr_as_fun(closed)
    argnums = tuple(range(len(case.leaves)))

    def total(fun, *args):
        results = fun(*args)
        return sum(jnp.sum(jnp.sin(x)) for x in results), results

    @jax.jit
    def both(*args):
        derive = jax.value_and_grad(
            total, argnums=tuple(i + 1 for i in argnums), has_aux=True
        )
        return derive(case.fun, *args), derive(rewritten, *args)

    expected, got = jax.device_get(both(*args))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(b, a, rtol=2e-5, atol=1e-6),
        expected,
        got,
    )


@with_each_case
def test_loops_over_data_hold_nothing_on_parameters_alone(case):
    jaxpr = _trace(case).jaxpr
    is_data = {v: i >= len(case.leaves) for i, v in enumerate(jaxpr.invars)}
    _assert_only_data_in_loops(jaxpr, is_data)


def test_what_is_the_same_in_all_steps_is_computed_once():
    closed = _trace(CASES["same for all steps"])
    (scan,) = _equations(closed.jaxpr, "scan")
    shapes = [e.outvars[0].aval.shape for e in _equations(closed.jaxpr, "concatenate")]
    assert shapes == [(WIDTH + 1, WIDTH)]
    assert _names(_body(scan))["concatenate"] == 1  # Of the state and the input.
    (concatenate,) = _equations(closed.jaxpr, "concatenate")
    assert concatenate.outvars[0] in scan.invars


def test_what_each_step_has_its_own_of_is_stacked_without_a_loop():
    closed = _trace(CASES["own for each step"])
    (scan,) = _equations(closed.jaxpr, "scan")
    (cos,) = _equations(closed.jaxpr, "cos")
    assert cos.outvars[0].aval.shape == W_TxDxD.shape
    assert cos.outvars[0] in scan.invars
    assert "cos" not in _names(_body(scan))


def test_what_parameters_alone_carry_gets_a_loop_of_its_own():
    case = CASES["carried by parameters alone"]
    closed = _trace(case)
    scans = _scans(closed, len(case.leaves))
    assert [is_data for _, is_data in scans] == [False, True]
    (own, _), (rest, _) = scans
    assert _names(_body(own))["sin"] == 1
    assert _names(_body(rest))["sin"] == 0
    assert own.params["length"] == rest.params["length"] == STEPS


@pytest.mark.parametrize(
    "name", ["learned first state", "loop in a loop", "parameter put into the state"]
)
def test_parameters_in_the_state_meet_the_anchor(name):
    case = CASES[name]
    rewritten = core.jaxpr_as_fun(_trace(case))

    def total(anchor, fun):
        return sum(map(jnp.sum, fun(*case.leaves, anchor, X_TxD)))

    assert jax.grad(total)(0.0, rewritten) != 0
    # The function itself does not use it.
    assert jax.grad(total)(0.0, case.fun) == 0


def test_what_is_carried_through_becomes_a_constant():
    case = CASES["carried through"]
    closed = _trace(case)
    (scan,) = _equations(closed.jaxpr, "scan")
    assert [v.aval.shape for v in scan.outvars] == [(WIDTH,)]
    (kernel,) = [
        v for v in scan.invars if v.aval.ndim == 2 and v.aval.shape != X_TxD.shape
    ]
    assert kernel is closed.jaxpr.invars[0]
    # It is handed out as it came.
    assert closed.jaxpr.outvars[1] is closed.jaxpr.invars[0]


def test_direction_and_unrolling_are_kept():
    case = CASES["backwards and unrolled"]
    for scan, _ in _scans(_trace(case), len(case.leaves)):
        assert scan.params["reverse"]
        assert scan.params["unroll"] == 2


def test_loops_of_no_steps_are_left_alone():
    def fun(v_D, anchor, x_TxD):
        def step(h_D, x_D):
            return h_D * x_D + jnp.exp(v_D), h_D

        last_D, states = jax.lax.scan(step, v_D, x_TxD[:0])
        return [last_D + x_TxD[0], states]

    closed = _trace(Case(fun, (V_D,)))
    (scan,) = _equations(closed.jaxpr, "scan")
    assert scan.params["length"] == 0
    assert _names(_body(scan))["exp"] == 1
    last_D, states = core.jaxpr_as_fun(closed)(V_D, np.float32(0), X_TxD)
    np.testing.assert_allclose(last_D, V_D + X_TxD[0], rtol=1e-6)
    assert states.shape == (0, WIDTH)


def test_loops_without_parameters_are_left_alone():
    def fun(v_D, anchor, x_TxD):
        last_D, _ = jax.lax.scan(
            lambda h_D, x_D: (h_D + x_D * jnp.cos(jnp.ones(WIDTH)), None),
            jnp.zeros(WIDTH),
            x_TxD,
        )
        return [last_D * v_D]

    (scan,) = _equations(_trace(Case(fun, (V_D,))).jaxpr, "scan")
    assert _names(_body(scan))["cos"] == 1


def test_calls_stand_in_line():
    @jax.jit
    def inner(w_DxD, x_D):
        return jax.jit(jnp.tanh)(x_D @ w_DxD)

    closed = _trace(Case(lambda w, anchor, x: [inner(w, x)], (W_DxD,)))
    assert _names(closed.jaxpr) == {"dot_general": 1, "tanh": 1}


def _with_remat(w_DxD, anchor, x_TxD):
    @jax.checkpoint
    def layer(w_DxD, x_TxD):
        return jnp.tanh(x_TxD @ jnp.cos(w_DxD)), jnp.exp(w_DxD)

    return list(layer(w_DxD, x_TxD))


def test_remat_is_opened():
    closed = _trace(Case(_with_remat, (W_DxD,)))
    assert _names(closed.jaxpr) == {"cos": 1, "dot_general": 1, "tanh": 1, "exp": 1}


def test_remat_is_kept_around_what_reads_the_example():
    closed = _trace(Case(_with_remat, (W_DxD,)), keep_remat=True)
    (remat,) = [e for e in closed.jaxpr.eqns if e.primitive is primitives.remat_p]
    assert _names(closed.jaxpr) == {"cos": 1, "exp": 1, remat.primitive.name: 1}
    inside = _names(remat.params["jaxpr"])
    assert (inside["dot_general"], inside["tanh"]) == (1, 1)
    assert not {"cos", "exp"} & set(inside)
    got = core.jaxpr_as_fun(closed)(W_DxD, np.float32(0), X_TxD)
    for a, b in zip(_with_remat(W_DxD, 0.0, X_TxD), got, strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-6)


def test_remat_keeps_its_policy():
    policy = jax.checkpoint_policies.dots_saveable

    def fun(w_DxD, anchor, x_TxD):
        layer = jax.checkpoint(
            lambda w, x: jnp.tanh(x @ w), policy=policy, prevent_cse=False
        )
        return [layer(w_DxD, x_TxD)]

    closed = _trace(Case(fun, (W_DxD,)), keep_remat=True)
    (remat,) = closed.jaxpr.eqns
    assert remat.params["policy"] is policy
    assert remat.params["prevent_cse"] is False


NUM_CARRY = 3
_OPS = (jnp.add, jnp.multiply, lambda a, b: jnp.sin(a) - b)


class _Step(NamedTuple):
    """A random loop body over scalars.

    Attributes:
      first: for each carried scalar, whether it starts as a leaf (else as data).
      equations: (operation, two registers); each makes one more register.
      after: the registers that are carried on.
      outputs: the registers that are put out.
    """

    first: list
    equations: list
    after: list
    outputs: list


@st.composite
def _random_steps(draw):
    # Registers: a shared leaf, a leaf per step, shared data, data per step, the carry.
    count = 4 + NUM_CARRY
    equations = []
    for _ in range(draw(st.integers(1, 5))):
        register = st.integers(0, count - 1)
        equations.append((draw(st.integers(0, 2)), draw(register), draw(register)))
        count += 1
    some = st.integers(0, count - 1)
    return _Step(
        draw(st.lists(st.booleans(), min_size=NUM_CARRY, max_size=NUM_CARRY)),
        equations,
        draw(st.lists(some, min_size=NUM_CARRY, max_size=NUM_CARRY)),
        draw(st.lists(some, min_size=1, max_size=2)),
    )


@hypothesis.settings(max_examples=25)
@hypothesis.given(_random_steps())
def test_random_loops(drawn):
    def fun(leaf, leaf_T, anchor, x, x_T):
        def step(carry, entries):
            leaf_t, x_t = entries
            registers = [leaf, leaf_t, x, x_t, *carry]
            for op, a, b in drawn.equations:
                registers.append(_OPS[op](registers[a], registers[b]))
            after = [registers[i] for i in drawn.after]
            return after, [registers[i] for i in drawn.outputs]

        first = [leaf * (i + 1) if p else x - i for i, p in enumerate(drawn.first)]
        last, stacked = jax.lax.scan(step, first, (leaf_T, x_T))
        return [*last, *stacked]

    args = np.float32(0.6), V_D, np.float32(0), np.float32(-0.8), X_TxD[0]
    closed = normal_form.trace(fun, _specs(*args), 2)
    jaxpr = closed.jaxpr
    _assert_only_data_in_loops(jaxpr, {v: i >= 2 for i, v in enumerate(jaxpr.invars)})
    with jax.disable_jit():
        expected = fun(*args)
        got = core.jaxpr_as_fun(closed)(*args)
    for a, b in zip(expected, got, strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-6)
