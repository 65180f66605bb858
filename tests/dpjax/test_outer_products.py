"""Norms of sums of outer products against the sums, formed in float64."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from dpjax.outer_products import (
    Dense,
    OneHot,
    OuterProducts,
    Patches,
    Window,
    squared_norm,
)


def _dense(rng, groups, length, width):
    return Dense(jnp.asarray(rng.standard_normal((groups, length, width)), jnp.float32))


def _rows(factor):
    """A factor as float64[n, t, k]."""
    if isinstance(factor, Dense):
        return np.asarray(factor.array_NxTxK, np.float64)
    if isinstance(factor, OneHot):
        ids = np.asarray(factor.ids_NxT[0])
        return np.equal(ids[:, None], np.arange(factor.width)[None])[None].astype(
            np.float64
        )
    image = np.asarray(factor.input_NxSxC, np.float64)
    windows = factor.windows
    patches = []
    for place in np.ndindex(*(w.outputs for w in windows)):
        offsets = np.ndindex(*(w.size for w in windows))
        picked = [
            image[
                (
                    slice(None),
                    *(
                        t * w.stride + k * w.dilation
                        for t, k, w in zip(place, offset, windows, strict=True)
                    ),
                )
            ]
            for offset in offsets
        ]
        patches.append(np.concatenate(picked, axis=-1))
    return np.stack(patches, axis=1)


def _expected(uses):
    total = sum(
        np.einsum("ntk,ntp->nkp", _rows(use.left), _rows(use.right)) for use in uses
    )
    return np.sum(total**2)


@hypothesis.given(st.data())
@hypothesis.settings(max_examples=12)
def test_dense_uses_concatenate(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    groups = data.draw(st.integers(1, 3))
    left, right = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))
    lengths = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    uses = [
        OuterProducts(
            _dense(rng, groups, length, left), _dense(rng, groups, length, right)
        )
        for length in lengths
    ]
    norm = squared_norm(uses)
    np.testing.assert_allclose(norm.value, _expected(uses), rtol=1e-5)
    assert norm.value + norm.rounding >= _expected(uses)


@hypothesis.given(st.data())
@hypothesis.settings(max_examples=12)
def test_lookups_and_a_tied_head(data):
    """Ids repeat and leave the table on both sides; the head has the table's shape."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    rows, width = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 4))
    length = data.draw(st.integers(1, 7))
    ids = jnp.asarray(rng.integers(-2, rows + 2, length), jnp.int32)
    lookup = OuterProducts(OneHot(ids[None], rows), _dense(rng, 1, length, width))
    head = OuterProducts(_dense(rng, 1, length, rows), _dense(rng, 1, length, width))
    for uses in ([lookup], [lookup, head], [head, lookup], [lookup, head, head]):
        np.testing.assert_allclose(
            squared_norm(uses).value, _expected(uses), rtol=1e-5, atol=1e-6
        )


def _draw_window(data):
    size = data.draw(st.integers(1, 3))
    dilation = data.draw(st.integers(1, 2))
    outputs = data.draw(st.integers(1, 4))
    stride = data.draw(st.integers(1, 3))
    spare = data.draw(st.integers(0, 1))
    reach = (outputs - 1) * stride + (size - 1) * dilation + 1 + spare
    return Window(size, dilation, outputs, stride), reach


@hypothesis.given(st.data())
@hypothesis.settings(max_examples=6)
def test_patches(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    windows, spatial = zip(
        *(_draw_window(data) for _ in range(data.draw(st.integers(1, 3)))), strict=True
    )
    groups, channels = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3))
    image = rng.standard_normal((groups, *spatial, channels))
    patches = Patches(jnp.asarray(image, jnp.float32), windows)
    rows = _rows(patches)
    assert rows.shape[1:] == (patches.length, patches.width)
    np.testing.assert_allclose(
        patches.gram(patches), np.einsum("ntk,nsk->nts", rows, rows), atol=1e-4
    )
    np.testing.assert_allclose(
        patches.squared_row_norms(), np.sum(rows**2, axis=-1), rtol=1e-5
    )
    right = _dense(rng, groups, patches.length, 2)
    products = patches.outer_products(right.array_NxTxK)
    sizes = tuple(window.size for window in windows)
    assert products.shape == (groups, *sizes, channels, 2)
    np.testing.assert_allclose(
        products.reshape(groups, -1, 2),
        np.einsum("ntk,ntp->nkp", rows, _rows(right)),
        atol=1e-4,
    )


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("width", [3, 64, 700])
@pytest.mark.parametrize("perturbation", [1e-3, 1e-4, 1e-5, 0.0])
def test_rounding_bound_on_tokens_that_cancel(width, scale, perturbation):
    """Eight tokens and eight near-copies with the opposite cotangents.

    The gram form of these comes out negative in many trials; with its bound added it
    must never be below the true norm.
    """
    rng = np.random.default_rng(width)
    trials, tokens = 100, 8
    left = rng.standard_normal((trials, 1, tokens, width)) * scale
    right = rng.standard_normal((trials, 1, tokens, width))
    copies = left * (1 + perturbation * rng.standard_normal(left.shape))
    left = np.concatenate([left, copies], axis=2).astype(np.float32)
    right = np.concatenate([right, -right], axis=2).astype(np.float32)
    norms = jax.vmap(
        lambda left, right: squared_norm([OuterProducts(Dense(left), Dense(right))])
    )(left, right)
    gradients = np.einsum(
        "bntk,bntp->bnkp", left.astype(np.float64), right.astype(np.float64)
    )
    exact = np.sum(gradients**2, axis=(1, 2, 3))
    bound = np.asarray(norms.value, np.float64) + np.asarray(norms.rounding, np.float64)
    assert np.all(bound >= exact)
    if perturbation == 0.0:
        assert np.all(norms.rounding > 1e-2 * np.abs(norms.value))


@pytest.mark.parametrize("length", [1, 16, 128])
def test_rounding_bound_is_small_on_ordinary_tokens(length):
    rng = np.random.default_rng(length)
    use = OuterProducts(_dense(rng, 1, length, 32), _dense(rng, 1, length, 48))
    norm = squared_norm([use])
    assert norm.rounding <= 1e-4 * norm.value
    np.testing.assert_allclose(norm.value, _expected([use]), rtol=1e-5)


def test_float64_factors_stay_float64():
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        left, right = rng.standard_normal((2, 1, 5, 4))
        use = OuterProducts(Dense(jnp.asarray(left)), Dense(jnp.asarray(right)))
        norm = squared_norm([use])
        np.testing.assert_allclose(norm.value, _expected([use]), rtol=1e-13)
        assert norm.rounding < 1e-12 * norm.value


def test_bfloat16_factors_are_squared_in_float32():
    rng = np.random.default_rng(0)
    use = OuterProducts(_dense(rng, 1, 9, 5), _dense(rng, 1, 9, 6))
    narrow = OuterProducts(
        *(Dense(factor.array_NxTxK.astype(jnp.bfloat16)) for factor in use)
    )
    norm = squared_norm([narrow])
    assert norm.value.dtype == jnp.float32
    np.testing.assert_allclose(norm.value, _expected([narrow]), rtol=1e-5)


def test_patches_have_no_inner_product_with_other_factors():
    patches = Patches(jnp.ones((1, 3, 2)), (Window(2, 1, 2, 1),))
    with pytest.raises(TypeError, match="Patches and Dense"):
        patches.gram(Dense(jnp.ones((1, 2, 4))))
