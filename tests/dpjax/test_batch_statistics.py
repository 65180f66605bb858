"""Batch statistics are refused by name; frozen ones in other arguments are welcome."""

import types

import flax.core
import flax.errors
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dpjax import batch_statistics, clipped_grad, explain, per_example_grad_norms

METHODS = ("auto", "bookkeeping", "reweight", "vmap")
REMEDY = "GroupNorm or LayerNorm, or use_running_average=True"


class LinenModel(nn.Module):
    """A hidden layer that is normalised over the batch, or by running averages."""

    @nn.compact
    def __call__(self, x_BxD, *, train):
        hidden_BxH = nn.Dense(5)(x_BxD)
        normal_BxH = nn.BatchNorm(use_running_average=not train)(hidden_BxH)
        return nn.Dense(1)(nn.tanh(normal_BxH))


class NnxModel(nnx.Module):
    """The same."""

    def __init__(self, rngs):
        self.hidden = nnx.Linear(3, 5, rngs=rngs)
        self.norm = nnx.BatchNorm(5, rngs=rngs)
        self.head = nnx.Linear(5, 1, rngs=rngs)

    def __call__(self, x_BxD):
        return self.head(nnx.tanh(self.norm(self.hidden(x_BxD))))


def _x():
    return jnp.asarray(np.random.default_rng(0).standard_normal((6, 3)), jnp.float32)


@pytest.fixture(scope="module")
def linen():
    """Variables with running averages unlike those of a fresh model."""
    variables = LinenModel().init(jax.random.key(0), _x(), train=True)
    statistics = jax.tree.map(lambda s: s + 0.5, variables["batch_stats"])
    return variables["params"], statistics


def _training_loss(params, x_BxD, statistics):
    variables = {"params": params, "batch_stats": statistics}
    out, updates = LinenModel().apply(
        variables, x_BxD, train=True, mutable=["batch_stats"]
    )
    return jnp.mean(out**2), updates


def _frozen_loss(params, x_BxD, statistics):
    variables = {"params": params, "batch_stats": statistics}
    return jnp.mean(LinenModel().apply(variables, x_BxD, train=False) ** 2)


def _is_one_line(error):
    return "\n" not in str(error.value)


@pytest.mark.parametrize("method", METHODS)
def test_updated_linen_statistics_are_refused(linen, method):
    params, statistics = linen
    grad_fn = clipped_grad(_training_loss, has_aux=True, l2_clip_norm=1, method=method)
    path = r"^aux\['batch_stats'\]\['BatchNorm_0'\]\['mean'\] is a batch statistic "
    with pytest.raises(ValueError, match=path + rf"\(and 1 more\).*{REMEDY}") as error:
        grad_fn(params, _x(), statistics)
    assert _is_one_line(error)


@pytest.mark.parametrize("transform", [per_example_grad_norms, explain])
def test_norms_and_explain_refuse_them_too(linen, transform):
    params, statistics = linen
    with pytest.raises(ValueError, match=r"^aux\['batch_stats'\]"):
        transform(_training_loss, params, _x(), statistics, has_aux=True)


@pytest.mark.parametrize(
    ("wrap", "path"),
    [
        (lambda u: u["batch_stats"], r"aux\['BatchNorm_0'\]\['mean'\]"),
        (lambda u: (jnp.zeros(()), u), r"aux\[1\]\['batch_stats'\]"),
        (flax.core.freeze, r"aux\['batch_stats'\]\['BatchNorm_0'\]\['mean'\]"),
    ],
    ids=["collection", "tuple", "FrozenDict"],
)
def test_ways_of_returning_linen_statistics(linen, wrap, path):
    params, statistics = linen

    def loss(*args):
        value, updates = _training_loss(*args)
        return value, wrap(updates)

    grad_fn = clipped_grad(loss, has_aux=True, l2_clip_norm=1.0)
    with pytest.raises(ValueError, match=path):
        grad_fn(params, _x(), statistics)


@pytest.mark.parametrize("method", METHODS)
def test_linen_statistics_among_the_parameters_are_refused(linen, method):
    params, statistics = linen
    variables = {"params": params, "batch_stats": statistics}

    def loss(variables, x_BxD):
        return _frozen_loss(variables["params"], x_BxD, variables["batch_stats"])

    grad_fn = clipped_grad(loss, l2_clip_norm=1.0, method=method)
    path = r"^the parameter \['batch_stats'\]\['BatchNorm_0'\]\['mean'\] is a batch "
    with pytest.raises(ValueError, match=path + f".*{REMEDY}") as error:
        grad_fn(variables, _x())
    assert _is_one_line(error)


def test_statistics_in_one_of_several_parameter_arguments_are_refused(linen):
    params, statistics = linen
    grad_fn = clipped_grad(_frozen_loss, argnums=(0, 2), l2_clip_norm=1.0)
    with pytest.raises(
        ValueError, match=r"the parameter \[1\]\['BatchNorm_0'\]\['mean'\]"
    ):
        grad_fn(params, _x(), statistics)


@pytest.mark.parametrize("method", METHODS)
def test_frozen_linen_statistics_in_another_argument_work(
    linen, method, float64_reference, assert_clipped_sum
):
    params, statistics = linen

    def closed(params, x_BxD):
        return _frozen_loss(params, x_BxD, statistics)

    reference = float64_reference(closed, params, (_x(),))
    grad_fn = clipped_grad(
        _frozen_loss,
        l2_clip_norm=reference.clip_norm,
        return_grad_norms=True,
        method=method,
    )
    total, aux = grad_fn(params, _x(), statistics)
    np.testing.assert_allclose(aux.grad_norms, reference.norms_B, rtol=1e-5)
    assert_clipped_sum(total, reference, 1e-5)


@pytest.fixture(scope="module")
def nnx_split():
    return nnx.split(NnxModel(nnx.Rngs(0)), nnx.Param, nnx.BatchStat)


def test_nnx_refuses_to_update_statistics_of_another_trace(nnx_split):
    """What `fun` drops has no name to find, but Flax does not let it be updated."""
    graph, params, statistics = nnx_split

    def loss(params, x_BxD, statistics):
        return jnp.mean(nnx.merge(graph, params, statistics)(x_BxD) ** 2)

    with pytest.raises(flax.errors.TraceContextError, match="Cannot mutate BatchStat"):
        clipped_grad(loss, l2_clip_norm=1.0)(params, _x(), statistics)


def test_updated_nnx_statistics_are_refused(nnx_split):
    graph, params, statistics = nnx_split

    def loss(params, x_BxD, statistics):
        model = nnx.merge(graph, params, statistics, copy=True)
        out = model(x_BxD)
        return jnp.mean(out**2), nnx.state(model, nnx.BatchStat)

    grad_fn = clipped_grad(loss, has_aux=True, l2_clip_norm=1.0)
    path = r"^aux\['norm'\]\['mean'\] is a batch statistic \(and 1 more\)"
    with pytest.raises(ValueError, match=f"{path}.*{REMEDY}") as error:
        grad_fn(params, _x(), statistics)
    assert _is_one_line(error)


def test_nnx_statistics_among_the_parameters_are_refused():
    graph, state = nnx.split(NnxModel(nnx.Rngs(0)))

    def loss(state, x_BxD):
        return jnp.mean(nnx.merge(graph, state)(x_BxD) ** 2)

    path = r"^the parameter \['norm'\]\['mean'\] is a batch statistic"
    with pytest.raises(ValueError, match=path):
        clipped_grad(loss, l2_clip_norm=1.0)(state, _x())


@pytest.mark.parametrize("method", METHODS)
def test_frozen_nnx_statistics_in_another_argument_work(
    nnx_split, method, float64_reference, assert_clipped_sum
):
    graph, params, statistics = nnx_split

    def loss(params, x_BxD, statistics):
        model = nnx.merge(graph, params, statistics)
        return jnp.mean(nnx.view(model, use_running_average=True)(x_BxD) ** 2)

    def closed(params, x_BxD):
        return loss(params, x_BxD, statistics)

    reference = float64_reference(closed, params, (_x(),))
    grad_fn = clipped_grad(loss, l2_clip_norm=reference.clip_norm, method=method)
    assert_clipped_sum(grad_fn(params, _x(), statistics), reference, 1e-5)


@pytest.mark.parametrize(
    "tree",
    [
        None,
        {"mean": 1.0, "var": 2.0},
        {"BatchNorm_0": {"scale": 1.0, "bias": 2.0}},
        {"LayerNorm_0": {"mean": 1.0}},
        {"batch_stats": {}},
        {0: {"loss": 1.0}},
    ],
)
def test_other_names_pass(tree):
    batch_statistics.require_none(tree, "aux")


def test_statistics_held_by_an_object_are_found():
    state = jax.tree_util.register_dataclass(
        types.new_class("State", (types.SimpleNamespace,)),
        data_fields=["batch_stats"],
        meta_fields=[],
    )
    with pytest.raises(ValueError, match=r"^aux\.batch_stats\['norm'\] is a batch"):
        batch_statistics.require_none(state(batch_stats={"norm": 1.0}), "aux")
