"""Parameters that are never used, and parameters used where no norm rule reaches."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

from dpjax import clipped_grad, explain, per_example_grad_norms
from dpjax.planning import Rule

METHODS = ("bookkeeping", "reweight", "vmap")


def _x():
    return jnp.asarray(np.random.default_rng(0).standard_normal((5, 3)), jnp.float32)


class LinenHeads(nn.Module):
    """Two heads, the second of which the loss leaves out."""

    @nn.compact
    def __call__(self, x_BxD, num_heads=2):
        hidden_BxH = nn.tanh(nn.Dense(4)(x_BxD))
        names = ("used", "spare")[:num_heads]
        return [nn.Dense(2, name=name)(hidden_BxH) for name in names]


class NnxHeads(nnx.Module):
    """A head that is never called."""

    def __init__(self, rngs):
        self.hidden = nnx.Linear(3, 4, rngs=rngs)
        self.heads = nnx.Dict(
            used=nnx.Linear(4, 2, rngs=rngs), spare=nnx.Linear(4, 2, rngs=rngs)
        )

    def __call__(self, x_BxD):
        return self.heads["used"](nnx.tanh(self.hidden(x_BxD)))


def _nested():
    params = {
        "blocks": [{"w": jnp.eye(3, 2), "spare": [jnp.ones(2), jnp.ones(())]}],
        "spare": (jnp.ones((2, 2), jnp.bfloat16), None),
    }

    def loss(params, x_BxD):
        return jnp.mean(jnp.tanh(x_BxD @ params["blocks"][0]["w"]) ** 2), ()

    return loss, params


def _linen(num_heads):
    params = jax.jit(LinenHeads().init)(jax.random.key(0), _x())["params"]

    def loss(params, x_BxD):
        used_BxC, *aux = LinenHeads().apply({"params": params}, x_BxD, num_heads)
        return jnp.mean(used_BxC**2), aux

    return loss, params


def _linen_not_called():
    return _linen(num_heads=1)


def _linen_in_aux_alone():
    return _linen(num_heads=2)


def _nnx():
    graph, params = nnx.split(NnxHeads(nnx.Rngs(0)), nnx.Param)

    def loss(params, x_BxD):
        return jnp.mean(nnx.merge(graph, params)(x_BxD) ** 2), ()

    return loss, params


NOT_CALLED = [_nested, _linen_not_called, _nnx]
STRUCTURES = pytest.mark.parametrize("make", [*NOT_CALLED, _linen_in_aux_alone])


def _with_paths(tree):
    return [
        (jax.tree_util.keystr(path), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]


def _assert_spare_leaves_are_zero(grads):
    spare = [leaf for path, leaf in _with_paths(grads) if "spare" in path]
    used = [leaf for path, leaf in _with_paths(grads) if "spare" not in path]
    assert len(spare) >= 2
    assert not any(np.any(leaf) for leaf in spare)
    assert all(np.any(leaf) for leaf in used)


@STRUCTURES
@pytest.mark.parametrize("method", METHODS)
def test_an_unused_parameter_has_zero_gradient_and_norm(
    make, method, float64_reference, assert_clipped_sum
):
    loss, params = make()
    reference = float64_reference(lambda *args: loss(*args)[0], params, (_x(),))
    grad_fn = clipped_grad(
        loss,
        has_aux=True,
        l2_clip_norm=reference.clip_norm,
        return_grad_norms=True,
        method=method,
    )
    total, aux = grad_fn(params, _x())
    _assert_spare_leaves_are_zero(total)
    assert_clipped_sum(total, reference, 1e-5)
    np.testing.assert_allclose(aux.grad_norms, reference.norms_B, rtol=1e-5)


@STRUCTURES
@pytest.mark.parametrize(
    ("method", "rescale"),
    [("bookkeeping", False), ("bookkeeping", True), ("vmap", True)],
)
def test_an_unused_parameter_with_a_clip_norm_of_its_own(make, method, rescale):
    loss, params = make()
    clip_norms = jax.tree.map(lambda leaf: 0.01, params)
    total = clipped_grad(
        loss,
        has_aux=True,
        l2_clip_norm=clip_norms,
        rescale_to_unit_norm=rescale,
        method=method,
    )(params, _x())[0]
    _assert_spare_leaves_are_zero(total)
    grads = jax.vmap(lambda x_D: jax.grad(lambda p: loss(p, x_D[None])[0])(params))(
        _x()
    )
    for (path, got), (_, leaf) in zip(
        _with_paths(total), _with_paths(grads), strict=True
    ):
        grads_BxN = np.asarray(leaf, np.float64).reshape(len(leaf), -1)
        norms_B = np.linalg.norm(grads_BxN, axis=1, keepdims=True)
        bounded_BxN = grads_BxN * np.minimum(1, 0.01 / np.maximum(norms_B, 1e-30))
        expected = bounded_BxN.sum(axis=0).reshape(got.shape)
        np.testing.assert_allclose(
            got * 0.01 if rescale else got, expected, atol=1e-7, err_msg=path
        )


@STRUCTURES
def test_explain_says_which_parameters_are_unused(make):
    loss, params = make()
    explanation = explain(loss, params, _x(), has_aux=True, strict=True)
    rows = {row.parameter: row for row in explanation.rows}
    assert list(rows) == [path for path, _ in _with_paths(params)]
    for path, row in rows.items():
        assert (row.rule is Rule.UNUSED) == ("spare" in path)
        if row.rule is Rule.UNUSED:
            assert (row.operation, row.flops, row.bytes) == ("nothing", 0, 0)


def test_norms_are_zero_where_no_parameter_is_used():
    norms_B = per_example_grad_norms(lambda w, x: jnp.sum(x), jnp.ones(2), _x())
    assert norms_B.tolist() == [0.0] * 5


@jax.custom_vjp
def _product(w, x_BxD):
    return x_BxD @ w


_product.defvjp(
    lambda w, x_BxD: (x_BxD @ w, (w, x_BxD)),
    lambda kept, g_BxD: (kept[1].T @ g_BxD, g_BxD @ kept[0].T),
)


def _in_while(w, x_BxD):
    def body(carry):
        step, h_BxD = carry
        return step + 1, h_BxD @ w

    return lax.while_loop(lambda carry: carry[0] < 2, body, (0, x_BxD))[1]


def _in_cond(w, x_BxD):
    return lax.cond(x_BxD[0, 0] > 0, lambda h: h @ w, lambda h: h * w[:1], x_BxD)


UNSUPPORTED = pytest.mark.parametrize(
    ("use", "operation"),
    [(_in_while, "while"), (_in_cond, "cond"), (_product, "custom_vjp_call")],
)


def _deep(use):
    params = {"layers": [{"w": jnp.ones((3, 3)), "b": jnp.ones((1, 3))}]}

    def loss(params, x_BxD):
        layer = params["layers"][0]
        return jnp.sum(jnp.tanh(use(layer["w"], x_BxD) + layer["b"]))

    return loss, params


@UNSUPPORTED
@pytest.mark.parametrize("method", ["auto", *METHODS])
def test_strict_names_the_parameter_that_no_rule_covers(use, operation, method):
    loss, params = _deep(use)
    grad_fn = clipped_grad(loss, l2_clip_norm=1.0, strict=True, method=method)
    message = (
        r"^strict=True, but these parameters need per-example gradients: "
        rf"\['layers'\]\[0\]\['w'\] \(in {operation}\); change how they are used"
    )
    with pytest.raises(ValueError, match=message) as error:
        grad_fn(params, _x())
    assert "\n" not in str(error.value)
    assert "['b']" not in str(error.value)


@UNSUPPORTED
@pytest.mark.parametrize("transform", [explain, per_example_grad_norms])
def test_strict_norms_and_explain_name_it_too(use, operation, transform):
    loss, params = _deep(use)
    with pytest.raises(ValueError, match=rf"\['w'\] \(in {operation}\)"):
        transform(loss, params, _x(), strict=True)


@pytest.mark.parametrize("use", [_in_cond, _product])
@pytest.mark.parametrize("method", METHODS)
def test_without_strict_the_fallback_is_exact(
    use, method, float64_reference, assert_clipped_sum
):
    loss, params = _deep(use)
    reference = float64_reference(loss, params, (_x(),))
    grad_fn = clipped_grad(loss, l2_clip_norm=reference.clip_norm, method=method)
    assert_clipped_sum(grad_fn(params, _x()), reference, 1e-5)
    assert explain(loss, params, _x()).fallbacks == ("['layers'][0]['w']",)
