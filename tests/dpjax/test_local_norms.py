"""Local norms: which parameters have one, and that it is book-keeping's."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import bookkeeping, local_norms, recording, reweighting, tracing
from dpjax.calling import Convention
from dpjax.planning import Rule

BATCH, LENGTH, WIDTH, LAYERS = 2, 3, 4, 2


def _array(*shape, seed=0):
    values = np.random.default_rng(seed).normal(size=shape)
    return jnp.asarray(values, jnp.float32)


X_BxTxD = _array(BATCH, LENGTH, WIDTH, seed=1)
X_BxD = _array(BATCH, WIDTH, seed=2)


def _dense(params, x):
    bias = params["bias"].reshape((1,) * (x.ndim - 1) + (-1,))
    return jnp.sum(jnp.tanh(x @ params["kernel"] + bias) ** 2)


DENSE = {"kernel": _array(WIDTH, 5), "bias": _array(5)}


def _layer_norm(params, x_BxTxD):
    x_BxTxD = x_BxTxD * params["scale"][None, None] + params["shift"][None, None]
    return jnp.sum(jnp.sin(x_BxTxD))


def _scanned_layers(params, x_BxTxD):
    def layer(x_BxTxD, own):
        return jnp.tanh(x_BxTxD @ own["kernel"] + own["bias"][None, None]), None

    return jnp.sum(jax.lax.scan(layer, x_BxTxD, params)[0])


SCANNED = {"kernel": _array(LAYERS, WIDTH, WIDTH), "bias": _array(LAYERS, WIDTH)}


def _recurrent(params, x_BxTxD):
    def step(h_BxD, x_BxD):
        return jnp.tanh(h_BxD @ params["again"] + x_BxD), None

    first_BxD = jnp.zeros((x_BxTxD.shape[0], WIDTH))
    last_BxD, _ = jax.lax.scan(step, first_BxD, x_BxTxD.swapaxes(0, 1))
    return jnp.sum(last_BxD @ params["head"])


def _shared(params, x_BxD):
    hidden_BxD = jnp.tanh(x_BxD @ params["twice"])
    return jnp.sum(jnp.tanh(hidden_BxD @ params["twice"]) * params["scale"][None])


def _split(params, x_BxD):
    q, k = jnp.split(params["fused"], 2, axis=1)
    return jnp.sum(jnp.sin(x_BxD @ q) * jnp.cos(x_BxD @ k))


def _overlapping(params, x_BxD):
    kernel = params["fused"]
    return jnp.sum(jnp.sin(x_BxD @ kernel[:, :3]) * jnp.cos(x_BxD @ kernel[:, 2:5]))


def _partly_used(params, x_BxD):
    return jnp.sum(jnp.sin(x_BxD[:, 1:3] @ params["kernel"][1:3]))


def _scaled(params, x_BxD):
    return jnp.sum(jnp.sin(x_BxD @ (-3.0 * params["kernel"])))


def _two_factors(params, x_BxD):
    return jnp.sum(jnp.sin(x_BxD @ (params["a"] @ params["b"])))


def _unused(params, x_BxD):
    return jnp.sum(jnp.sin(x_BxD @ params["kernel"]))


def _embedding(params, x_BxD):
    ids_BxT = (jnp.abs(x_BxD) * 3).astype(jnp.int32)
    return jnp.sum(jnp.sin(params["table"][ids_BxT]))


def _remat(params, x_BxTxD):
    return jax.checkpoint(_dense)(params, x_BxTxD)


def _weight(*shape):
    return _array(*shape, seed=5)


CASES = {
    "dense": (_dense, DENSE, X_BxD, {"kernel", "bias"}),
    "dense over positions": (_dense, DENSE, X_BxTxD, {"kernel", "bias"}),
    "dense in remat": (_remat, DENSE, X_BxTxD, {"kernel", "bias"}),
    "scale and shift": (
        _layer_norm,
        {"scale": _weight(WIDTH), "shift": _weight(WIDTH)},
        X_BxTxD,
        {"scale", "shift"},
    ),
    "scanned layers": (_scanned_layers, SCANNED, X_BxTxD, {"kernel", "bias"}),
    "recurrent": (
        _recurrent,
        {"again": _weight(WIDTH, WIDTH), "head": _weight(WIDTH, 2)},
        X_BxTxD,
        {"head"},
    ),
    "shared": (
        _shared,
        {"twice": _weight(WIDTH, WIDTH), "scale": _weight(WIDTH)},
        X_BxD,
        {"scale"},
    ),
    "split": (_split, {"fused": _weight(WIDTH, 6)}, X_BxD, {"fused"}),
    "overlapping": (_overlapping, {"fused": _weight(WIDTH, 6)}, X_BxD, set()),
    "partly used": (_partly_used, {"kernel": _weight(WIDTH, 6)}, X_BxD, {"kernel"}),
    "scaled": (_scaled, {"kernel": _weight(WIDTH, 6)}, X_BxD, {"kernel"}),
    "two factors": (
        _two_factors,
        {"a": _weight(WIDTH, 2), "b": _weight(2, 3)},
        X_BxD,
        set(),
    ),
    "unused": (
        _unused,
        {"kernel": _weight(WIDTH, 2), "other": _weight(3)},
        X_BxD,
        {"kernel"},
    ),
    "embedding": (_embedding, {"table": _weight(9, 2)}, X_BxD, {"table"}),
}
with_each_case = pytest.mark.parametrize("name", CASES)


def _found(name):
    fun, params, x, _ = CASES[name]
    call = Convention(fun).bind((params, x), {})
    traced = tracing.trace(call, keep_remat=True)
    local = local_norms.find(traced.function, traced.components)
    return call, traced, local


@with_each_case
def test_which_parameters_are_local(name):
    call, _, local = _found(name)
    assert {call.paths[leaf] for leaf in local.leaves} == {
        f"['{parameter}']" for parameter in CASES[name][3]
    }
    rest = {leaf for component in local.rest for leaf in component.leaves}
    assert rest | local.leaves == set(range(len(call.leaves)))
    assert not rest & local.leaves


def _instantiated(component):
    """The component by the other rule for products."""
    if component.rule is not Rule.GRAM:
        return component
    return dataclasses.replace(component, rule=Rule.INSTANTIATED, boxes=())


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case[3]])
def test_numbers_are_those_of_bookkeeping(name):
    call, traced, local = _found(name)
    function, components = traced.function, traced.components
    by_forming = local_norms.find(function, list(map(_instantiated, components)))
    assert by_forming.leaves == local.leaves
    inputs = [jnp.zeros(call.batch_size), *call.examples]

    def record(local=None):
        return recording.record(function, call.leaves, inputs, jax.vmap, local)

    def compute():
        norms = bookkeeping.squared_norms(record(), components)
        expected = sum(norms.squared[leaf].value for leaf in local.leaves)
        return expected, record(local).local, record(by_forming).local

    options = {"xla_backend_optimization_level": 0}
    expected_B, *found = jax.jit(compute, compiler_options=options)()
    assert jnp.all(expected_B > 1e-3)
    for value_B, rounding_B in found:
        np.testing.assert_allclose(value_B, expected_B, rtol=1e-5)
        assert jnp.all((rounding_B > 0) & (rounding_B < 1e-3 * value_B))


def test_nothing_is_kept_for_local_taps():
    call, traced, local = _found("shared")
    inputs = [jnp.zeros(call.batch_size), *call.examples]
    records = recording.record(
        traced.function, call.leaves, inputs, jax.vmap, local, chosen=[0, 1]
    )
    kept = [i for i, met in enumerate(records.taps) if met is not None]
    assert sorted([*kept, *local.at_taps]) == list(range(len(traced.function.taps)))
    assert {use.tap for c in local.rest for use in c.uses} <= set(kept)


def test_without_local_norms_there_are_no_numbers():
    call, traced, local = _found("overlapping")
    assert not local.at_taps
    assert local.zeros() is None
    inputs = [jnp.zeros(call.batch_size), *call.examples]
    records = recording.record(
        traced.function, call.leaves, inputs, jax.vmap, local, chosen=[0]
    )
    assert records.local is None


def test_weighted_gradients_are_those_of_the_weighted_loss():
    fun, params, x_BxD, _ = CASES["shared"]
    call, traced, local = _found("shared")
    inputs = [jnp.zeros(call.batch_size), *call.examples]
    weights_B = jnp.array([0.5, 2.0])

    @jax.jit
    def compute():
        records = recording.record(
            traced.function, call.leaves, inputs, jax.vmap, local, chosen=[1, 0]
        )
        return records.weighted_gradients(weights_B)

    def weighted_loss(params):
        losses_B = jax.vmap(lambda x_D: fun(params, x_D[None]))(x_BxD)
        return jnp.sum(weights_B * losses_B)

    expected = jax.tree.leaves(jax.jit(jax.grad(weighted_loss))(params))
    for found, wanted in zip(compute(), expected[::-1], strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_leaves_that_were_formed_for_their_norms_are_not_chosen_again():
    for name, chosen in (("two factors", []), ("shared", [0, 1]), ("unused", [0, 1])):
        _, traced, _ = _found(name)
        plan = reweighting.plan(traced.function, traced.components)
        assert plan.chosen == chosen
