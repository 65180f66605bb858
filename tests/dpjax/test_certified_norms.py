"""What an example adds to the sum never exceeds the clip norm, whatever it holds.

The contribution is measured, not computed from the reported norm: the sum over a batch
in which all other examples are padding, in float64.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import clipped_grad

METHODS = ("bookkeeping", "reweight", "vmap")
CLIP_NORM = 1.0
# The contribution is a float32 product of clipped factors: its own rounding.
ROUNDING = 1e-5


def _projection(w, tokens_TxD, targets_TxP):
    """A loss whose gradient is tokens^T targets."""
    return jnp.sum((tokens_TxD @ w) * targets_TxP)


def _clipped(loss, method, **options):
    """For losses of (w, tokens, targets) of one example."""
    grad_fn = clipped_grad(
        loss,
        l2_clip_norm=CLIP_NORM,
        batch_argnums=(1, 2),
        keep_batch_dim=False,
        method=method,
        **options,
    )
    return jax.jit(grad_fn)


def _contributions(method, tokens, targets):
    grad_fn = _clipped(_projection, method, return_grad_norms=True)
    w = jnp.zeros((tokens.shape[-1], targets.shape[-1]))
    count = tokens.shape[0]
    sums, reported = [], []
    for i in range(count):
        total, aux = grad_fn(
            w, tokens, targets, is_padding_example=jnp.arange(count) != i
        )
        sums.append(np.asarray(total, np.float64))
        reported.append(float(aux.grad_norms[i]))
    return np.stack(sums), np.array(reported)


def _exact_norms(tokens, targets):
    gradients = np.einsum(
        "btd,btp->bdp", tokens.astype(np.float64), targets.astype(np.float64)
    )
    return np.linalg.norm(gradients.reshape(len(tokens), -1), axis=1)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("scale", [1e-4, 1.0, 100.0, 1e4])
def test_tokens_that_cancel(method, scale):
    """Near-copies with opposite targets: the gram form cannot see what is left."""
    rng = np.random.default_rng(0)
    tokens = rng.standard_normal((12, 8, 16)) * scale
    perturbation = np.array([1e-2, 1e-3, 1e-4, 1e-5] * 3).reshape(-1, 1, 1)
    copies = tokens * (1 + perturbation * rng.standard_normal(tokens.shape))
    targets = rng.standard_normal((12, 8, 24))
    tokens = np.concatenate([tokens, copies], axis=1).astype(np.float32)
    targets = np.concatenate([targets, -targets], axis=1).astype(np.float32)
    exact = _exact_norms(tokens, targets)
    sums, reported = _contributions(method, tokens, targets)
    norms = np.linalg.norm(sums.reshape(len(sums), -1), axis=1)
    assert np.all(norms <= CLIP_NORM * (1 + ROUNDING))
    # Not just safe: what the rounding leaves uncertain is formed, not over-clipped.
    expected = np.minimum(exact, CLIP_NORM)
    reach = np.linalg.norm(tokens, axis=2) * np.linalg.norm(targets, axis=2)
    noise = 4e-7 * reach.sum(axis=1) * np.minimum(1, CLIP_NORM / exact)
    assert np.all(np.abs(norms - expected) <= 6e-3 * expected + noise)
    assert np.all(np.abs(reported - exact) <= 6e-3 * exact + 4e-7 * reach.sum(axis=1))


@pytest.mark.parametrize("method", METHODS)
def test_extreme_magnitudes(method):
    """Denormals, zeros, and products whose squares overflow though they do not."""
    tokens = np.ones((7, 3, 4), np.float32)
    targets = np.ones((7, 3, 5), np.float32)
    tokens[0] = 0
    tokens[1] = 1e-40
    tokens[2] = 1e25
    targets[2] = 1e-25
    tokens[3] = 1e18
    targets[3] = 1e18
    targets[4] = 0
    tokens[5], targets[5] = 1e-30, 1e25
    exact = _exact_norms(tokens, targets)
    sums, _ = _contributions(method, tokens, targets)
    assert np.all(np.isfinite(sums))
    norms = np.linalg.norm(sums.reshape(len(sums), -1), axis=1)
    assert np.all(norms <= CLIP_NORM * (1 + ROUNDING))
    # The third and the sixth have ordinary gradients; their grams overflow.
    np.testing.assert_allclose(
        norms[[2, 5, 6]], np.minimum(exact, CLIP_NORM)[[2, 5, 6]], rtol=1e-4
    )
    assert norms[0] == norms[4] == 0


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_poisoned_examples_leave_the_others_alone(method, poison):
    rng = np.random.default_rng(0)
    tokens = rng.standard_normal((6, 5, 4)).astype(np.float32)
    targets = rng.standard_normal((6, 5, 3)).astype(np.float32)
    grad_fn = _clipped(_projection, method)
    w = jnp.zeros((4, 3))
    clean = grad_fn(w, tokens[2:], targets[2:])
    tokens[0], targets[1] = poison, poison
    np.testing.assert_allclose(grad_fn(w, tokens, targets), clean, rtol=1e-5, atol=1e-6)
    # As padding rows they do not even cost the slow path.
    mask = jnp.arange(6) < 2
    masked = grad_fn(w, tokens, targets, is_padding_example=mask)
    np.testing.assert_allclose(masked, clean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_partly_poisoned_gradient_keeps_its_finite_entries(method):
    tokens = np.ones((2, 3, 4), np.float32)
    targets = np.ones((2, 3, 5), np.float32)
    tokens[0, 1, 2] = np.nan
    sums, reported = _contributions(method, tokens, targets)
    assert np.all(sums[0][2] == 0)
    kept = np.delete(sums[0], 2, axis=0)
    np.testing.assert_allclose(kept, CLIP_NORM / np.sqrt(15), rtol=1e-5)
    assert np.isnan(reported[0])
    assert np.isfinite(reported[1])


@pytest.mark.parametrize("method", METHODS)
def test_low_precision_parameters(method):
    """In bfloat16 the sum is rounded entry by entry, the factor never upward."""
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.standard_normal((8, 6, 16)) * 10, jnp.bfloat16)
    targets = jnp.asarray(rng.standard_normal((8, 6, 16)) * 10, jnp.bfloat16)

    def loss(w, tokens, targets):
        return jnp.sum((tokens @ w) * targets).astype(jnp.float32)

    grad_fn = _clipped(loss, method)
    w = jnp.zeros((16, 16), jnp.bfloat16)
    for i in range(8):
        total = grad_fn(w, tokens, targets, is_padding_example=jnp.arange(8) != i)
        assert total.dtype == jnp.bfloat16
        norm = np.linalg.norm(np.asarray(total, np.float64))
        assert norm <= CLIP_NORM * (1 + 2**-8)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint16, np.int32])
@pytest.mark.parametrize("mode", ["clip", "fill"])
def test_ids_narrower_than_the_table(method, dtype, mode):
    """A table of 300 rows has ids that do not fit the dtype of the tokens."""
    table = jnp.ones((300, 4))
    ids = jnp.asarray([[0, 5, 5, 100, 100, 100]], dtype)

    def loss(table, ids):
        return 100.0 * jnp.sum(jnp.take(table, ids, axis=0, mode=mode))

    grad_fn = clipped_grad(
        loss, l2_clip_norm=CLIP_NORM, return_grad_norms=True, method=method
    )
    total, aux = grad_fn(table, ids)
    expected = 100 * np.sqrt(4 * (1**2 + 2**2 + 3**2))
    np.testing.assert_allclose(aux.grad_norms, expected, rtol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(total), CLIP_NORM, rtol=1e-6)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("scale", "seed"), [(1e-20, 1e18), (1e18, 1e-20), (1e-30, 1e30)]
)
def test_factors_whose_squares_underflow(method, scale, seed):
    tokens = np.full((1, 3, 64), scale, np.float32)
    targets = np.full((1, 3, 32), seed, np.float32)
    (exact,) = _exact_norms(tokens, targets)

    def loss(w, tokens, targets):
        return _projection(w, tokens, targets)

    clip_norm = exact / 100
    grad_fn = clipped_grad(
        loss,
        l2_clip_norm=clip_norm,
        batch_argnums=(1, 2),
        keep_batch_dim=False,
        method=method,
    )
    total = grad_fn(jnp.zeros((64, 32)), tokens, targets)
    norm = np.linalg.norm(np.asarray(total, np.float64))
    np.testing.assert_allclose(norm, clip_norm, rtol=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_rule_that_clips_cotangents(method):
    """A custom rule need not be linear: weighting the loss is not weighting gradients.

    The rule is that of JAX's documentation of `custom_vjp`.
    """

    @jax.custom_vjp
    def clip_cotangent(x):
        return x

    clip_cotangent.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -1, 1),))

    def loss(w, x):
        inner = jax.lax.scan(
            lambda carry, _: (clip_cotangent(carry), None), x @ w, None, length=2
        )[0]
        return jnp.sum(inner * 100)

    grad_fn = clipped_grad(loss, l2_clip_norm=0.1, method=method)
    total = grad_fn(jnp.ones((4, 4)), jnp.ones((1, 4)))
    np.testing.assert_allclose(np.linalg.norm(total), 0.1, rtol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_float16_compute(method):
    """Weighted cotangents would be rounded among the subnormals of float16."""

    def loss(w, x):
        half = x.astype(jnp.float16) @ w.astype(jnp.float16)
        return jnp.sum(half.astype(jnp.float32))

    grad_fn = clipped_grad(loss, l2_clip_norm=0.01, method=method)
    total = grad_fn(jnp.ones((16, 49)), jnp.full((1, 16), 1e4))
    norm = np.linalg.norm(np.asarray(total, np.float64))
    assert norm <= 0.01 * (1 + 1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_gradients_of_zero_are_not_formed_to_be_sure(method):
    """Their norm is 0 up to what underflow may hide, which no clip norm cuts."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 3)), jnp.float32)
    grad_fn = clipped_grad(
        lambda w, x: jnp.sum(jax.nn.relu(-jnp.abs(x @ w))),
        l2_clip_norm=1.0,
        return_grad_norms=True,
        method=method,
    )
    total, aux = grad_fn(jnp.ones((3, 2)), x)
    assert not total.any()
    assert not aux.grad_norms.any()
