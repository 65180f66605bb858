"""Which rule each parameter gets: a golden list, so that none gets slow unnoticed."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from dpjax import clipped_grad, explain
from dpjax.planning import Rule

GRAM, INSTANTIATED = Rule.GRAM, Rule.INSTANTIATED
ELEMENTWISE, FALLBACK, UNUSED = Rule.ELEMENTWISE, Rule.FALLBACK, Rule.UNUSED


def _rules(fun, params, *batch, **options):
    explanation = explain(
        fun, params, *batch, batch_argnums=tuple(range(1, len(batch) + 1)), **options
    )
    return {row.parameter: row.rule for row in explanation.rows}


def _loss_of(model, *batch):
    params = jax.eval_shape(model.init, jax.random.key(0), *batch)["params"]
    params = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), params)
    return lambda params, *x: jnp.sum(model.apply({"params": params}, *x)), params


def test_dense_layers():
    model = nn.Sequential([nn.Dense(5), nn.relu, nn.LayerNorm(), nn.Dense(3)])
    fun, params = _loss_of(model, jnp.ones((2, 4)))
    assert _rules(fun, params, jnp.ones((2, 4))) == {
        "['layers_0']['bias']": ELEMENTWISE,
        "['layers_0']['kernel']": GRAM,
        "['layers_2']['bias']": ELEMENTWISE,
        "['layers_2']['scale']": ELEMENTWISE,
        "['layers_3']['bias']": ELEMENTWISE,
        "['layers_3']['kernel']": GRAM,
    }


def test_convolutions_are_planned_by_size():
    model = nn.Sequential(
        [nn.Conv(2, (3, 3)), nn.Conv(64, (1, 1), strides=4), nn.Conv(64, (3, 3))]
    )
    fun, params = _loss_of(model, jnp.ones((2, 16, 16, 1)))
    rules = _rules(fun, params, jnp.ones((2, 16, 16, 1)))
    assert rules["['layers_0']['kernel']"] is INSTANTIATED
    assert rules["['layers_2']['kernel']"] is GRAM
    assert rules["['layers_0']['bias']"] is ELEMENTWISE


def test_attention_and_embeddings():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, ids):
            embed = nn.Embed(1000, 8)
            positions = self.param("positions", nn.initializers.ones, (32, 8))
            x = embed(ids) + positions[None, : ids.shape[1]]
            x = x + nn.MultiHeadDotProductAttention(num_heads=2)(x)
            return embed.attend(x)

    ids = jnp.zeros((2, 6), jnp.int32)
    fun, params = _loss_of(Model(), ids)
    rules = _rules(fun, params, ids)
    assert rules["['Embed_0']['embedding']"] is GRAM
    assert rules["['positions']"] is ELEMENTWISE
    assert FALLBACK not in rules.values()
    assert all(
        rule in (GRAM, INSTANTIATED)
        for name, rule in rules.items()
        if name.endswith("['kernel']")
    )


@pytest.mark.parametrize(
    ("fun", "rule"),
    [
        (lambda w, x: jnp.sum(x @ w), GRAM),
        (lambda w, x: jnp.sum(x @ w.T), GRAM),
        (lambda w, x: jnp.sum(x @ (w @ w.T)), FALLBACK),
        (lambda w, x: jnp.sum(jnp.tanh(x @ w) @ w), GRAM),
        (lambda w, x: jnp.sum(jnp.tanh(x @ w) @ w.T), GRAM),
        (lambda w, x: jnp.sum(x @ w) + jnp.sum(w**2), FALLBACK),
        (lambda w, x: jnp.sum(w**2), ELEMENTWISE),
        (lambda w, x: jnp.sum(x) + 0 * jnp.sum(jax.lax.stop_gradient(w)), UNUSED),
        (lambda w, x: jnp.sum(x @ w.astype(jnp.bfloat16).astype(jnp.float32)), GRAM),
        (lambda w, x: jnp.sum(x[:, :2] @ w[1:3]), GRAM),
        (lambda w, x: jnp.sum(x * (w > 0)[:1]), UNUSED),
        (lambda w, x: jnp.sum(x), UNUSED),
        (lambda w, x: jnp.sum(jnp.linalg.solve(w + 9 * jnp.eye(4), x[0])), FALLBACK),
    ],
)
def test_ways_of_using_one_weight(fun, rule):
    assert _rules(fun, jnp.ones((4, 4)), jnp.ones((2, 4))) == {"the parameter": rule}


def test_a_fallback_is_named_in_the_table_and_by_strict():
    def fun(params, x):
        return jnp.sum(x @ (params["a"] @ params["b"])) + jnp.sum(x * params["c"])

    params = {"a": jnp.ones((4, 2)), "b": jnp.ones((2, 3)), "c": jnp.ones((1, 4))}
    x = jnp.ones((2, 4))
    explanation = explain(fun, params, x)
    assert explanation.fallbacks == ("['a']", "['b']")
    assert "No norm rule covers ['a'], ['b']" in str(explanation)
    with pytest.raises(ValueError, match=r"strict=True.*\['a'\], \['b'\].*dot_general"):
        explain(fun, params, x, strict=True)
    for method in ("bookkeeping", "reweight", "vmap"):
        grad_fn = clipped_grad(fun, l2_clip_norm=1.0, strict=True, method=method)
        with pytest.raises(ValueError, match=r"strict=True.*\['a'\], \['b'\]"):
            grad_fn(params, x)


def test_strict_accepts_what_rules_cover():
    grad_fn = clipped_grad(lambda w, x: jnp.sum(x @ w), l2_clip_norm=1.0, strict=True)
    assert grad_fn(jnp.ones(3), jnp.ones((2, 3))).shape == (3,)


def test_table_has_a_row_for_each_parameter():
    model = nn.Sequential([nn.Dense(5), nn.Dense(3)])
    fun, params = _loss_of(model, jnp.ones((2, 4)))
    lines = str(explain(fun, params, jnp.ones((2, 4)))).splitlines()
    assert lines[0].split()[:2] == ["parameter", "shape"]
    assert len(lines) == 2 + 4 + 1
    assert lines[3].startswith("['layers_0']['kernel']  4x5    dot_general    gram")
