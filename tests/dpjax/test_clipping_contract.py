"""`clipped_grad` against `jax_privacy.clipped_grad` 2.0.0, whose semantics it promises.

Every test runs for every method. Where `jax_privacy` defines the behaviour, its own
answer (or the type of its error) is the expected one.
"""

import dp_accounting
import jax
import jax.numpy as jnp
import jax_privacy
import numpy as np
import pytest

from dpjax import clipped_grad, per_example_grad_norms

METHODS = ("auto", "bookkeeping", "reweight", "vmap")
BATCH_SIZE = 6
NUM_FEATURES = 4
NUM_CLASSES = 3
CLIP_NORM = 0.8

Relation = dp_accounting.NeighboringRelation

# jax_privacy 2.0.0 still calls it.
pytestmark = pytest.mark.filterwarnings("ignore:optax.global_norm:DeprecationWarning")


@pytest.fixture(params=METHODS)
def method(request):
    return request.param


def _normal(seed, *shape, scale=1.0):
    return jnp.asarray(
        scale * np.random.default_rng(seed).standard_normal(shape), jnp.float32
    )


def _params():
    return {
        "hidden": {"kernel": _normal(0, NUM_FEATURES, 5), "bias": _normal(1, 5)},
        "head": {"kernel": _normal(2, 5, NUM_CLASSES), "bias": _normal(3, NUM_CLASSES)},
    }


def _batch(batch_size=BATCH_SIZE):
    x = _normal(4, batch_size, NUM_FEATURES)
    labels = jnp.arange(batch_size, dtype=jnp.int32) % NUM_CLASSES
    return x, labels


def _dense(params, x):
    return x @ params["kernel"] + params["bias"][None]


def _logits(params, x_BxD):
    return _dense(params["head"], jnp.tanh(_dense(params["hidden"], x_BxD)))


def _cross_entropy(logits_BxC, labels_B):
    one_hot_BxC = jax.nn.one_hot(labels_B, NUM_CLASSES, dtype=logits_BxC.dtype)
    return -jnp.mean(jnp.sum(one_hot_BxC * jax.nn.log_softmax(logits_BxC), axis=-1))


def _loss(params, x_BxD, labels_B):
    return _cross_entropy(_logits(params, x_BxD), labels_B)


def _loss_and_logits(params, x_BxD, labels_B):
    logits_BxC = _logits(params, x_BxD)
    return _cross_entropy(logits_BxC, labels_B), {
        "logits": logits_BxC,
        "correct": jnp.argmax(logits_BxC, axis=-1) == labels_B,
        "scalar": jnp.sum(x_BxD),
    }


def _square(param, x_B):
    return 0.5 * jnp.mean((x_B - param) ** 2)


def _examples():
    return 1.7 * jnp.arange(BATCH_SIZE, dtype=jnp.float32) - 2.0


def _two_parts(params, x_B, y_B):
    """A cheap loss: parameter a meets x, parameter b meets y."""
    return jnp.sum(jnp.sin(params["a"] * x_B) + params["b"] * y_B)


def _two_parts_arguments():
    params = {"a": jnp.float32(1.0), "b": jnp.float32(2.0)}
    return params, _normal(10, BATCH_SIZE), _normal(11, BATCH_SIZE)


def _plain(output):
    """The output with every named tuple as a dictionary, so that classes may differ."""
    if hasattr(output, "_asdict"):
        return {name: _plain(field) for name, field in output._asdict().items()}
    if isinstance(output, dict):
        return {name: _plain(field) for name, field in output.items()}
    if isinstance(output, tuple | list):
        return type(output)(_plain(item) for item in output)
    return output


def _assert_same(actual, expected, rtol=2e-5, atol=1e-6):
    """Same structure, shapes and dtypes; values equal up to float32 rounding."""
    actual, expected = _plain(actual), _plain(expected)
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for got, wanted in zip(
        jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True
    ):
        assert got.shape == wanted.shape
        assert got.dtype == wanted.dtype
        np.testing.assert_allclose(
            np.asarray(got, np.float64) if got.dtype == jnp.bfloat16 else got,
            np.asarray(wanted, np.float64) if got.dtype == jnp.bfloat16 else wanted,
            rtol=rtol,
            atol=atol,
        )


def _quick_jit(fun):
    """Compiles without optimising: for loops, which op by op are compiled anyway."""
    return jax.jit(fun, compiler_options={"xla_backend_optimization_level": 0})


def _check(
    fun, args, method, kwargs=None, tolerance=None, transform=lambda f: f, **options
):
    """Compares one call with `jax_privacy`; returns what dpjax gave."""
    options = {"l2_clip_norm": CLIP_NORM, **options}
    theirs = transform(jax_privacy.clipped_grad(fun, **options))
    ours = transform(clipped_grad(fun, method=method, **options))
    expected, actual = (f(*args, **(kwargs or {})) for f in (theirs, ours))
    _assert_same(actual, expected, **(tolerance or {}))
    return actual


def _check_error(fun, args, method, names, kwargs=None, also=(), **options):
    """Both libraries refuse; ours in one line that names what is wrong.

    `also` holds exception types that are as good, for the cases in which the error of
    `jax_privacy` comes from a line that happens to fail first.
    """
    options = {"l2_clip_norm": CLIP_NORM, **options}
    with pytest.raises(Exception) as expected:  # noqa: PT011 (the type is what is asked)
        jax_privacy.clipped_grad(fun, **options)(*args, **(kwargs or {}))
    with pytest.raises((expected.type, *also)) as actual:
        clipped_grad(fun, method=method, **options)(*args, **(kwargs or {}))
    message = str(actual.value)
    assert "\n" not in message
    assert any(name in message for name in names), message


# What is returned.


@pytest.mark.parametrize("has_aux", [False, True])
@pytest.mark.parametrize("return_values", [False, True])
@pytest.mark.parametrize("return_grad_norms", [False, True])
def test_return_signature(method, has_aux, return_values, return_grad_norms):
    output = _check(
        _loss_and_logits if has_aux else _loss,
        (_params(), *_batch()),
        method,
        has_aux=has_aux,
        return_values=return_values,
        return_grad_norms=return_grad_norms,
        batch_argnums=(1, 2),
    )
    if not (has_aux or return_values or return_grad_norms):
        assert set(output) == {"hidden", "head"}
        return
    _, aux = output
    assert isinstance(aux, tuple)
    assert type(aux).__name__ == "Aux"
    assert aux._fields == ("values", "grad_norms", "aux")
    assert (aux.values is None) == (not return_values)
    assert (aux.grad_norms is None) == (not return_grad_norms)
    assert (aux.aux is None) == (not has_aux)


@pytest.mark.parametrize("keep_batch_dim", [False, True])
def test_aux_axes(method, keep_batch_dim):
    """With keep_batch_dim, an axis 1 of size one is dropped from every aux leaf."""

    def loss(param, x):
        aux = {
            "input": x,
            "vector": jnp.arange(3.0),
            "one": jnp.ones((1,)),
            "matrix": jnp.ones((1, 1)),
            "integer": 4,
            "parameter": param,
            "nothing": None,
            "bool": x > 0,
        }
        return _square(param, x), aux

    _check(
        loss,
        (3.0, _examples()),
        method,
        has_aux=True,
        keep_batch_dim=keep_batch_dim,
    )


def test_docstring_examples(method):
    """Python scalars as parameters and integer data, as in jax_privacy's docstring."""
    grad_fn = clipped_grad(_square, l2_clip_norm=jnp.inf, method=method)
    assert float(grad_fn(3.0, jnp.array([0, 7, -2]))) == 4.0
    _, aux = clipped_grad(
        _square,
        l2_clip_norm=jnp.inf,
        return_values=True,
        return_grad_norms=True,
        method=method,
    )(3.0, jnp.array([0, 7, -2]))
    np.testing.assert_allclose(aux.values, [4.5, 8.0, 12.5])
    np.testing.assert_allclose(aux.grad_norms, [3.0, 4.0, 5.0], rtol=1e-6)
    users = jnp.array([[1, -1], [2, 2], [0, 3]])
    per_user = clipped_grad(
        _square, l2_clip_norm=jnp.inf, keep_batch_dim=False, method=method
    )
    assert float(per_user(3.0, users)) == 5.5


def test_numpy_inputs(method):
    params = jax.tree.map(np.asarray, _params())
    batch = [np.asarray(x) for x in _batch()]
    _check(_loss, (params, *batch), method, batch_argnums=(1, 2))


# Which arguments are differentiated, batched, or neither.


@pytest.mark.parametrize("argnums", [0, 1, (0,), (0, 1), (1, 0), (0, 1, 3)])
def test_argnums(method, argnums):
    def loss(hidden, head, x, temperature):
        logits = _dense(head, jnp.tanh(_dense(hidden, x))) / temperature
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1))

    params = _params()
    _check(
        loss,
        (params["hidden"], params["head"], _batch()[0], jnp.float32(2.0)),
        method,
        argnums=argnums,
        batch_argnums=2,
        return_grad_norms=True,
    )


@pytest.mark.parametrize("batch_argnums", [(0, 2), (2, 0)])
def test_batch_argnums_around_the_parameters(method, batch_argnums):
    x, labels = _batch()
    _check(
        lambda x, params, labels: _loss(params, x, labels),
        (x, _params(), labels),
        method,
        argnums=1,
        batch_argnums=batch_argnums,
        return_values=True,
    )


def test_batch_is_a_pytree(method):
    x, labels = _batch()
    _check(
        lambda params, batch: _loss(params, batch["x"], batch["more"][0]),
        (_params(), {"x": x, "more": [labels]}),
        method,
    )


def test_arguments_that_are_neither(method):
    """They reach `fun` as they are: arrays, tracers, and static Python values."""

    def loss(params, x, labels, offset_C, kind, scale, nothing):
        assert kind == "tanh"
        assert nothing is None
        if scale is not True:
            raise AssertionError(scale)
        logits = _logits(params, x) + offset_C[None]
        return _cross_entropy(logits, labels)

    args = (_params(), *_batch(), _normal(9, NUM_CLASSES), "tanh", True, None)
    _check(loss, args, method, batch_argnums=(1, 2))


def test_extra_keyword_arguments_are_mapped_without_a_batch_axis(method):
    def loss(params, x, labels, *, weight, offset):
        assert weight.shape == ()
        assert offset["C"].shape == (NUM_CLASSES,)
        return weight * _cross_entropy(_logits(params, x) + offset["C"][None], labels)

    _check(
        loss,
        (_params(), *_batch()),
        method,
        kwargs={
            "weight": jnp.arange(BATCH_SIZE, dtype=jnp.float32),
            "offset": {"C": _normal(5, BATCH_SIZE, NUM_CLASSES)},
        },
        batch_argnums=(1, 2),
        return_values=True,
        return_grad_norms=True,
    )


def test_padding_mask_is_not_passed_on(method):
    def loss(param, x, is_padding_example=None):
        assert is_padding_example is None
        return _square(param, x)

    mask = jnp.arange(BATCH_SIZE) == 2
    _check(loss, (3.0, _examples()), method, kwargs={"is_padding_example": mask})


@pytest.mark.parametrize("keep_batch_dim", [False, True])
def test_user_level_groups(method, keep_batch_dim):
    """Each row of the batch is one user with three examples."""
    x_BxUxD = _normal(6, BATCH_SIZE, 3, NUM_FEATURES)

    def loss(params, x):
        assert x.ndim == (3 if not keep_batch_dim else 4) - 1
        return jnp.mean(jnp.tanh(x.reshape(-1, NUM_FEATURES) @ params) ** 2)

    def loss_with_axis(params, x):
        assert x.shape == (1, 3, NUM_FEATURES)
        return jnp.mean(jnp.tanh(x.reshape(-1, NUM_FEATURES) @ params) ** 2)

    def loss_without_axis(params, x):
        assert x.shape == (3, NUM_FEATURES)
        return jnp.mean(jnp.tanh(x @ params) ** 2)

    _check(
        loss_with_axis if keep_batch_dim else loss_without_axis,
        (_normal(7, NUM_FEATURES, 5), x_BxUxD),
        method,
        keep_batch_dim=keep_batch_dim,
        l2_clip_norm=0.2,
        return_grad_norms=True,
    )


def test_batch_size_one(method):
    _check(_square, (3.0, jnp.ones(1)), method, return_values=True)


# The clip norm and its scale.


@pytest.mark.parametrize("rescale", [False, True])
@pytest.mark.parametrize("clip_norm", [0.0, 0, 1e-3, 1.0, 2, 1e6, np.inf])
def test_static_clip_norm(method, clip_norm, rescale):
    _check(
        _loss,
        (_params(), *_batch()),
        method,
        l2_clip_norm=clip_norm,
        rescale_to_unit_norm=rescale,
        batch_argnums=(1, 2),
    )


@pytest.mark.parametrize("rescale", [False, True])
def test_traced_clip_norm(method, rescale):
    """A negative clip norm known only at run time acts as zero."""

    def jitted(library_fn, **options):
        return _quick_jit(
            lambda clip_norm, *args: library_fn(
                _two_parts,
                l2_clip_norm=clip_norm,
                rescale_to_unit_norm=rescale,
                batch_argnums=(1, 2),
                **options,
            )(*args)
        )

    ours = jitted(clipped_grad, method=method)
    theirs = jitted(jax_privacy.clipped_grad)
    for clip_norm in (-1.0, 0.0, 0.5, np.inf):
        args = (jnp.float32(clip_norm), *_two_parts_arguments())
        actual = ours(*args)
        _assert_same(actual, theirs(*args))
        if clip_norm < 0 and not rescale:
            assert all(not leaf.any() for leaf in jax.tree.leaves(actual))


def test_concrete_array_clip_norm(method):
    _check(_square, (3.0, _examples()), method, l2_clip_norm=jnp.float32(1.5))
    _check(_square, (3.0, _examples()), method, l2_clip_norm=jnp.float32(-1.5))


def test_nan_clip_norm(method):
    """jax_privacy takes it for 0; here it is refused wherever it can be seen."""
    with pytest.raises(ValueError, match="l2_clip_norm"):
        clipped_grad(_square, l2_clip_norm=float("nan"), method=method)
    _check(_square, (3.0, _examples()), method, l2_clip_norm=jnp.float32(jnp.nan))


@pytest.mark.parametrize("normalize_by", [0.25, 1, 128.0])
def test_normalize_by(method, normalize_by):
    _check(
        _loss,
        (_params(), *_batch()),
        method,
        normalize_by=normalize_by,
        return_grad_norms=True,
        return_values=True,
        batch_argnums=(1, 2),
    )


@pytest.mark.parametrize("rescale", [False, True])
@pytest.mark.parametrize("clip_norm", [0.0, 1.0, np.inf])
def test_zero_gradient_example(method, clip_norm, rescale):
    _check(
        _square,
        (3.0, jnp.array([3.0, 0.0, 3.0, 9.0, 1.0, 3.0])),
        method,
        l2_clip_norm=clip_norm,
        rescale_to_unit_norm=rescale,
        return_grad_norms=True,
    )


def test_clipped_norm_stays_within_the_bound_when_squares_overflow(method):
    """A gradient of 1e25 has no float32 squared norm; it must not pass unclipped."""
    x = jnp.full((1, NUM_FEATURES), 1e25)
    grads = clipped_grad(
        lambda w, x: jnp.sum(x @ w), l2_clip_norm=CLIP_NORM, method=method
    )(jnp.zeros((NUM_FEATURES, 1)), x)
    assert float(jnp.linalg.norm(grads)) <= CLIP_NORM * (1 + 1e-5)


@pytest.mark.parametrize(
    ("relation", "factor"),
    [
        (Relation.ADD_OR_REMOVE_ONE, 1.0),
        (Relation.REPLACE_ONE, 2.0),
        (Relation.REPLACE_SPECIAL, 1.0),
    ],
)
@pytest.mark.parametrize("rescale", [False, True])
def test_sensitivity(method, relation, factor, rescale):
    options = {
        "l2_clip_norm": 1.5,
        "normalize_by": 4.0,
        "rescale_to_unit_norm": rescale,
    }
    actual = clipped_grad(_loss, method=method, **options).sensitivity(relation)
    expected = jax_privacy.clipped_grad(_loss, **options).sensitivity(relation)
    assert float(actual) == pytest.approx(float(expected))
    assert float(actual) == pytest.approx(factor * (1.0 if rescale else 1.5) / 4.0)


def test_default_sensitivity_and_unknown_relation(method):
    grad_fn = clipped_grad(_loss, l2_clip_norm=1.5, method=method)
    assert float(grad_fn.sensitivity()) == 1.5
    with pytest.raises(ValueError, match="neighboring_relation"):
        grad_fn.sensitivity("replace_two")


def test_measured_sensitivity(method):
    """One example more or less moves the sum by its clipped norm, here the bound."""
    params, batch = _params(), _batch()
    grad_fn = clipped_grad(
        _loss, l2_clip_norm=0.05, batch_argnums=(1, 2), method=method
    )
    with_it = grad_fn(params, *batch)
    for i in range(BATCH_SIZE):
        mask = jnp.arange(BATCH_SIZE) == i
        without_it = grad_fn(params, *batch, is_padding_example=mask)
        difference = jax.tree.map(jnp.subtract, with_it, without_it)
        moved = np.sqrt(sum(float(jnp.sum(d**2)) for d in jax.tree.leaves(difference)))
        assert moved == pytest.approx(0.05, rel=1e-4)


def test_padding_rows_equal_rows_left_out(method):
    params, x, y = _two_parts_arguments()
    grad_fn = clipped_grad(
        _two_parts, l2_clip_norm=CLIP_NORM, batch_argnums=(1, 2), method=method
    )
    mask = jnp.arange(BATCH_SIZE) < 3
    _assert_same(
        grad_fn(params, x, y, is_padding_example=mask), grad_fn(params, x[3:], y[3:])
    )


# Padding.


@pytest.mark.parametrize("num_padding", [0, 1, BATCH_SIZE - 1, BATCH_SIZE])
def test_padding_rows_add_nothing_whatever_they_hold(method, num_padding):
    params, (x, labels) = _params(), _batch()
    mask = jnp.arange(BATCH_SIZE) >= BATCH_SIZE - num_padding
    garbage = jnp.where(mask[:, None], jnp.nan, x)
    options = {
        "l2_clip_norm": CLIP_NORM,
        "batch_argnums": (1, 2),
        "return_values": True,
        "return_grad_norms": True,
    }
    actual, aux = clipped_grad(_loss, method=method, **options)(
        params, garbage, labels, is_padding_example=mask
    )
    expected, expected_aux = jax_privacy.clipped_grad(_loss, **options)(
        params, garbage, labels, is_padding_example=mask
    )
    _assert_same(actual, expected)
    real = BATCH_SIZE - num_padding
    assert aux.values.shape == aux.grad_norms.shape == (BATCH_SIZE,)
    np.testing.assert_allclose(aux.values[:real], expected_aux.values[:real], 2e-5)
    np.testing.assert_allclose(
        aux.grad_norms[:real], expected_aux.grad_norms[:real], 2e-5
    )
    if num_padding == BATCH_SIZE:
        assert all(not leaf.any() for leaf in jax.tree.leaves(actual))


@pytest.mark.parametrize("nan_safe", [False, True])
def test_padding_in_the_middle(method, nan_safe):
    """Without nan_safe too, what padding rows hold never reaches the sum."""
    x = _examples().at[1].set(jnp.nan).at[3].set(jnp.inf)
    mask = ~jnp.isfinite(x)
    for mask_like in (mask, np.asarray(mask), mask.astype(jnp.int32)):
        output = _check(
            _square,
            (3.0, x),
            method,
            kwargs={"is_padding_example": mask_like},
            nan_safe=nan_safe,
        )
        assert jnp.isfinite(output)


def test_one_compilation_for_all_masks(method):
    traces = []

    def loss(params, x, labels):
        traces.append(None)
        return _loss(params, x, labels)

    grad_fn = jax.jit(
        clipped_grad(loss, l2_clip_norm=1.0, batch_argnums=(1, 2), method=method)
    )
    params, batch = _params(), _batch()
    grad_fn(params, *batch, is_padding_example=jnp.zeros(BATCH_SIZE, bool))
    num_traces = len(traces)
    for real in range(BATCH_SIZE):
        mask = jnp.arange(BATCH_SIZE) >= real
        grad_fn(params, *batch, is_padding_example=mask)
    assert num_traces > 0
    assert len(traces) == num_traces
    assert grad_fn._cache_size() == 1


# Examples that are not finite.


@pytest.mark.parametrize("nan_safe", [False, True])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_bad_example_among_clean_ones(method, bad, nan_safe):
    x, labels = _batch()
    _check(
        _loss,
        (_params(), x.at[2].set(bad), labels),
        method,
        batch_argnums=(1, 2),
        nan_safe=nan_safe,
        return_values=True,
        return_grad_norms=True,
    )


@pytest.mark.parametrize("rescale", [False, True])
@pytest.mark.parametrize("nan_safe", [False, True])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_partly_bad_gradient_keeps_its_finite_entries(method, bad, nan_safe, rescale):
    """The bad entries count as zero; the rest of that example is clipped as usual."""
    x = jnp.array([1.0, bad, -0.5, 0.0, 0.0, 0.0])
    y = jnp.array([0.5, 3.0, 0.1, 0.0, 0.0, 0.0])
    output = _check(
        lambda params, x, y: jnp.sum(params["a"] * x + params["b"] * y),
        ({"a": jnp.float32(1.0), "b": jnp.float32(2.0)}, x, y),
        method,
        batch_argnums=(1, 2),
        nan_safe=nan_safe,
        rescale_to_unit_norm=rescale,
        return_grad_norms=True,
    )
    if not nan_safe:
        return
    clipped_b = 0.5 * CLIP_NORM / np.hypot(1.0, 0.5) + CLIP_NORM + 0.1
    divisor = CLIP_NORM if rescale else 1.0
    assert float(output[0]["b"]) == pytest.approx(clipped_b / divisor, rel=1e-5)


def test_partly_bad_gradient_within_one_array(method):
    """Only some columns of one weight matrix are NaN."""
    x_BxD = _normal(8, BATCH_SIZE, NUM_FEATURES).at[1, 2].set(jnp.nan)
    scale_D = _normal(9, NUM_FEATURES)
    output = _check(
        lambda w, x: jnp.sum(w["scale"][None] * x) + jnp.sum(w["bias"]),
        ({"scale": scale_D, "bias": jnp.ones((2, 2))}, x_BxD),
        method,
    )
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(output))


@pytest.mark.parametrize("nan_safe", [False, True])
@pytest.mark.parametrize("microbatch_size", [None, 3])
def test_partly_bad_gradient_under_jit(method, nan_safe, microbatch_size):
    """Compiled, nothing is known about the examples beforehand."""
    params, x, y = _two_parts_arguments()
    params |= {"unused": jnp.ones((2, 3))}
    _check(
        _two_parts,
        (params, x.at[1].set(jnp.nan), y.at[4].set(jnp.inf)),
        method,
        transform=_quick_jit,
        batch_argnums=(1, 2),
        nan_safe=nan_safe,
        microbatch_size=microbatch_size,
    )


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_saturated_mlp_with_a_bad_pixel(method, bad):
    """An infinite pixel saturates the sigmoid: the upper layers stay finite."""

    def loss(params, x, labels):
        hidden = jax.nn.sigmoid(_dense(params["hidden"], x))
        return _cross_entropy(_dense(params["head"], hidden), labels)

    x, labels = _batch()
    output, _ = _check(
        loss,
        (_params(), x.at[1, 0].set(bad), labels),
        method,
        batch_argnums=(1, 2),
        l2_clip_norm=0.3,
        return_grad_norms=True,
    )
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(output))


def test_all_examples_bad(method):
    x, labels = _batch()
    output = _check(
        _loss,
        (_params(), jnp.full_like(x, jnp.nan), labels),
        method,
        batch_argnums=(1, 2),
    )
    assert all(not leaf.any() for leaf in jax.tree.leaves(output))


def test_bad_parameters(method):
    params = _params()
    params["head"]["bias"] = params["head"]["bias"].at[0].set(jnp.nan)
    _check(_loss, (params, *_batch()), method, batch_argnums=(1, 2))


# Parameters and losses out of the ordinary.


def test_unused_parameter_has_zero_gradient(method):
    params = {**_params(), "unused": jnp.ones((2, 3)), "nothing": None}
    output, _ = _check(
        _loss,
        (params, *_batch()),
        method,
        batch_argnums=(1, 2),
        return_grad_norms=True,
    )
    assert not output["unused"].any()


def test_parameter_of_size_zero(method):
    output = _check(
        lambda params, x: (
            _square(params["w"], x) + jnp.sum(x[:, None] @ params["none"])
        ),
        ({"w": jnp.float32(3.0), "none": jnp.zeros((1, 0))}, _examples()),
        method,
        transform=_quick_jit,
    )
    assert output["none"].shape == (1, 0)


def test_no_parameters(method):
    _check(lambda params, x: jnp.sum(x), ({}, jnp.ones(3)), method)


def test_loss_without_data(method):
    """A regulariser alone: every example has the same gradient, each is clipped."""
    _check(
        lambda params, x: 0.5 * jnp.sum(params**2),
        (_normal(1, 7), jnp.zeros((BATCH_SIZE, 2))),
        method,
        return_values=True,
        return_grad_norms=True,
    )


def test_loss_without_parameters(method):
    _check(
        lambda params, x: jnp.sum(x),
        (_normal(1, 7), _batch()[0]),
        method,
        return_values=True,
        return_grad_norms=True,
    )


def test_constant_loss(method):
    _check(lambda param, x: 3.0, (1.0, jnp.ones(3)), method)


def test_complex_parameter(method):
    """The cotangent convention of jax.grad (conjugate) holds for complex leaves."""
    _check(
        lambda param, x: jnp.sum(jnp.abs(param * x) ** 2),
        (jnp.complex64(1.0 + 0.5j), jnp.array([0.1, 2.0, -1.0])),
        method,
        return_grad_norms=True,
    )


def test_closed_over_arrays_and_tracers(method):
    x, labels = _batch()
    params = _params()

    def run(library_fn, **options):
        @jax.jit
        def step(head, hidden):
            offset = head["bias"] * 2.0

            def loss(hidden, x, labels):
                logits = _logits({"hidden": hidden, "head": head}, x)
                return _cross_entropy(logits + offset[None], labels)

            return library_fn(
                loss, l2_clip_norm=CLIP_NORM, batch_argnums=(1, 2), **options
            )(hidden, x, labels)

        return step(params["head"], params["hidden"])

    _assert_same(run(clipped_grad, method=method), run(jax_privacy.clipped_grad))


def test_closed_over_parameters_get_no_gradient(method):
    frozen = _params()["head"]

    def loss(hidden, x, labels):
        return _loss({"hidden": hidden, "head": frozen}, x, labels)

    _check(loss, (_params()["hidden"], *_batch()), method, batch_argnums=(1, 2))


# Dtypes.


def _as_bfloat16(tree):
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)


BFLOAT16 = {"rtol": 3e-2, "atol": 1e-2}


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_bfloat16_parameters(method, dtype):
    """Values keep the loss's dtype; norms are never coarser than jax_privacy's."""
    args = _as_bfloat16(_two_parts_arguments())
    options = {"l2_clip_norm": CLIP_NORM, "batch_argnums": (1, 2), "dtype": dtype}
    wanted = jax_privacy.clipped_grad(_two_parts, **options)(*args)
    output, aux = clipped_grad(
        _two_parts,
        return_values=True,
        return_grad_norms=True,
        method=method,
        **options,
    )(*args)
    _assert_same(output, wanted, **BFLOAT16)
    assert output["a"].dtype == (dtype or jnp.bfloat16)
    assert aux.values.dtype == jnp.bfloat16
    assert aux.grad_norms.dtype in (jnp.float32, jnp.bfloat16)
    exact = per_example_grad_norms(_two_parts, batch_argnums=(1, 2))(*args)
    np.testing.assert_allclose(aux.grad_norms.astype(jnp.float32), exact, rtol=2e-2)


def test_float32_sum_of_bfloat16_gradients_does_not_saturate(method):
    """600 unit gradients: a bfloat16 running sum would stop at 256."""
    output = clipped_grad(
        lambda param, x: jnp.sum(param * x),
        l2_clip_norm=1.0,
        dtype=jnp.float32,
        method=method,
    )(jnp.bfloat16(1.0), jnp.ones(600, jnp.bfloat16))
    assert output.dtype == jnp.float32
    assert float(output) == pytest.approx(600.0, rel=1e-5)


def test_mixed_dtypes_keep_theirs(method):
    params, x, y = _two_parts_arguments()
    _check(
        _two_parts,
        (params | {"b": params["b"].astype(jnp.bfloat16)}, x, y),
        method,
        tolerance=BFLOAT16,
        batch_argnums=(1, 2),
    )


def test_lower_dtype_for_the_sum(method):
    output = _check(
        _two_parts,
        _two_parts_arguments(),
        method,
        tolerance=BFLOAT16,
        batch_argnums=(1, 2),
        dtype=jnp.bfloat16,
    )
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(output))


# Random keys.


def _noisy_square(param, x, key):
    return _square(param, x + jax.random.normal(key, x.shape))


@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey])
def test_prng_argnum(method, make_key):
    """Every example gets the key that jax_privacy gives it."""
    _check(
        _noisy_square,
        (3.0, _examples(), make_key(3)),
        method,
        prng_argnum=2,
        return_values=True,
        return_grad_norms=True,
    )


def test_prng_argnum_with_microbatches(method):
    _check(
        _noisy_square,
        (3.0, _examples(), jax.random.key(3)),
        method,
        transform=_quick_jit,
        prng_argnum=2,
        return_values=True,
        microbatch_size=2,
    )


def test_prng_pytree(method):
    def loss(param, x, keys):
        x += jax.random.normal(keys["a"], x.shape)
        return _square(param, x + jax.random.normal(keys["b"], x.shape))

    keys = {"a": jax.random.key(0), "b": jax.random.key(1)}
    _check(loss, (3.0, _examples(), keys), method, prng_argnum=2)


def test_key_that_is_not_split(method):
    """A key that prng_argnum does not name is the same one for every example."""
    _check(
        _noisy_square,
        (3.0, _examples(), jax.random.key(3)),
        method,
        return_values=True,
    )


def test_keys_that_are_data(method):
    """A batch of typed keys, as an argument and as a keyword argument."""

    def loss(param, x, key, *, other):
        x += jax.random.normal(key[0], x.shape)
        return _square(param, x + jax.random.normal(other, x.shape))

    keys = jax.random.split(jax.random.key(1), BATCH_SIZE)
    _check(
        loss,
        (3.0, _examples(), keys),
        method,
        kwargs={"other": keys[::-1]},
        batch_argnums=(1, 2),
    )


# Microbatches.


@pytest.mark.parametrize("microbatch_size", [1, 3, BATCH_SIZE])
def test_microbatch_size(method, microbatch_size):
    """Every per-example output comes back in the order of the batch."""
    _check(
        lambda param, x: (_square(param, x), {"x": x, "sum": jnp.sum(x)}),
        (3.0, _examples()),
        method,
        transform=_quick_jit,
        has_aux=True,
        return_values=True,
        return_grad_norms=True,
        microbatch_size=microbatch_size,
        normalize_by=3.0,
    )


def test_microbatches_of_a_model(method):
    _check(
        _loss_and_logits,
        (_params(), *_batch()),
        method,
        transform=_quick_jit,
        has_aux=True,
        batch_argnums=(1, 2),
        microbatch_size=3,
    )


@pytest.mark.parametrize("num_padding", [1, 3, BATCH_SIZE])
def test_microbatches_with_padding(method, num_padding):
    mask = jnp.arange(BATCH_SIZE) >= BATCH_SIZE - num_padding
    _check(
        _square,
        (3.0, jnp.where(mask, jnp.nan, _examples())),
        method,
        kwargs={"is_padding_example": mask},
        transform=_quick_jit,
        microbatch_size=2,
    )


def test_microbatches_with_keyword_arguments(method):
    _check(
        lambda param, x, *, weight: weight * _square(param, x),
        (3.0, _examples()),
        method,
        kwargs={"weight": jnp.arange(BATCH_SIZE, dtype=jnp.float32)},
        transform=_quick_jit,
        microbatch_size=3,
        return_values=True,
    )


@pytest.mark.parametrize("microbatch_size", [4, 5, 7])
def test_microbatch_size_must_divide(method, microbatch_size):
    _check_error(
        _loss,
        (_params(), *_batch()),
        method,
        ("microbatch_size", "reshape"),
        batch_argnums=(1, 2),
        microbatch_size=microbatch_size,
    )


# A transform before the clip, for which gradients have to be formed.

forming_gradients = pytest.mark.parametrize("method", ["auto", "vmap"])


@forming_gradients
def test_pre_clipping_transform_that_scales(method):
    def transform(grads):
        return {"hidden": jax.tree.map(lambda g: 10 * g, grads["hidden"])} | {
            "head": grads["head"]
        }

    _check(
        _loss,
        (_params(), *_batch()),
        method,
        batch_argnums=(1, 2),
        pre_clipping_transform=transform,
        return_grad_norms=True,
    )


@forming_gradients
def test_pre_clipping_transform_that_changes_structure(method):
    def transform(grads):
        return grads["head"]["bias"] * 2, [grads["hidden"]["kernel"].sum(0)]

    output, _ = _check(
        _loss,
        (_params(), *_batch()),
        method,
        batch_argnums=(1, 2),
        pre_clipping_transform=transform,
        return_grad_norms=True,
        rescale_to_unit_norm=True,
        normalize_by=2.0,
    )
    assert isinstance(output, tuple)
    assert output[0].shape == (NUM_CLASSES,)


@forming_gradients
def test_pre_clipping_transform_that_is_not_linear(method):
    _check(
        _loss,
        (_params(), *_batch()),
        method,
        batch_argnums=(1, 2),
        pre_clipping_transform=lambda grads: jax.tree.map(jnp.sign, grads),
    )


@pytest.mark.parametrize("method", ["bookkeeping", "reweight"])
def test_pre_clipping_transform_needs_gradients(method):
    """These methods never form what it would transform, so asking for both is wrong."""
    with pytest.raises(ValueError, match="pre_clipping_transform") as error:
        clipped_grad(
            _square,
            l2_clip_norm=1.0,
            pre_clipping_transform=lambda grads: 2 * grads,
            method=method,
        )
    assert "\n" not in str(error.value)


# Inside other transformations.


def test_under_jit(method):
    params, batch = _params(), _batch()
    options = {
        "l2_clip_norm": CLIP_NORM,
        "batch_argnums": (1, 2),
        "return_grad_norms": True,
    }
    grad_fn = clipped_grad(_loss, method=method, **options)
    _assert_same(
        jax.jit(grad_fn)(params, *batch),
        jax_privacy.clipped_grad(_loss, **options)(params, *batch),
    )


def test_under_eval_shape(method):
    grad_fn = clipped_grad(
        _loss, l2_clip_norm=CLIP_NORM, batch_argnums=(1, 2), method=method
    )
    shapes = jax.eval_shape(grad_fn, _params(), *_batch())
    assert jax.tree.map(lambda s: s.shape, shapes) == jax.tree.map(
        lambda p: p.shape, _params()
    )


def test_under_scan(method):
    """A training loop of three steps inside lax.scan."""
    params, x, y = _two_parts_arguments()
    xs, ys = jnp.stack([x, x[::-1], 2 * x]), jnp.stack([y, y[::-1], y])

    def train(library_fn, **options):
        grad_fn = library_fn(
            _two_parts, l2_clip_norm=CLIP_NORM, batch_argnums=(1, 2), **options
        )

        def step(params, batch):
            grads = grad_fn(params, *batch)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), grads

        return _quick_jit(lambda p: jax.lax.scan(step, p, (xs, ys)))(params)

    _assert_same(train(clipped_grad, method=method), train(jax_privacy.clipped_grad))


def test_under_vmap_over_parameters(method):
    params, x, y = _two_parts_arguments()
    params_S = jax.tree.map(lambda p: jnp.stack([p, -p, 0.5 * p]), params)

    def run(library_fn, **options):
        grad_fn = library_fn(
            _two_parts,
            l2_clip_norm=CLIP_NORM,
            batch_argnums=(1, 2),
            return_grad_norms=True,
            **options,
        )
        return _quick_jit(jax.vmap(grad_fn, (0, None, None)))(params_S, x, y)

    _assert_same(run(clipped_grad, method=method), run(jax_privacy.clipped_grad))


def test_under_vmap_over_clip_norms(method):
    def run(library_fn, **options):
        def one(clip_norm):
            return library_fn(
                _two_parts, l2_clip_norm=clip_norm, batch_argnums=(1, 2), **options
            )(*_two_parts_arguments())

        return _quick_jit(jax.vmap(one))(jnp.array([0.0, 0.3, 5.0]))

    _assert_same(run(clipped_grad, method=method), run(jax_privacy.clipped_grad))


def _mesh():
    automatic = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh((jax.device_count(),), ("data",), axis_types=automatic)


@pytest.mark.parametrize("spmd_axis_name", [None, "data"])
def test_batch_sharded_over_devices(method, spmd_axis_name):
    params, x, y = _two_parts_arguments()
    sharding = jax.NamedSharding(_mesh(), jax.P("data"))
    _check(
        _two_parts,
        (params, *jax.device_put((x, y), sharding)),
        method,
        transform=_quick_jit,
        batch_argnums=(1, 2),
        spmd_axis_name=spmd_axis_name,
        return_grad_norms=True,
    )


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("varying", [False, True])
def test_under_shard_map_is_exact_or_refused(method, varying, check_vma):
    """Each device clips its own examples, then the sums are added.

    JAX adds up derivatives by values that are replicated over a mesh axis. Where that
    reaches per-example gradients they mix examples of several devices and no bound
    holds, as in jax_privacy 2.0.0.
    """
    params, x, y = _two_parts_arguments()
    grad_fn = clipped_grad(
        _two_parts, l2_clip_norm=CLIP_NORM, batch_argnums=(1, 2), method=method
    )

    def on_one_device(params, x, y):
        if varying and check_vma:
            params = jax.tree.map(
                lambda p: jax.lax.pcast(p, "data", to="varying"), params
            )
        return jax.lax.psum(grad_fn(params, x, y), "data")

    mapped = jax.shard_map(
        on_one_device,
        mesh=_mesh(),
        in_specs=(jax.P(), jax.P("data"), jax.P("data")),
        out_specs=jax.P(),
        check_vma=check_vma,
    )
    total, refusal = None, ""
    try:
        total = _quick_jit(mapped)(params, x, y)
    except ValueError as error:
        refusal = str(error)
    if total is not None:
        _assert_same(total, grad_fn(params, x, y))
        return
    assert check_vma
    assert "shard_map" in refusal
    assert "\n" not in refusal


def test_is_deterministic_and_leaves_its_inputs_alone(method):
    params, batch = _params(), _batch()
    grad_fn = clipped_grad(
        _loss, l2_clip_norm=CLIP_NORM, batch_argnums=(1, 2), method=method
    )
    kwargs = {"is_padding_example": jnp.arange(BATCH_SIZE) > 3}
    first = grad_fn(params, *batch, **kwargs)
    assert list(kwargs) == ["is_padding_example"]
    second = grad_fn(params, *batch, **kwargs)
    assert all(
        bool(jnp.array_equal(a, b))
        for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    )


# Norms on their own.


@pytest.mark.parametrize("keep_batch_dim", [False, True])
def test_per_example_grad_norms(keep_batch_dim):
    x, labels = _batch()
    fun = (
        _loss
        if keep_batch_dim
        else lambda params, x, label: _loss(params, x[None], label[None])
    )
    norms = per_example_grad_norms(
        fun, batch_argnums=(1, 2), keep_batch_dim=keep_batch_dim
    )(_params(), x, labels)
    _, aux = jax_privacy.clipped_grad(
        _loss, l2_clip_norm=1.0, batch_argnums=(1, 2), return_grad_norms=True
    )(_params(), x, labels)
    assert norms.dtype == jnp.float32
    np.testing.assert_allclose(norms, aux.grad_norms, rtol=1e-5)


def test_per_example_grad_norms_of_bfloat16_parameters_are_float32():
    args = _as_bfloat16(_two_parts_arguments())
    norms = per_example_grad_norms(_two_parts, batch_argnums=(1, 2))(*args)
    assert norms.shape == (BATCH_SIZE,)
    assert norms.dtype == jnp.float32


# Errors.


def test_unknown_method():
    with pytest.raises(ValueError, match=r"method.*'ghost'"):
        clipped_grad(_loss, l2_clip_norm=1.0, method="ghost")


def test_error_negative_static_clip_norm(method):
    for clip_norm in (-1.0, -1, np.float32(-0.5), -np.inf):
        _check_error(
            _square,
            (3.0, jnp.ones(3)),
            method,
            ("l2_clip_norm", "clip_norm"),
            l2_clip_norm=clip_norm,
        )


@pytest.mark.parametrize("normalize_by", [0, 0.0, -1.0])
def test_error_normalize_by(method, normalize_by):
    _check_error(
        _square,
        (3.0, jnp.ones(3)),
        method,
        ("normalize_by",),
        normalize_by=normalize_by,
    )


@pytest.mark.parametrize(
    "options",
    [
        {"argnums": -1},
        {"argnums": (0, -2)},
        {"batch_argnums": -1},
        {"batch_argnums": ()},
        {"argnums": ()},
        {"argnums": (0, 1)},
        {"argnums": 1},
        {"argnums": 2, "batch_argnums": (1, 2)},
    ],
    ids=str,
)
def test_error_argnums(method, options):
    _check_error(
        lambda a, b, c: jnp.sum(a * b * c),
        (3.0, jnp.ones(3), 1.0),
        method,
        ("argnums",),
        **options,
    )


def test_static_errors_are_raised_at_construction(method):
    for options in ({"argnums": 1}, {"normalize_by": 0.0}, {"batch_argnums": ()}):
        with pytest.raises(ValueError, match=r"argnums|normalize_by"):
            clipped_grad(_square, l2_clip_norm=1.0, method=method, **options)


def test_error_clip_norm_missing(method):
    with pytest.raises(TypeError, match="l2_clip_norm"):
        clipped_grad(_square, method=method)


def test_error_batch_lengths_differ(method):
    x, labels = _batch()
    _check_error(
        _loss,
        (_params(), x, labels[:-1]),
        method,
        ("batch_argnums", "batch"),
        batch_argnums=(1, 2),
    )
    _check_error(
        lambda param, x: param * jnp.sum(x["a"]),
        (1.0, {"a": jnp.ones(3), "b": jnp.ones((2, 3))}),
        method,
        ("batch_argnums", "batch"),
    )


def test_error_padding_mask_length(method):
    _check_error(
        _square,
        (3.0, jnp.ones(3)),
        method,
        ("is_padding_example",),
        kwargs={"is_padding_example": jnp.zeros(2, bool)},
    )


@pytest.mark.parametrize("weight", [2.0, jnp.ones(4)], ids=["scalar", "length"])
def test_error_keyword_argument_without_the_batch_axis(method, weight):
    _check_error(
        lambda param, x, *, weight: jnp.sum(weight) * _square(param, x),
        (3.0, jnp.ones(3)),
        method,
        ("weight",),
        kwargs={"weight": weight},
    )


@pytest.mark.parametrize("keep_batch_dim", [False, True])
def test_error_missing_positional_arguments(method, keep_batch_dim):
    """jax_privacy raises an IndexError where an axis is added before the check."""
    _check_error(
        lambda params, x, y: params * jnp.sum(x),
        (3.0, jnp.ones(3)),
        method,
        ("batch_argnums", "argnum"),
        also=(ValueError,),
        batch_argnums=(1, 2),
        keep_batch_dim=keep_batch_dim,
    )
    _check_error(
        lambda x, y, params=1.0: params * jnp.sum(x),
        (jnp.ones(3), jnp.ones(3)),
        method,
        ("argnums",),
        also=(ValueError,),
        argnums=2,
        batch_argnums=1,
        keep_batch_dim=keep_batch_dim,
    )


def test_error_batch_given_by_keyword(method):
    _check_error(
        _square,
        (3.0,),
        method,
        ("batch_argnums", "argnum"),
        kwargs={"x_B": jnp.ones(3)},
        also=(ValueError,),
    )


@pytest.mark.parametrize(
    "batch", [{}, jnp.float32(1.0), [1.0, 2.0]], ids=["empty", "scalar", "list"]
)
@pytest.mark.parametrize("keep_batch_dim", [False, True])
def test_error_batch_without_a_batch_axis(method, batch, keep_batch_dim):
    _check_error(
        lambda param, x: param * 2.0,
        (3.0, batch),
        method,
        ("batch_argnums", "batch"),
        also=(ValueError,),
        keep_batch_dim=keep_batch_dim,
    )


@pytest.mark.parametrize("microbatch_size", [None, 2])
def test_zero_size_batch_sums_to_zero(method, microbatch_size):
    """Poisson sampling may draw nobody (jax_privacy 2.0.0 fails on such an array)."""
    grads, aux = clipped_grad(
        _loss,
        l2_clip_norm=1.0,
        batch_argnums=(1, 2),
        return_values=True,
        return_grad_norms=True,
        microbatch_size=microbatch_size,
        method=method,
    )(_params(), *_batch(0))
    assert aux.values.shape == aux.grad_norms.shape == (0,)
    _assert_same(grads, jax.tree.map(jnp.zeros_like, _params()))


@pytest.mark.parametrize(
    ("fun", "name"),
    [
        (lambda param, x: param * x, "shape"),
        (lambda param, x: (jnp.sum(param * x), 1.0), "scalar"),
        (lambda param, x: jnp.sum(param * x).astype(jnp.int32), "int32"),
        (lambda param, x: None, "None"),
    ],
    ids=["vector", "tuple", "integer", "nothing"],
)
def test_error_loss_is_not_a_real_scalar(method, fun, name):
    _check_error(fun, (3.0, jnp.ones(3)), method, (name, "fun", "scalar"))


def test_error_has_aux_without_a_pair(method):
    _check_error(_square, (3.0, jnp.ones(3)), method, ("aux",), has_aux=True)


@pytest.mark.parametrize(
    "step", [3, jnp.arange(2), jnp.array(True)], ids=["python", "int32", "bool"]
)
def test_error_integer_parameter_is_named(method, step):
    _check_error(
        lambda params, x: jnp.sum(params["layer"]["w"] * x),
        ({"layer": {"w": jnp.float32(1.0), "step": step}}, jnp.ones(3)),
        method,
        ("step",),
    )


def test_errors_of_fun_pass_through(method):
    def loss(param, x):
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        clipped_grad(loss, l2_clip_norm=1.0, method=method)(3.0, jnp.ones(3))


# Per-layer clipping: a pytree prefix of clip norms.


def _grouped_reference(fun, params, batch, clip_norms, rescale=False):
    """Clips every group of every example's gradient by itself, in plain loops."""
    groups = jax.tree.structure(clip_norms)
    bounds = jax.tree.leaves(clip_norms)
    total = jax.tree.map(jnp.zeros_like, params)
    for i in range(batch[0].shape[0]):
        grads = jax.grad(fun)(params, *[x[i : i + 1] for x in batch])
        clipped = []
        for bound, group in zip(bounds, groups.flatten_up_to(grads), strict=True):
            norm = np.sqrt(sum(float(jnp.sum(g**2)) for g in jax.tree.leaves(group)))
            factor = bound / max(norm, bound) / (bound if rescale else 1.0)
            clipped.append(jax.tree.map(lambda g, f=factor: f * g, group))
        total = jax.tree.map(jnp.add, total, jax.tree.unflatten(groups, clipped))
    return total


PREFIXES = {
    "layers": {"hidden": 0.4, "head": 0.3},
    "leaves": {
        "hidden": {"kernel": 0.4, "bias": 0.2},
        "head": {"kernel": 0.3, "bias": 0.1},
    },
    "mixed": {"hidden": 0.4, "head": {"kernel": 0.3, "bias": 100.0}},
}


@pytest.fixture(params=PREFIXES)
def clip_norms(request):
    return PREFIXES[request.param]


@pytest.mark.parametrize("method", ["auto", "bookkeeping", "vmap"])
@pytest.mark.parametrize("rescale", [False, True])
def test_per_layer_clipping(method, clip_norms, rescale):
    params, batch = _params(), _batch()
    grad_fn = clipped_grad(
        _loss,
        l2_clip_norm=clip_norms,
        rescale_to_unit_norm=rescale,
        batch_argnums=(1, 2),
        return_grad_norms=True,
        method=method,
    )
    grads, aux = grad_fn(params, *batch)
    _assert_same(grads, _grouped_reference(_loss, params, batch, clip_norms, rescale))
    _, expected = jax_privacy.clipped_grad(
        _loss, l2_clip_norm=1.0, batch_argnums=(1, 2), return_grad_norms=True
    )(params, *batch)
    np.testing.assert_allclose(aux.grad_norms, expected.grad_norms, rtol=1e-5)


@pytest.mark.parametrize("method", ["auto", "bookkeeping", "vmap"])
def test_per_layer_sensitivity(method, clip_norms):
    bounds = jax.tree.leaves(clip_norms)
    flat = clipped_grad(_loss, l2_clip_norm=clip_norms, normalize_by=2.0, method=method)
    wanted = np.sqrt(np.sum(np.square(bounds))) / 2.0
    assert float(flat.sensitivity()) == pytest.approx(wanted)
    assert float(flat.sensitivity(Relation.REPLACE_ONE)) == pytest.approx(2 * wanted)
    unit = clipped_grad(
        _loss, l2_clip_norm=clip_norms, rescale_to_unit_norm=True, method=method
    )
    assert float(unit.sensitivity()) == pytest.approx(np.sqrt(len(bounds)))


@pytest.mark.parametrize("method", ["auto", "bookkeeping", "vmap"])
def test_per_layer_clipping_of_several_arguments(method):
    """The prefix follows the structure of the gradient: a tuple for several argnums."""
    params, (x, labels) = _params(), _batch()

    def loss(hidden, head, x, labels):
        return _loss({"hidden": hidden, "head": head}, x, labels)

    grads = clipped_grad(
        loss,
        argnums=(0, 1),
        batch_argnums=(2, 3),
        l2_clip_norm=(0.4, 0.3),
        method=method,
    )(params["hidden"], params["head"], x, labels)
    expected = _grouped_reference(_loss, params, (x, labels), PREFIXES["layers"])
    _assert_same(grads, (expected["hidden"], expected["head"]))


@pytest.mark.parametrize("method", ["auto", "bookkeeping", "vmap"])
def test_per_layer_clipping_with_traced_bounds_padding_and_nan(method):
    params, (x, labels) = _params(), _batch()
    mask = jnp.arange(BATCH_SIZE) >= 4

    @jax.jit
    def run(bounds, x):
        return clipped_grad(
            _loss, l2_clip_norm=bounds, batch_argnums=(1, 2), method=method
        )(params, x, labels, is_padding_example=mask)

    bad = x.at[3:].set(jnp.nan)
    bounds = {"hidden": jnp.float32(0.4), "head": jnp.float32(0.3)}
    expected = _grouped_reference(
        _loss, params, (x[:3], labels[:3]), PREFIXES["layers"]
    )
    _assert_same(run(bounds, bad), expected)


@pytest.mark.parametrize("method", ["auto", "bookkeeping", "vmap"])
def test_per_layer_clipping_of_a_partly_bad_gradient(method):
    """The group that is NaN adds nothing; the other is clipped to its own bound."""
    params, x, y = _two_parts_arguments()
    grads = clipped_grad(
        _two_parts,
        l2_clip_norm={"a": 0.2, "b": 0.3},
        batch_argnums=(1, 2),
        method=method,
    )(params, x.at[1].set(jnp.nan), y)
    clean = _grouped_reference(
        _two_parts, params, (x.at[1].set(0.0), y), {"a": 0.2, "b": 0.3}
    )
    _assert_same(grads, clean)


def test_per_layer_clipping_has_no_reweighted_form(clip_norms):
    """One weight per example cannot scale groups of parameters differently."""
    with pytest.raises(ValueError, match="reweight") as error:
        clipped_grad(
            _loss, l2_clip_norm=clip_norms, batch_argnums=(1, 2), method="reweight"
        )(_params(), *_batch())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("method", ["auto", "bookkeeping", "vmap"])
def test_error_clip_norm_that_is_not_a_prefix(method):
    with pytest.raises(ValueError, match="l2_clip_norm"):
        clipped_grad(
            _loss,
            l2_clip_norm={"hidden": 1.0, "tail": 1.0},
            batch_argnums=(1, 2),
            method=method,
        )(_params(), *_batch())


@pytest.mark.parametrize("method", ["auto", "bookkeeping", "vmap"])
def test_error_negative_bound_in_a_prefix(method):
    with pytest.raises(ValueError, match="l2_clip_norm"):
        clipped_grad(
            _loss,
            l2_clip_norm={"hidden": 1.0, "head": -1.0},
            batch_argnums=(1, 2),
            method=method,
        )(_params(), *_batch())
