"""Tests of dpjax.transforms: the noise's scale, independence and composition."""

import doctest
import functools
import math
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from scipy import stats

from dpjax import transforms
from dpjax.transforms import clip_and_noise, privatize

_KEY = jax.random.key(7)


@pytest.fixture(autouse=True)
def _strict_dtypes():
    with jax.numpy_dtype_promotion("strict"):
        yield


def _promoting(test):
    """Runs a test under standard promotion, which parts of optax rely on."""

    @functools.wraps(test)
    def run(*args, **kwargs):
        with jax.numpy_dtype_promotion("standard"):
            return test(*args, **kwargs)

    return run


def _update(transform, updates, params=None):
    return transform.update(updates, transform.init(params), params)[0]


def _is_normal(values, scale):
    """Whether values look like N(0, scale**2); rejects by chance one time in 1e4."""
    return stats.kstest(np.ravel(values), stats.norm(scale=scale).cdf).pvalue > 1e-4


# Expected scale 1.5 * 4 / 8.
_NOISY = functools.partial(privatize, 1.5, 4.0, 8.0, _KEY)


@pytest.mark.parametrize("raw", [False, True])
def test_noise_has_the_right_scale_and_no_other(raw):
    key = jax.random.PRNGKey(7) if raw else _KEY
    params = {"a": jnp.zeros((50, 60)), "b": jnp.zeros(2_000)}
    noise = _update(privatize(1.5, 4.0, 8.0, key), params)
    values = np.concatenate([np.ravel(x) for x in jax.tree.leaves(noise)])
    right = 1.5 * 4.0 / 8.0
    assert _is_normal(values, right)
    # Twice, half, variance for deviation, and each argument forgotten or squared.
    for wrong in (2, 0.5, right, 1 / 4, 4, 8, 1 / 8, 1.5, 1 / 1.5):
        assert not _is_normal(values, right * wrong)


def test_signal_is_divided_by_the_constant_alone():
    updates = {"w": jnp.array([8.0, 16.0]), "b": jnp.array(-4.0)}
    means = _update(privatize(0.0, 4.0, 8.0, _KEY), updates)
    np.testing.assert_array_equal(means["w"], [1.0, 2.0])
    np.testing.assert_array_equal(means["b"], -0.5)


def test_noise_is_added_to_the_signal():
    signal = jnp.linspace(-3.0, 3.0, 1_000)
    noise = _update(_NOISY(), jnp.zeros(1_000))
    noisy = _update(_NOISY(), signal)
    np.testing.assert_allclose(noisy - noise, signal / 8, atol=1e-6)


def test_every_argument_changes_the_update():
    good = {
        "noise_multiplier": 1.0,
        "sensitivity": 2.0,
        "normalize_by": 3.0,
        "key": _KEY,
    }
    changes = {
        "noise_multiplier": 1.1,
        "sensitivity": 2.1,
        "normalize_by": 3.1,
        "key": jax.random.key(8),
    }
    updates = jnp.ones(10)
    before = _update(privatize(**good), updates)
    for name, value in changes.items():
        after = _update(privatize(**{**good, name: value}), updates)
        assert not np.any(np.isclose(before, after, rtol=1e-3)), name


def test_all_noise_is_different():
    """Over leaves of one shape, and over steps."""
    params = {"a": jnp.zeros(500), "b": [jnp.zeros(500), jnp.zeros((500, 1))]}
    transform = _NOISY()
    state = transform.init(params)
    seen = []
    for _ in range(4):
        noise, state = transform.update(params, state)
        seen += [np.ravel(x) for x in jax.tree.leaves(noise)]
    # Among 6,000 float32 normals a few coincide by chance, whole leaves do not.
    assert max(Counter(np.concatenate(seen).tolist()).values()) <= 2
    assert len(np.unique(np.concatenate(seen))) > 5_900
    correlations = np.corrcoef(seen) - np.eye(len(seen))
    assert np.abs(correlations).max() < 0.25


def test_noise_is_different_on_different_devices():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, P("data"))
    zeros = jnp.zeros(2_000)
    sharded = jax.device_put(zeros, sharding)
    transform = _NOISY()
    update = jax.jit(transform.update)
    noise, _ = update(sharded, transform.init(zeros))
    assert len(noise.sharding.device_set) == 2
    assert len(np.unique(noise)) > 1_990
    assert _is_normal(noise, 0.75)
    # The same as on one device.
    np.testing.assert_allclose(noise, _update(transform, zeros), rtol=1e-6)


def test_same_noise_on_all_devices_of_a_shard_map_is_refused():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    transform = _NOISY()

    def update(x):
        return _update(transform, x)

    sharded = jax.shard_map(update, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    with pytest.raises(ValueError, match=r"shard_map axes \['data'\]"):
        sharded(jnp.zeros(4))
    summed = jax.shard_map(
        lambda x: update(jax.lax.psum(x, "data")),
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P(),
    )
    assert np.all(np.asarray(summed(jnp.zeros(4))) != 0)


@pytest.mark.parametrize("steps_before", [0, 1, 5])
def test_resuming_draws_the_same_noise(steps_before):
    params = {"a": jnp.zeros(5), "b": jnp.zeros((2, 3))}
    transform = _NOISY()
    state = transform.init(params)
    for _ in range(steps_before):
        _, state = transform.update(params, state)
    saved = (np.asarray(jax.random.key_data(state.key)), np.asarray(state.step))
    expected, _ = transform.update(params, state)
    # Another process, which was given another key, but restores the state.
    other = (
        _NOISY()
        .init(params)
        ._replace(
            key=jax.random.wrap_key_data(jnp.asarray(saved[0])),
            step=jnp.asarray(saved[1]),
        )
    )
    actual, after = privatize(1.5, 4.0, 8.0, jax.random.key(99)).update(params, other)
    assert after.step == steps_before + 1
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_jit_compiles_once():
    traces = []
    transform = _NOISY()

    @jax.jit
    def update(updates, state):
        traces.append(None)
        return transform.update(updates, state)

    state = transform.init(None)
    for i in range(3):
        noisy, state = update(jnp.full(4, float(i)), state)
    assert len(traces) == 1
    assert state.step == 3
    eager = transform.init(None)._replace(step=jnp.int32(2))
    expected, _ = transform.update(jnp.full(4, 2.0), eager)
    np.testing.assert_allclose(noisy, expected, rtol=1e-6)


def test_narrow_leaves_keep_their_dtype_and_get_wide_noise():
    sums = jnp.zeros(4_000, jnp.bfloat16)
    noise = _update(_NOISY(), sums)
    assert noise.dtype == jnp.bfloat16
    wide = _update(_NOISY(), sums.astype(jnp.float32))
    np.testing.assert_array_equal(noise, wide.astype(jnp.bfloat16))
    # Drawn in bfloat16, the tails are missing and values are coarse.
    assert _is_normal(np.asarray(noise, np.float32), 0.75)


def test_float64_leaves_get_float64_noise():
    with jax.enable_x64(True):
        noise = _update(_NOISY(), jnp.zeros(100, jnp.float64))
        assert noise.dtype == jnp.float64
        assert np.any(noise != noise.astype(jnp.float32).astype(jnp.float64))


@pytest.mark.parametrize("optimizer", [optax.sgd(0.1), optax.adam(0.1), optax.adamw(1)])
@_promoting
def test_chains_with_optimizers(optimizer):
    params = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}
    sums = jax.tree.map(lambda x: x + 4.0, params)
    chained = optax.chain(_NOISY(), optimizer)
    updates, state = jax.jit(chained.update)(sums, chained.init(params), params)
    noisy = _update(_NOISY(), sums)
    expected, _ = optimizer.update(noisy, optimizer.init(params), params)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5), updates, expected
    )
    assert state[0].step == 1


def test_absent_leaves_keep_their_place():
    updates = {"a": jnp.zeros(3), "none": None, "masked": optax.MaskedNode()}
    params = {"a": jnp.zeros(3), "none": jnp.zeros(2), "masked": optax.MaskedNode()}
    noise = _update(_NOISY(), updates, params)
    assert noise["none"] is None
    assert noise["masked"] == optax.MaskedNode()
    assert np.all(noise["a"] != 0)
    masked = optax.masked(_NOISY(), {"a": True, "b": False})
    updates = {"a": jnp.zeros(3), "b": jnp.ones(3)}
    noise = masked.update(updates, masked.init(updates), updates)[0]
    np.testing.assert_array_equal(noise["b"], jnp.ones(3))
    assert np.all(noise["a"] != 0)


def test_no_leaves():
    assert _update(_NOISY(), {"a": None}) == {"a": None}


def test_traced_arguments():
    @jax.jit
    def update(noise_multiplier, sensitivity, normalize_by, key, updates):
        transform = privatize(noise_multiplier, sensitivity, normalize_by, key)
        return _update(transform, updates)

    sums = jnp.ones(20)
    traced = update(1.5, 4.0, 8.0, _KEY, sums)
    np.testing.assert_allclose(traced, _update(_NOISY(), sums), rtol=1e-6)


@pytest.mark.parametrize("static_args", [(), ("key",)])
def test_scheduled_noise_with_inject_hyperparams(static_args):
    factory = optax.inject_hyperparams(privatize, static_args=static_args)
    transform = factory(
        noise_multiplier=lambda step: jnp.float32(1.5) * jnp.float32(step),
        sensitivity=4.0,
        normalize_by=8.0,
        key=_KEY,
    )
    params = jnp.zeros(4_000)
    state = transform.init(params)
    first, state = transform.update(params, state, params)
    second, state = transform.update(params, state, params)
    third, state = transform.update(params, state, params)
    assert np.all(first == 0)
    assert _is_normal(second, 0.75)
    assert _is_normal(third, 1.5)
    assert abs(np.corrcoef(second, third)[0, 1]) < 0.1


def test_noise_multiplier_is_not_rounded_by_inject_hyperparams():
    params = jnp.zeros(3, jnp.bfloat16)
    rounding = optax.inject_hyperparams(privatize)(1.1, 4.0, 8.0, _KEY)
    with pytest.raises(TypeError, match=r"hyperparam_dtype=jnp\.float32"):
        rounding.init(params)
    exact = optax.inject_hyperparams(privatize, hyperparam_dtype=jnp.float32)(
        1.1, 4.0, 8.0, _KEY
    )
    noise, _ = exact.update(params, exact.init(params), params)
    assert noise.dtype == jnp.bfloat16


_MICRO, _LOGICAL = 4, 32.0


def _accumulated(optimizer, size=4_000):
    """Emitted update after _MICRO micro-batches whose clipped sums are 8, 16, 24, 32.

    The logical batch's mean is 80 / 32 = 2.5. All updates before it are zero.
    """
    params = jnp.zeros(size)
    state = optimizer.init(params)
    update = jax.jit(optimizer.update)
    for i in range(_MICRO):
        updates, state = update(jnp.full(size, 8.0 * (i + 1)), state, params)
        if i < _MICRO - 1:
            np.testing.assert_array_equal(updates, 0.0)
    return np.asarray(updates), state


def _accumulating(normalize_by=_LOGICAL, noise_multiplier=1.5, **kwargs):
    private = privatize(noise_multiplier, 4.0, normalize_by, _KEY)
    chained = optax.chain(private, optax.identity())
    return optax.MultiSteps(chained, _MICRO, **kwargs)


@_promoting
def test_accumulation_adds_noise_once():
    updates, state = _accumulated(_accumulating(use_grad_mean=False))
    assert _is_normal(updates - 2.5, 1.5 * 4.0 / _LOGICAL)
    # As one call with the whole batch, of which this is the first.
    whole = _update(privatize(1.5, 4.0, _LOGICAL, _KEY), jnp.full(4_000, 80.0))
    np.testing.assert_allclose(updates, whole, rtol=1e-6)
    assert state.inner_opt_state[0].step == 1


@_promoting
def test_accumulated_updates_draw_new_noise():
    optimizer = _accumulating(use_grad_mean=False)
    params = jnp.zeros(1_000)
    state = optimizer.init(params)
    emitted = []
    for i in range(2 * _MICRO):
        updates, state = optimizer.update(params, state, params)
        if i % _MICRO == _MICRO - 1:
            emitted.append(updates)
    assert abs(np.corrcoef(emitted)[0, 1]) < 0.15


@_promoting
def test_pitfall_of_averaging_accumulation():
    # The documented default of MultiSteps: mean of micro-batch sums.
    updates, _ = _accumulated(_accumulating())
    assert updates.mean() == pytest.approx(2.5 / _MICRO, abs=0.02)
    assert _is_normal(updates - 2.5 / _MICRO, 1.5 * 4.0 / _LOGICAL)
    # Dividing by the micro-batch's size repairs the mean and multiplies the noise.
    updates, _ = _accumulated(_accumulating(normalize_by=_LOGICAL / _MICRO))
    assert _is_normal(updates - 2.5, _MICRO * 1.5 * 4.0 / _LOGICAL)


@_promoting
def test_pitfall_of_noise_at_every_micro_batch():
    private = privatize(1.5, 4.0, _LOGICAL, _KEY)
    accumulate = optax.MultiSteps(optax.identity(), _MICRO, use_grad_mean=False)
    optimizer = optax.chain(private, accumulate.gradient_transformation())
    updates, state = _accumulated(optimizer)
    assert _is_normal(updates - 2.5, math.sqrt(_MICRO) * 1.5 * 4.0 / _LOGICAL)
    assert not _is_normal(updates - 2.5, 1.5 * 4.0 / _LOGICAL)
    assert state[0].step == _MICRO


@_promoting
def test_raw_keys_accumulate_too():
    private = privatize(1.5, 4.0, _LOGICAL, jax.random.PRNGKey(7))
    optimizer = optax.MultiSteps(private, _MICRO, use_grad_mean=False)
    updates, _ = _accumulated(optimizer)
    assert _is_normal(updates - 2.5, 1.5 * 4.0 / _LOGICAL)


_GRADIENTS = {
    "w": jnp.array([[3.0, 0.0], [0.0, 0.3], [0.0, -6.0]]),
    "b": jnp.array([4.0, 0.4, 8.0]),
}  # Norms 5, 0.5 and 10.


def test_clips_by_the_norm_over_all_leaves():
    means = _update(clip_and_noise(1.0, 0.0, 2.0, _KEY), _GRADIENTS)
    np.testing.assert_allclose(means["w"], [0.6 / 2, (0.3 - 0.6) / 2], rtol=1e-6)
    np.testing.assert_allclose(means["b"], (0.8 + 0.4 + 0.8) / 2, rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_clipping_agrees_with_a_loop(dtype):
    rng = np.random.default_rng(0)
    shapes = {"a": (32, 3, 5), "b": (32,), "c": (32, 7)}
    gradients = {
        k: jnp.asarray(
            rng.normal(size=s) * rng.exponential(size=(32,) + (1,) * (len(s) - 1)),
            dtype,
        )
        for k, s in shapes.items()
    }
    wide = {k: np.asarray(x, np.float64) for k, x in gradients.items()}
    norms = [
        math.sqrt(sum(float((x[i] ** 2).sum()) for x in wide.values()))
        for i in range(32)
    ]
    clip = float(np.median(norms))
    expected = {
        k: sum(x[i] * min(1, clip / norms[i]) for i in range(32)) / 16.0
        for k, x in wide.items()
    }
    means = _update(clip_and_noise(clip, 0.0, 16.0, _KEY), gradients)
    for name, mean in means.items():
        assert mean.dtype == dtype
        tolerance = 1e-5 if dtype == jnp.float32 else 1e-2
        np.testing.assert_allclose(
            np.asarray(mean, np.float64), expected[name], rtol=tolerance, atol=tolerance
        )


def test_clipped_noise_has_the_right_scale():
    gradients = {"w": jnp.zeros((3, 4_000))}
    noise = _update(clip_and_noise(4.0, 1.5, 8.0, _KEY), gradients)["w"]
    assert noise.shape == (4_000,)
    assert _is_normal(noise, 0.75)
    for wrong in (0.25, 0.5, 2, 3, 4):
        assert not _is_normal(noise, 0.75 * wrong)
    assert np.array_equal(noise, _update(_NOISY(), {"w": jnp.zeros(4_000)})["w"])


@pytest.mark.parametrize("poison", [jnp.nan, jnp.inf, -jnp.inf, 3e38])
@pytest.mark.parametrize("leaf", ["w", "b"])
def test_examples_that_are_not_finite_contribute_nothing(poison, leaf):
    poisoned = dict(_GRADIENTS)
    poisoned[leaf] = poisoned[leaf].at[1].set(poison)
    without = jax.tree.map(lambda x: x[jnp.array([0, 2])], _GRADIENTS)
    transform = clip_and_noise(1.0, 0.7, 2.0, _KEY)
    means, expected = _update(transform, poisoned), _update(transform, without)
    for name in means:
        np.testing.assert_allclose(means[name], expected[name], rtol=1e-6)


def test_an_empty_batch_is_noise_alone():
    empty = {"w": jnp.zeros((0, 4_000)), "b": jnp.zeros(0)}
    transform = clip_and_noise(4.0, 1.5, 8.0, _KEY)
    noise, state = transform.update(empty, transform.init(None))
    assert noise["b"].shape == ()
    assert _is_normal(noise["w"], 0.75)
    assert state.step == 1


def test_clip_norm_edge_cases():
    zeros = _update(clip_and_noise(0.0, 1.0, 2.0, _KEY), _GRADIENTS)
    assert all(np.all(x == 0) for x in jax.tree.leaves(zeros))
    sums = _update(clip_and_noise(math.inf, 0.0, 1.0, _KEY), _GRADIENTS)
    np.testing.assert_allclose(sums["w"], [3.0, -5.7], rtol=1e-6)
    for noise_multiplier in (1.0, jnp.float32(0.1)):
        with pytest.raises(ValueError, match=r"^l2_clip_norm=inf with"):
            clip_and_noise(math.inf, noise_multiplier, 1.0, _KEY)


def test_groups_are_clipped_on_their_own():
    transform = clip_and_noise({"w": 3.0, "b": 4.0}, 0.0, 1.0, _KEY)
    means = _update(transform, _GRADIENTS)
    np.testing.assert_allclose(means["w"], [3.0, 0.3 - 3.0], rtol=1e-6)
    np.testing.assert_allclose(means["b"], 4.0 + 0.4 + 4.0, rtol=1e-6)
    zeros = {"w": jnp.zeros((2, 4_000)), "b": jnp.zeros(2)}
    noise = _update(clip_and_noise({"w": 3.0, "b": 4.0}, 2.0, 1.0, _KEY), zeros)
    assert _is_normal(noise["w"], 2.0 * 5.0)


@_promoting
def test_clip_and_noise_under_jit_in_a_chain():
    params = {"w": jnp.zeros(2), "b": jnp.zeros(())}
    optimizer = optax.chain(clip_and_noise(1.0, 1.0, 3.0, _KEY), optax.adam(0.1))
    state = optimizer.init(params)
    update = jax.jit(optimizer.update)
    for _ in range(2):
        updates, state = update(_GRADIENTS, state, params)
    assert jax.tree.map(jnp.shape, updates) == jax.tree.map(jnp.shape, params)
    assert state[0].step == 2


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("noise_multiplier", -1.0, ValueError),
        ("noise_multiplier", math.nan, ValueError),
        ("noise_multiplier", math.inf, ValueError),
        ("noise_multiplier", jnp.float32(-1), ValueError),
        ("noise_multiplier", None, TypeError),
        ("noise_multiplier", "1", TypeError),
        ("noise_multiplier", 1j, TypeError),
        ("noise_multiplier", jnp.ones(2), TypeError),
        ("noise_multiplier", jnp.bfloat16(1), TypeError),
        ("sensitivity", -1.0, ValueError),
        ("sensitivity", math.inf, ValueError),
        ("normalize_by", 0.0, ValueError),
        ("normalize_by", -8.0, ValueError),
        ("normalize_by", math.inf, ValueError),
        ("key", None, TypeError),
        ("key", 0, TypeError),
        ("key", np.int64(0), TypeError),
        ("key", jnp.int32(0), TypeError),
        ("key", jnp.zeros(2, jnp.int32), TypeError),
        ("key", jax.random.split(_KEY, 2), TypeError),
    ],
)
def test_bad_arguments(name, value, error):
    good = {"noise_multiplier": 1.0, "sensitivity": 1.0, "normalize_by": 1.0}
    with pytest.raises(error, match=rf"^{name}\b") as caught:
        privatize(**{**good, "key": _KEY, name: value})
    assert "\n" not in str(caught.value)
    clip = {"l2_clip_norm": 1.0, "noise_multiplier": 1.0, "normalize_by": 1.0}
    if name != "sensitivity":
        with pytest.raises(error, match=rf"^{name}\b"):
            clip_and_noise(**{**clip, "key": _KEY, name: value})


@pytest.mark.parametrize("value", [-1.0, math.nan, jnp.float32(-1.0)])
def test_bad_clip_norms(value):
    with pytest.raises(ValueError, match=r"^l2_clip_norm="):
        clip_and_noise(value, 1.0, 1.0, _KEY)


def test_reasons_for_no_default_key():
    with pytest.raises(TypeError, match="there is no default"):
        privatize(1.0, 1.0, 1.0, None)
    with pytest.raises(TypeError, match="seeds end up in code and logs"):
        privatize(1.0, 1.0, 1.0, 42)


@pytest.mark.parametrize("transform", [_NOISY(), clip_and_noise(1.0, 1.0, 1.0, _KEY)])
def test_integer_leaves_are_refused(transform):
    with pytest.raises(TypeError, match=r"^updates\['n'\] is int32"):
        _update(transform, {"n": jnp.zeros(3, jnp.int32)})


def test_per_example_gradients_are_refused_by_privatize():
    params = {"w": jnp.zeros(2), "b": jnp.zeros(())}
    with pytest.raises(ValueError, match=r"^updates\['b'\] has shape \(3,\)"):
        _update(_NOISY(), _GRADIENTS, params)


def test_sums_are_refused_by_clip_and_noise():
    transform = clip_and_noise(1.0, 1.0, 1.0, _KEY)
    sums = {"w": jnp.zeros((2, 3)), "v": jnp.zeros(2)}
    with pytest.raises(ValueError, match=r"^updates\['v'\] has shape"):
        _update(transform, sums, sums)
    with pytest.raises(ValueError, match=r"^updates\['b'\] is a scalar"):
        _update(transform, {"b": jnp.zeros(()), "w": jnp.zeros(2)})


def test_batch_sizes_that_disagree():
    transform = clip_and_noise(1.0, 1.0, 1.0, _KEY)
    with pytest.raises(ValueError, match=r"3 at updates\['a'\], 2 at updates\['b'\]"):
        _update(transform, {"a": jnp.zeros((3, 1)), "b": jnp.zeros(2)})
    with pytest.raises(ValueError, match="holds no array"):
        _update(transform, {})


def test_examples_in_docstrings():
    assert doctest.testmod(transforms).failed == 0
