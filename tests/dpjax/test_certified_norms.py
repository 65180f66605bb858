"""What an example adds to the sum never exceeds the clip norm, whatever it holds.

The contribution is measured, not computed from the reported norm: the sum over a batch
in which all other examples are padding, in float64.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import ClosedJaxpr, Literal, primitives

from dpjax import clipped_grad, explain
from dpjax.planning import Rule

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
@pytest.mark.parametrize("mode", [None, "promise_in_bounds", "clip", "fill"])
def test_ids_beyond_the_table(method, mode):
    """Such a lookup must be measured as it is added: clamped, or not at all.

    Clamped, or negative, it would take most of the last row's gradient away.
    """
    table = jnp.ones((1000, 4))
    ids = jnp.asarray([[999, 1005], [999, 2999], [999, -1], [999, -1500]])
    targets = 100.0 * jnp.asarray([1.0, -0.9])

    def loss(table, ids):
        rows = table[ids[0]] if mode is None else table.at[ids[0]].get(mode=mode)
        return jnp.sum(jnp.where(jnp.isnan(rows), 0, rows) * targets[:, None])

    grad_fn = jax.jit(
        clipped_grad(
            loss, l2_clip_norm=CLIP_NORM, return_grad_norms=True, method=method
        )
    )
    for i in range(len(ids)):
        total, aux = grad_fn(table, ids, is_padding_example=jnp.arange(4) != i)
        assert np.linalg.norm(total) <= CLIP_NORM * (1 + ROUNDING)
        gradient = jax.grad(loss)(table, ids[i : i + 1])
        np.testing.assert_allclose(
            aux.grad_norms[i], np.linalg.norm(gradient), rtol=1e-5
        )


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


# Every rule, on one batch that holds ordinary examples beside adversarial ones.


class Usage(NamedTuple):
    """A way of using parameters, with a loss that is linear in them.

    Their gradients are then sums over tokens of `inputs * targets`, in one form or
    another, which the examples of `_adversaries` make cancel.

    Attributes:
      name: of the test.
      loss: of (parameters, inputs_TxD, targets_TxD, ids_T) of one example.
      shape: of the parameters.
      rule: what `explain` says of them.
    """

    name: str
    loss: Callable[..., jax.Array]
    shape: tuple[int, ...]
    rule: Rule


T, D = 4, 8
LENGTH_OF_HALF = T // 2


def _product(w, inputs, targets, ids):
    return jnp.sum((inputs @ w) * targets)


def _product_of_one(w, inputs, targets, ids):
    return jnp.sum((inputs.ravel() @ w) * targets[0])


def _two_products(w, inputs, targets, ids):
    halves = zip(jnp.split(inputs, 2), jnp.split(targets, 2), strict=True)
    return sum(_product(w, *half, ids) for half in halves)


def _products_of_slices(w, inputs, targets, ids):
    left = jnp.sum((inputs @ w[:, :3]) * targets[:, :3])
    return left + jnp.sum((inputs @ w[:, 3:]) * targets[:, 3:])


def _grouped_product(w, inputs, targets, ids):
    inputs, targets = (x.reshape(T, 2, D // 2) for x in (inputs, targets))
    return jnp.sum(jnp.einsum("thd,hdp->thp", inputs, w) * targets)


def _many_tokens_of_two(w, inputs, targets, ids):
    return jnp.sum((inputs.reshape(-1, 2) @ w) * targets.reshape(-1, 2))


def _convolution(groups, w, inputs, targets, ids):
    """Patches of two tokens: those of the first half and of the second."""
    outputs = jax.lax.conv_general_dilated(
        inputs[None],
        w,
        window_strides=(2,),
        padding="VALID",
        dimension_numbers=("NWC", "WIO", "NWC"),
        feature_group_count=groups,
    )
    return jnp.sum(outputs[0] * targets[::2])


def _lookup(table, inputs, targets, ids):
    return jnp.sum(table[ids] * (inputs * targets))


def _lookup_and_head(table, inputs, targets, ids):
    """Lookups of the first half; logits of the second, for the same ids."""
    products = inputs * targets
    ids = ids[:LENGTH_OF_HALF]
    logits = products[LENGTH_OF_HALF:] @ table.T
    picked = jax.nn.one_hot(ids, table.shape[0], dtype=table.dtype)
    return jnp.sum(table[ids] * products[:LENGTH_OF_HALF]) + jnp.sum(logits * picked)


def _scale(scale, inputs, targets, ids):
    return jnp.sum(scale * inputs * targets)


def _shift(shift, inputs, targets, ids):
    return jnp.sum((shift + jnp.sin(inputs)) * (inputs * targets))


def _scan(w, inputs, targets, ids):
    def step(total, token):
        return total + _product(w, *token, ids), None

    start = jnp.zeros((), w.dtype)
    return jax.lax.scan(step, start, (inputs[:, None], targets[:, None]))[0]


def _scanned_layers(ws, inputs, targets, ids):
    """A token of each half to each layer."""

    def layer(total, layer):
        return total + _product(*layer, ids), None

    inputs, targets = (x.reshape(2, 2, D).swapaxes(0, 1) for x in (inputs, targets))
    return jax.lax.scan(layer, jnp.zeros((), ws.dtype), (ws, inputs, targets))[0]


def _cumulative_sum(w, inputs, targets, ids):
    return _product(jnp.cumsum(w, axis=0), inputs, targets, ids)


USAGES = (
    Usage("product", _product, (D, D), Rule.GRAM),
    Usage("product of one token", _product_of_one, (T * D, D), Rule.GRAM),
    Usage("two products", _two_products, (D, D), Rule.GRAM),
    Usage("slices", _products_of_slices, (D, D), Rule.GRAM),
    Usage("grouped product", _grouped_product, (2, D // 2, D // 2), Rule.GRAM),
    Usage("instantiated", _many_tokens_of_two, (2, 2), Rule.INSTANTIATED),
    Usage("convolution", functools.partial(_convolution, 1), (2, D, D), Rule.GRAM),
    Usage(
        "grouped convolution", functools.partial(_convolution, 2), (2, 4, D), Rule.GRAM
    ),
    Usage("embedding", _lookup, (9, D), Rule.GRAM),
    Usage("tied embedding", _lookup_and_head, (9, D), Rule.GRAM),
    Usage("scale", _scale, (1, D), Rule.ELEMENTWISE),
    Usage("shift", _shift, (1, D), Rule.ELEMENTWISE),
    Usage("scan", _scan, (D, D), Rule.GRAM),
    Usage("scanned layers", _scanned_layers, (2, D, D), Rule.GRAM),
    Usage("fallback", _cumulative_sum, (D, D), Rule.FALLBACK),
)
LARGEST_ID = 8


class Adversaries(NamedTuple):
    """A batch of examples, and which of them are of which kind.

    Attributes:
      arrays: inputs_BxTxD, targets_BxTxD and ids_BxT.
      ordinary: examples as they come.
      zero: examples whose gradient is 0.
      poisoned: examples that hold NaN or infinity.
    """

    arrays: tuple[np.ndarray, np.ndarray, np.ndarray]
    ordinary: slice
    zero: slice
    poisoned: slice


def _adversaries() -> Adversaries:
    rng = np.random.default_rng(0)

    def normal(*shape):
        return rng.standard_normal((*shape, D))

    # Half of each example's tokens are near-copies, with opposite targets.
    nearness, scale = np.meshgrid(
        [0.3, 0.1, 0.03, 0.02, 0.01, 1e-3, 1e-5, 1e-7, 0], [1e-4, 1, 1e4]
    )
    nearness, scale = (x.reshape(-1, 1, 1) for x in (nearness, scale))
    half, half_targets = (normal(len(scale), LENGTH_OF_HALF) for _ in range(2))
    copies = half * (1 + nearness * normal(len(scale), LENGTH_OF_HALF))
    cancelling = scale * np.concatenate([half, copies], axis=1)
    cancelling_targets = scale * np.concatenate([half_targets, -half_targets], axis=1)

    ordinary = np.array([0.01, 0.03, 1.0, 10.0]).reshape(-1, 1, 1) * normal(4, T)
    # Of inputs and targets: denormals, huge numbers, and both at once.
    sizes = [(1e-40, 1.0), (1e-40, 1e38), (1e18, 1e17), (1e25, 1e-25), (1e-30, 1e25)]
    extremes = np.array(sizes)[:, :, None, None] * normal(5, 2, T)
    zeros = np.array([(0.0, 1.0), (1.0, 0.0)])[:, :, None, None] * normal(2, 2, T)
    poisoned = normal(4, 2, T)
    poisoned[0, 0, 0, 2], poisoned[1, 1, 0, 0] = np.nan, np.inf
    poisoned[2, 0], poisoned[3, 1] = -np.inf, np.nan

    inputs = [ordinary, zeros[:, 0], poisoned[:, 0], cancelling, extremes[:, 0]]
    targets = [normal(4, T), zeros[:, 1], poisoned[:, 1]]
    targets += [cancelling_targets, extremes[:, 1]]
    inputs, targets = (np.concatenate(x).astype(np.float32) for x in (inputs, targets))
    ids = rng.integers(0, LARGEST_ID, (len(inputs), LENGTH_OF_HALF))
    ids = np.concatenate([ids, ids], axis=1).astype(np.int32)
    kinds = slice(0, 4), slice(4, 6), slice(6, 10)
    return Adversaries((inputs, targets, ids), *kinds)


def _float64_norms(usage, batch):
    """Of the exact gradients; NaN where they are not finite."""

    def norm(example):
        gradient = jax.grad(usage.loss)(jnp.zeros(usage.shape), *example)
        return jnp.sqrt(jnp.sum(gradient**2))

    with jax.enable_x64(True):
        batch = [x.astype(np.float64) if x.dtype == np.float32 else x for x in batch]
        norms = np.asarray(jax.jit(lambda batch: jax.lax.map(norm, batch))(batch))
    return np.where(np.isfinite(norms), norms, np.nan)


def _clip_usage(usage, methods, transform=lambda fun: fun):
    """Some methods' sums and norms of a batch, of whose examples some are padding."""
    grad_fns = {
        method: clipped_grad(
            usage.loss,
            l2_clip_norm=CLIP_NORM,
            batch_argnums=(1, 2, 3),
            keep_batch_dim=False,
            return_grad_norms=True,
            method=method,
        )
        for method in methods
    }

    def run(params, batch, is_padding):
        return {
            method: grad_fn(params, *batch, is_padding_example=is_padding)
            for method, grad_fn in grad_fns.items()
        }

    return jax.jit(
        transform(run), compiler_options={"xla_backend_optimization_level": 0}
    )


def _tree_of_float64(results):
    return jax.tree.map(lambda x: np.asarray(x).astype(np.float64), results)


def _contributions_of_each(run, usage, batch, dtype=np.float32):
    """What each example adds alone, by method: flattened sums, and reported norms."""
    count = len(batch[0])
    params = jnp.zeros(usage.shape, dtype)
    alone = [
        _tree_of_float64(run(params, batch, np.arange(count) != i))
        for i in range(count)
    ]
    return {
        method: (
            np.stack([results[method][0].ravel() for results in alone]),
            np.array(
                [results[method][1].grad_norms[i] for i, results in enumerate(alone)]
            ),
        )
        for method in alone[0]
    }


@pytest.mark.parametrize("usage", USAGES, ids=lambda usage: usage.name)
def test_every_usage(usage, subtests):
    adversaries = _adversaries()
    batch = adversaries.arrays
    count = len(batch[0])
    (row,) = explain(
        usage.loss,
        jnp.zeros(usage.shape),
        *batch,
        batch_argnums=(1, 2, 3),
        keep_batch_dim=False,
    ).rows
    assert row.rule is usage.rule
    exact = _float64_norms(usage, batch)
    run = _clip_usage(usage, METHODS)
    params = jnp.zeros(usage.shape)
    together = _tree_of_float64(run(params, batch, np.zeros(count, bool)))
    without_each = [
        _tree_of_float64(run(params, batch, np.arange(count) == i))
        for i in range(count)
    ]
    nothing = run(params, batch, np.ones(count, bool))
    alone = _contributions_of_each(run, usage, batch)
    for method in METHODS:
        with subtests.test(method=method):
            sums, reported = alone[method]
            norms = np.linalg.norm(sums, axis=1)
            assert np.all(np.isfinite(sums))
            assert np.all(norms <= CLIP_NORM * (1 + ROUNDING))
            assert np.all(norms[adversaries.zero] == 0)
            # Nor is anything cut without need: the slack is below 1 %.
            ordinary = adversaries.ordinary
            wanted = np.minimum(exact, CLIP_NORM)[ordinary]
            assert np.all(norms[ordinary] >= 0.99 * wanted)
            assert np.all(norms[ordinary] <= wanted * (1 + ROUNDING))
            assert np.all(reported[ordinary] <= 1.01 * exact[ordinary])
            assert np.all(reported[ordinary] >= exact[ordinary] * (1 - ROUNDING))
            assert not np.any(np.isfinite(reported[adversaries.poisoned]))

            # In company, what leaves with an example is no more than that either.
            total, _ = together[method]
            departed = np.stack([total - rest[method][0] for rest in without_each])
            departed = departed.reshape(count, -1)
            noise = ROUNDING * np.linalg.norm(total)
            allowed = CLIP_NORM * (1 + ROUNDING) + noise
            assert np.all(np.linalg.norm(departed, axis=1) <= allowed)
            difference = np.linalg.norm(departed - sums, axis=1)
            assert np.all(difference <= 0.01 * norms + noise)
            assert not np.any(nothing[method][0])


@pytest.mark.parametrize("usage", USAGES, ids=lambda usage: usage.name)
def test_every_usage_in_bfloat16(usage, subtests):
    adversaries = _adversaries()
    batch = tuple(
        jnp.asarray(x, jnp.bfloat16) if x.dtype == np.float32 else x
        for x in adversaries.arrays
    )
    run = _clip_usage(usage, METHODS)
    alone = _contributions_of_each(run, usage, batch, jnp.bfloat16)
    for method in METHODS:
        with subtests.test(method=method):
            sums, _ = alone[method]
            assert np.all(np.isfinite(sums))
            norms = np.linalg.norm(sums, axis=1)
            assert np.all(norms <= CLIP_NORM * (1 + 2**-8))
            assert np.all(norms[adversaries.zero] == 0)


def _rounding_products(bits):
    """Functions as on hardware that rounds the factors of products to `bits` bits.

    Products of the highest precision are left alone, as there. (The CPU takes the
    precision of a product for a hint, and has no other than float32.)
    """
    products = (primitives.dot_general_p, primitives.conv_general_dilated_p)
    exact = (jax.lax.Precision.HIGHEST, (jax.lax.Precision.HIGHEST,) * 2)

    def rewritten(value):
        if isinstance(value, ClosedJaxpr):
            evaluate_value = functools.partial(evaluate, value)
            return jax.make_jaxpr(evaluate_value)(*value.in_avals)
        if type(value) is tuple:
            return tuple(map(rewritten, value))
        return value

    def evaluate(closed, *arguments):
        values = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        values.update(zip(closed.jaxpr.invars, arguments, strict=True))

        def read(atom):
            return atom.val if isinstance(atom, Literal) else values[atom]

        for equation in closed.jaxpr.eqns:
            operands = [read(atom) for atom in equation.invars]
            params, primitive = equation.params, equation.primitive
            if primitive in products and params["precision"] not in exact:
                operands = [jax.lax.reduce_precision(x, 8, bits) for x in operands]
            called = params.get("call_jaxpr", params.get("jaxpr"))
            if called is not None and primitive is not primitives.scan_p:
                if not isinstance(called, ClosedJaxpr):
                    called = ClosedJaxpr(called, ())
                results = evaluate(called, *operands)
            else:
                params = {name: rewritten(x) for name, x in params.items()}
                results = primitive.bind(*operands, **params)
            if not primitive.multiple_results:
                results = [results]
            values.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in closed.jaxpr.outvars]

    def transform(fun):
        def rounding(*args):
            closed, shapes = jax.make_jaxpr(fun, return_shape=True)(*args)
            results = evaluate(closed, *jax.tree.leaves(args))
            return jax.tree.structure(shapes).unflatten(results)

        return rounding

    return transform


def test_products_are_rounded():
    x = np.full((1, 1), 1 + 2.0**-9, np.float32)

    def products(x):
        scanned = jax.lax.scan(
            lambda y, _: (jax.jit(jnp.matmul)(y, x), None), x, None, 1
        )
        return scanned[0], jnp.matmul(x, x, precision="highest")

    rounded, exact = jax.jit(_rounding_products(8)(products))(x)
    assert rounded == 1
    assert exact == x**2


@pytest.mark.parametrize(
    ("usage", "bits"),
    [
        pytest.param(usage, bits, id=f"{usage.name} in {hardware}")
        for hardware, bits in (("bfloat16", 7), ("tensorfloat32", 10))
        for usage in USAGES
        if bits == 7 or usage.name in ("product", "grouped convolution", "scan")
    ],
)
def test_every_usage_with_rounded_products(usage, bits, subtests):
    """What is summed is no more than the clip norm when its products are rounded.

    But for one rounding of each factor: the stated precision of such hardware.
    """
    adversaries = _adversaries()
    methods = ("bookkeeping", "reweight")
    run = _clip_usage(usage, methods, _rounding_products(bits))
    alone = _contributions_of_each(run, usage, adversaries.arrays)
    for method in methods:
        with subtests.test(method=method):
            norms = np.linalg.norm(alone[method][0], axis=1)
            assert np.all(norms <= CLIP_NORM * (1 + 2.0**-bits))
