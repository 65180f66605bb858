"""Clipped sums and norms of every method against float64 per-example gradients.

Each case builds a tiny model: `(fun, params, batch)`, where `fun(params, *batch)` sees
a batch of one. The clip norm lies between the examples' norms, so that some examples
are clipped and some are not.
"""

import functools

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dpjax import clipped_grad, per_example_grad_norms

METHODS = ("auto", "bookkeeping", "reweight", "vmap")
B, T, D, V = 6, 12, 4, 50
EXACT = 1e-5
# Sums and products that are rounded to bfloat16 on the way, at other places.
ROUNDED = 3e-2


def _normal(seed, *shape, scale=1.0):
    values = np.random.default_rng(seed).standard_normal(shape)
    return (scale * values).astype(np.float32)


def _uneven(seed, *shape):
    """Data whose examples differ in size, so that their gradients do too."""
    sizes = np.linspace(0.3, 2.0, shape[0]).reshape(-1, *[1] * (len(shape) - 1))
    return _normal(seed, *shape) * sizes.astype(np.float32)


def _ids(seed, *shape, high=V):
    """Token ids; each row repeats some of them."""
    ids = np.random.default_rng(seed).integers(0, high, shape)
    ids[..., 1::3] = ids[..., :1]
    return ids.astype(np.int32)


def _half_square(y):
    return 0.5 * jnp.sum(jnp.sin(y) * y)


def _token_loss(logits_1xTxV, ids_1xT):
    """Next-token cross-entropy with an explicit gather."""
    log_probs = jax.nn.log_softmax(logits_1xTxV[:, :-1])
    picked = jnp.take_along_axis(log_probs, ids_1xT[:, 1:, None], axis=-1)
    return -jnp.mean(picked)


def _image_loss(logits_1xC, label_1):
    return -jnp.mean(
        jnp.take_along_axis(jax.nn.log_softmax(logits_1xC), label_1[:, None], axis=-1)
    )


def _filled(shapes):
    """Random parameters of the given shapes, without compiling an initialiser."""
    leaves, treedef = jax.tree.flatten(shapes)
    return treedef.unflatten(
        [
            _normal(i, *leaf.shape, scale=max(1, np.prod(leaf.shape[:-1])) ** -0.5)
            for i, leaf in enumerate(leaves)
        ]
    )


def _linen(model, example):
    return _filled(jax.eval_shape(model.init, jax.random.key(0), example)["params"])


# Models of the frameworks.


def raw_mlp():
    params = {
        "w": [_normal(0, D, 5), _normal(1, 5, 3)],
        "b": [_normal(2, 1, 5), _normal(3, 1, 3)],
    }

    def fun(params, x, labels):
        hidden = jax.nn.sigmoid(x @ params["w"][0] + params["b"][0])
        return _image_loss(hidden @ params["w"][1] + params["b"][1], labels)

    return fun, params, (_uneven(4, B, D), _ids(5, B, high=3))


def linen_mlp():
    model = nn.Sequential([nn.Dense(5), nn.gelu, nn.Dense(3)])
    x = _uneven(4, B, D)

    def fun(params, x, labels):
        return _image_loss(model.apply({"params": params}, x), labels)

    return fun, _linen(model, x[:1]), (x, _ids(5, B, high=3))


def nnx_mlp():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.hidden = nnx.Linear(D, 5, rngs=rngs)
            self.norm = nnx.LayerNorm(5, rngs=rngs)
            self.head = nnx.Linear(5, 3, rngs=rngs)

        def __call__(self, x):
            return self.head(self.norm(jax.nn.relu(self.hidden(x))))

    graph, state = nnx.split(nnx.eval_shape(lambda: Model(nnx.Rngs(0))))

    def fun(params, x, labels):
        return _image_loss(nnx.merge(graph, params)(x), labels)

    return fun, _filled(state), (_uneven(4, B, D), _ids(5, B, high=3))


def equinox_mlp():
    model = eqx.filter_eval_shape(eqx.nn.MLP, D, 3, 5, depth=2, key=jax.random.key(0))
    params, static = eqx.partition(model, lambda x: isinstance(x, jax.ShapeDtypeStruct))

    def fun(params, x, labels):
        return _image_loss(jax.vmap(eqx.combine(params, static))(x), labels)

    return fun, _filled(params), (_uneven(4, B, D), _ids(5, B, high=3))


def linen_cnn():
    """The convolutional network of Lee & Kifer 2021, with fewer channels."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            for features in (4, 6):
                x = nn.relu(nn.Conv(features, (5, 5), padding="VALID")(x))
                x = nn.max_pool(x, (2, 2), strides=(2, 2))
            x = nn.relu(nn.Dense(8)(x.reshape(x.shape[0], -1)))
            return nn.Dense(10)(x)

    model, x = Model(), _uneven(4, B, 16, 16, 1)

    def fun(params, x, labels):
        return _image_loss(model.apply({"params": params}, x), labels)

    return fun, _linen(model, x[:1]), (x, _ids(5, B, high=10))


def linen_lstm():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            cell = nn.OptimizedLSTMCell(5, param_dtype=x.dtype)
            return nn.Dense(3)(nn.RNN(cell)(x)[:, -1])

    x = _uneven(4, B, 5, D)

    def fun(params, x, labels):
        return _image_loss(Model().apply({"params": params}, x), labels)

    return fun, _linen(Model(), x[:1]), (x, _ids(5, B, high=3))


def linen_scanned_layers():
    """Three layers as one, their weights stacked along axis 0."""

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return x + nn.Dense(D)(jnp.tanh(nn.LayerNorm()(x))), None

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            layers = nn.scan(
                Layer,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=3,
            )
            return layers()(x, None)[0]

    x = _uneven(4, B, D)

    def fun(params, x):
        return _half_square(Model().apply({"params": params}, x))

    return fun, _linen(Model(), x[:1]), (x,)


def linen_scan_with_shared_weights():
    """One layer applied four times by nn.scan, its weights broadcast."""

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return jnp.tanh(nn.Dense(D)(x)), None

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            layers = nn.scan(
                Layer,
                variable_broadcast="params",
                split_rngs={"params": False},
                length=4,
            )
            return layers()(x, None)[0]

    x = _uneven(4, B, D)

    def fun(params, x):
        return _half_square(Model().apply({"params": params}, x))

    return fun, _linen(Model(), x[:1]), (x,)


def linen_remat():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            for _ in range(2):
                x = jnp.tanh(nn.remat(nn.Dense)(D)(x))
            return x

    x = _uneven(4, B, 3, D)

    def fun(params, x):
        return _half_square(Model().apply({"params": params}, x))

    return fun, _linen(Model(), x[:1]), (x,)


def linen_attention():
    model = nn.MultiHeadDotProductAttention(num_heads=2, out_features=D)
    x = _uneven(4, B, 5, D)

    def fun(params, x):
        return _half_square(model.apply({"params": params}, x, mask=None))

    return fun, _linen(model, x[:1]), (x,)


def linen_tied_transformer():
    """One block, learned positions looked up with a batch of one, tied head."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, ids):
            embed = nn.Embed(V, 8)
            positions = nn.Embed(T, 8)(jnp.arange(ids.shape[1])[None])
            x = embed(ids) + positions
            mask = nn.make_causal_mask(ids)
            y = nn.MultiHeadDotProductAttention(num_heads=2)(
                nn.LayerNorm()(x), mask=mask
            )
            x = x + y
            x = x + nn.Dense(8)(nn.gelu(nn.Dense(16)(nn.RMSNorm()(x))))
            return embed.attend(nn.LayerNorm()(x))

    model, ids = Model(), _ids(5, B, T)

    def fun(params, ids):
        return _token_loss(model.apply({"params": params}, ids), ids)

    return fun, _linen(model, ids[:1]), (ids,)


def _linen_norm(module):
    x = _uneven(4, B, 3, 3, D)

    def fun(params, x):
        return _half_square(module.apply({"params": params}, x) * x)

    return fun, _linen(module, x[:1]), (x,)


def linen_layer_norm():
    return _linen_norm(nn.LayerNorm())


def linen_rms_norm():
    return _linen_norm(nn.RMSNorm())


def linen_group_norm():
    return _linen_norm(nn.GroupNorm(num_groups=2))


# Parameters that are used more than once.


def tied_embedding_and_head():
    params = {"embed": _normal(0, V, D), "w": _normal(1, D, D)}

    def fun(params, ids):
        hidden = jnp.tanh(params["embed"][ids] @ params["w"])
        return _token_loss(hidden @ params["embed"].T, ids)

    return fun, params, (_ids(5, B, T),)


def tied_embedding_table_alone():
    """Nothing but the cross term tells this norm from that of two tables."""

    def fun(embed, ids):
        return _token_loss(embed[ids] @ embed.T, ids)

    return fun, _normal(0, V, D), (_ids(5, B, T),)


def embedding_with_repeated_ids():
    def fun(embed, ids, y):
        return _half_square(embed[ids] * y)

    return fun, _normal(0, V, D), (_ids(5, B, T), _uneven(6, B, T, D))


def dense_applied_twelve_times():
    def fun(params, x):
        for _ in range(12):
            x = jnp.tanh(x @ params["w"] + params["b"])
        return _half_square(x)

    params = {"w": _normal(0, D, D, scale=0.7), "b": _normal(1, 1, D)}
    return fun, params, (_uneven(4, B, D),)


def dense_applied_twelve_times_to_a_sequence():
    def fun(w, x):
        for _ in range(12):
            x = jnp.tanh(x @ w)
        return _half_square(x)

    return fun, _normal(0, D, D, scale=0.7), (_uneven(4, B, 3, D),)


def tied_autoencoder():
    def fun(params, x):
        code = jnp.tanh(x @ params["w"] + params["b"])
        return _half_square(code @ params["w"].T - x)

    return fun, {"w": _normal(0, D, 3), "b": _normal(1, 1, 3)}, (_uneven(4, B, D),)


def fused_projection_sliced_into_qkv():
    def fun(params, x):
        q, k, v = jnp.split(params["qkv"], 3, axis=1)
        scores = jax.nn.softmax(jnp.einsum("btd,bsd->bts", x @ q, x @ k))
        return _half_square(scores @ (x @ v) @ params["out"])

    params = {"qkv": _normal(0, D, 9), "out": _normal(1, 3, D)}
    return fun, params, (_uneven(4, B, 5, D),)


def projection_sliced_after_the_product():
    def fun(w, x):
        q, k, v = jnp.split(x @ w, 3, axis=-1)
        return _half_square(jnp.tanh(q) * k + v)

    return fun, _normal(0, D, 9), (_uneven(4, B, 5, D),)


def overlapping_slices_of_one_weight():
    def fun(w, x):
        return _half_square(x @ w[:, :3] + jnp.tanh(x) @ w[:, 1:4])

    return fun, _normal(0, D, 5), (_uneven(4, B, 3, D),)


def weight_used_as_kernel_and_as_matrix():
    def fun(w, x):
        y = jax.lax.conv_general_dilated(
            x, w, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
        )
        return _half_square(jnp.tanh(y) @ w.reshape(-1, D).T)

    return fun, _normal(0, 3, D, D), (_uneven(4, B, 5, D),)


def one_bias_for_two_layers():
    def fun(params, x):
        x = jnp.tanh(x @ params["w"] + params["b"])
        return _half_square(x @ params["v"] + params["b"])

    params = {"w": _normal(0, D, D), "v": _normal(1, D, D), "b": _normal(2, 1, D)}
    return fun, params, (_uneven(4, B, D),)


def position_table():
    def fun(params, ids):
        positions = params["positions"][jnp.arange(T)[None]]
        hidden = jnp.tanh(params["embed"][ids] + positions)
        return _token_loss(hidden @ params["head"], ids)

    params = {
        "embed": _normal(0, V, D),
        "positions": _normal(1, T, D),
        "head": _normal(2, D, V),
    }
    return fun, params, (_ids(5, B, T),)


def position_table_and_tied_head():
    def fun(params, ids):
        positions = params["positions"][jnp.arange(T)[None]]
        hidden = jnp.tanh(params["embed"][ids] + positions)
        return _token_loss(hidden @ params["embed"].T, ids)

    params = {"embed": _normal(0, V, D), "positions": _normal(1, T, D)}
    return fun, params, (_ids(5, B, T),)


def one_table_for_tokens_and_positions():
    def fun(table, ids):
        hidden = jnp.tanh(table[ids] + table[jnp.arange(T)[None]])
        return _token_loss(hidden @ table.T, ids)

    return fun, _normal(0, V, D), (_ids(5, B, T),)


# Convolutions.


def _conv(dimension_numbers, x_shape, kernel_shape, **options):
    spatial = dimension_numbers[2]
    bias_shape = [1] * len(spatial)
    out_features = kernel_shape[dimension_numbers[1].index("O")]
    bias_shape[spatial.index("C")] = out_features

    def fun(params, x):
        y = jax.lax.conv_general_dilated(
            x, params["kernel"], dimension_numbers=dimension_numbers, **options
        )
        return _half_square(y + params["bias"])

    params = {"kernel": _normal(0, *kernel_shape), "bias": _normal(1, *bias_shape)}
    return fun, params, (_uneven(4, B, *x_shape),)


_NWC = ("NWC", "WIO", "NWC")
_NHWC = ("NHWC", "HWIO", "NHWC")
_NCHW = ("NCHW", "OIHW", "NCHW")


def conv1d_strided_same():
    return _conv(_NWC, (9, 3), (4, 3, 5), window_strides=(2,), padding="SAME")


def conv1d_dilated_valid():
    return _conv(
        _NWC, (9, 3), (3, 3, 5), window_strides=(1,), padding="VALID", rhs_dilation=(2,)
    )


def conv1d_depthwise():
    return _conv(
        _NWC,
        (7, 4),
        (3, 1, 8),
        window_strides=(1,),
        padding="SAME",
        feature_group_count=4,
    )


def conv2d_grouped():
    return _conv(
        _NHWC,
        (5, 6, 4),
        (3, 2, 2, 6),
        window_strides=(1, 1),
        padding="VALID",
        feature_group_count=2,
    )


def conv2d_grouped_strided_and_dilated():
    return _conv(
        _NCHW,
        (4, 8, 7),
        (6, 2, 3, 2),
        window_strides=(2, 1),
        padding=((2, 1), (0, 3)),
        rhs_dilation=(1, 2),
        feature_group_count=2,
    )


def conv2d_depthwise_strided():
    return _conv(
        _NHWC,
        (6, 6, 3),
        (3, 3, 1, 3),
        window_strides=(2, 2),
        padding="SAME",
        feature_group_count=3,
    )


def conv2d_transposed():
    return _conv(
        _NHWC,
        (4, 4, 3),
        (3, 3, 3, 2),
        window_strides=(1, 1),
        padding=((2, 1), (2, 1)),
        lhs_dilation=(2, 2),
    )


def conv2d_negative_padding():
    return _conv(
        _NHWC,
        (6, 6, 2),
        (3, 3, 2, 3),
        window_strides=(1, 1),
        padding=((-1, 0), (2, -1)),
    )


def conv3d():
    return _conv(
        ("NDHWC", "DHWIO", "NDHWC"),
        (3, 4, 3, 2),
        (2, 2, 2, 2, 3),
        window_strides=(1, 2, 1),
        padding="SAME",
    )


def linen_conv_transpose():
    model = nn.ConvTranspose(3, (3, 3), strides=(2, 2))
    x = _uneven(4, B, 3, 3, 2)

    def fun(params, x):
        return _half_square(model.apply({"params": params}, x))

    return fun, _linen(model, x[:1]), (x,)


def conv_kernel_used_twice():
    def fun(kernel, x):
        for _ in range(2):
            x = jnp.tanh(
                jax.lax.conv_general_dilated(
                    x, kernel, (1,), "SAME", dimension_numbers=_NWC
                )
            )
        return _half_square(x)

    return fun, _normal(0, 3, D, D, scale=0.4), (_uneven(4, B, 5, D),)


def conv_of_a_parameter_image_with_data_kernels():
    """The parameter is the left operand, the data the right one."""

    def fun(image, kernels):
        y = jax.lax.conv_general_dilated(
            image, kernels[0], (1, 1), "SAME", dimension_numbers=_NHWC
        )
        return _half_square(y)

    return fun, _normal(0, 1, 5, 5, 2), (_uneven(4, B, 3, 3, 2, 3),)


# Loops and branches.


def scanned_rnn():
    """Weights closed over by the body of a raw lax.scan."""

    def fun(params, x_1xTxD):
        def step(h_1xH, x_1xD):
            h_1xH = jnp.tanh(x_1xD @ params["w"] + h_1xH @ params["u"] + params["b"])
            return h_1xH, h_1xH

        last, all_h = jax.lax.scan(step, params["h0"], x_1xTxD.swapaxes(0, 1))
        return _half_square(last @ params["out"]) + jnp.sum(all_h**2)

    params = {
        "w": _normal(0, D, 5),
        "u": _normal(1, 5, 5, scale=0.5),
        "b": _normal(2, 1, 5),
        "h0": _normal(3, 1, 5),
        "out": _normal(4, 5, 2),
    }
    return fun, params, (_uneven(5, B, 7, D),)


def scan_over_layers():
    """Weights that are scanned over: another parameter at each step."""

    def fun(params, x):
        def layer(x, weights):
            return x + jnp.tanh(x @ weights["w"] + weights["b"]), None

        return _half_square(jax.lax.scan(layer, x, params)[0])

    params = {"w": _normal(0, 3, D, D), "b": _normal(1, 3, 1, D)}
    return fun, params, (_uneven(5, B, D),)


def scan_that_carries_its_weight():
    def fun(w, x):
        def step(carry, _):
            w, x = carry
            return (w, jnp.tanh(x @ w)), None

        (_, x), _ = jax.lax.scan(step, (w, x), None, length=4)
        return _half_square(x)

    return fun, _normal(0, D, D), (_uneven(5, B, D),)


def scan_that_updates_its_weight():
    """Fast weights: the carry starts as the parameter and takes up data."""

    def fun(w, x):
        def step(w, x_1xD):
            y = jnp.tanh(x_1xD @ w)
            return w - 0.1 * x_1xD.T @ y, y

        w, ys = jax.lax.scan(step, w, x.swapaxes(0, 1))
        return _half_square(ys) + jnp.sum(jnp.sin(w))

    return fun, _normal(0, D, D), (_uneven(5, B, 5, D),)


def scan_in_reverse_within_a_scan():
    def fun(w, x):
        def outer(h, x_1xD):
            def inner(h, scale):
                return jnp.tanh(h @ w * scale + x_1xD), None

            scales = jnp.linspace(0.5, 1.5, 3, dtype=x.dtype)
            h, _ = jax.lax.scan(inner, h, scales)
            return h, h.sum()

        h, sums = jax.lax.scan(
            outer, jnp.zeros_like(x[:, 0]), x.swapaxes(0, 1), reverse=True
        )
        return _half_square(h) + jnp.sum(sums**2)

    return fun, _normal(0, D, D, scale=0.6), (_uneven(5, B, 4, D),)


def scan_of_parameters_before_the_data():
    """A scan over parameters alone, whose results then meet the data."""

    def fun(ws, x):
        def multiply(product, w):
            return product @ w, jnp.sum(w**2)

        product, squares = jax.lax.scan(multiply, jnp.eye(D, dtype=x.dtype), ws)
        return _half_square(x @ product) * jnp.prod(squares) ** 0.1

    return fun, _normal(0, 3, D, D, scale=0.6), (_uneven(5, B, D),)


def fori_loop_and_map():
    def fun(w, x):
        x = jax.lax.fori_loop(0, 3, lambda i, x: jnp.tanh(x @ w) * (i + 1), x)
        rows = jax.lax.map(lambda row: jnp.sin(row[None] @ w), x)
        return _half_square(rows)

    return fun, _normal(0, D, D, scale=0.5), (_uneven(5, B, D),)


def associative_scan():
    def fun(decay, x):
        gates = jax.nn.sigmoid(decay) * jnp.ones_like(x)

        def combine(left, right):
            return left[0] * right[0], right[0] * left[1] + right[1]

        return _half_square(jax.lax.associative_scan(combine, (gates, x), axis=1)[1])

    return fun, _normal(0, 1, 1, D), (_uneven(5, B, 5, D),)


def while_loop_on_data():
    """The data is scaled down by a loop whose length depends on it."""

    def fun(w, x):
        x = jax.lax.while_loop(
            lambda x: jnp.sum(x**2) > 2.0, lambda x: 0.8 * x, jax.lax.stop_gradient(x)
        )
        return _half_square(x @ w)

    return fun, _normal(0, D, D), (2 * _uneven(5, B, D),)


def cond_on_data():
    def fun(params, x):
        y = jax.lax.cond(
            jnp.sum(x) > 0,
            lambda x: jnp.tanh(x @ params["w"]) + params["b"],
            lambda x: x * params["b"],
            x,
        )
        return _half_square(y)

    params = {"w": _normal(0, D, D), "b": _normal(1, 1, D)}
    return fun, params, (_uneven(5, B, D),)


def cond_on_parameters():
    def fun(params, x):
        y = jax.lax.cond(
            jnp.sum(params["w"]) > 100.0,
            lambda w, x: x,
            lambda w, x: jnp.tanh(x @ w),
            params["w"],
            x,
        )
        return _half_square(y * params["scale"])

    params = {"w": _normal(0, D, D), "scale": _normal(1, 1, D)}
    return fun, params, (_uneven(5, B, D),)


def cond_that_returns_a_parameter():
    def fun(params, x):
        picked = jax.lax.cond(
            jnp.sum(x) > 0, lambda a, b: a, lambda a, b: b, params["a"], params["b"]
        )
        return _half_square(picked)

    return fun, {"a": _normal(0, D), "b": _normal(1, D)}, (_uneven(5, B, D),)


def switch_among_experts():
    def fun(experts, x):
        branches = [lambda x, w=w: jnp.tanh(x @ w) for w in experts]
        index = jnp.argmax(x[0, :3])
        return _half_square(jax.lax.switch(index, branches, x))

    return fun, [_normal(i, D, D) for i in range(3)], (_uneven(5, B, D),)


def cond_within_scan():
    def fun(w, x):
        def step(h, x_1xD):
            h = jax.lax.cond(
                jnp.sum(x_1xD) > 0, lambda h: jnp.tanh(h @ w + x_1xD), lambda h: h, h
            )
            return h, None

        h, _ = jax.lax.scan(step, jnp.ones_like(x[:, 0]), x.swapaxes(0, 1))
        return _half_square(h @ w)

    return fun, _normal(0, D, D, scale=0.6), (_uneven(5, B, 5, D),)


def remat_with_a_policy():
    @functools.partial(
        jax.checkpoint, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    )
    def block(params, x):
        return jnp.tanh(x @ params["w"] + params["b"])

    def fun(params, x):
        return _half_square(block(params, block(params, x)))

    return fun, {"w": _normal(0, D, D), "b": _normal(1, 1, D)}, (_uneven(5, B, D),)


def remat_of_a_scan():
    def fun(w, x):
        @jax.checkpoint
        def run(w, x):
            return jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, None, 3)[0]

        return _half_square(run(w, x))

    return fun, _normal(0, D, D), (_uneven(5, B, D),)


def jit_inside():
    @jax.jit
    def layer(w, x):
        return jnp.tanh(x @ w)

    @functools.partial(jax.jit, static_argnums=2)
    def twice(w, x, times):
        for _ in range(times):
            x = layer(w, x)
        return x

    def fun(w, x):
        return _half_square(twice(w, x, 2))

    return fun, _normal(0, D, D), (_uneven(5, B, D),)


def vmap_inside():
    """An ensemble: the model is vmapped over the parameter's leading axis."""

    def fun(ws, x):
        outputs = jax.vmap(lambda w: jnp.tanh(x @ w))(ws)
        return _half_square(outputs.mean(0))

    return fun, _normal(0, 3, D, D), (_uneven(5, B, D),)


# Derivative rules of the user.


@jax.custom_jvp
def _straight_through_sign(x):
    return jnp.sign(x)


@_straight_through_sign.defjvp
def _straight_through_sign_jvp(primals, tangents):
    return jnp.sign(primals[0]), tangents[0]


@jax.custom_vjp
def _reverse_gradient(x):
    return x


_reverse_gradient.defvjp(lambda x: (x, None), lambda _, cotangent: (-3.0 * cotangent,))


@jax.custom_vjp
def _scaled_product(w, x):
    """Its rule says that the derivative is ten times what it is."""
    return x @ w


_scaled_product.defvjp(
    lambda w, x: (x @ w, (w, x)),
    lambda saved, cotangent: (
        10.0 * saved[1].T @ cotangent,
        10.0 * cotangent @ saved[0].T,
    ),
)


@jax.custom_jvp
def _doubled_product(w, x):
    return x @ w


@_doubled_product.defjvp
def _doubled_product_jvp(primals, tangents):
    (w, x), (dw, dx) = primals, tangents
    return x @ w, 2.0 * (x @ dw) + dx @ w


def custom_jvp_on_a_parameter():
    """Binarised weights with a straight-through estimator."""

    def fun(w, x):
        return _half_square(jnp.tanh(x @ _straight_through_sign(w)))

    return fun, _normal(0, D, D), (_uneven(5, B, D),)


def custom_jvp_on_data_and_parameter():
    def fun(params, x):
        hidden = _straight_through_sign(_doubled_product(params["w"], x))
        return _half_square(hidden @ params["v"] + x)

    return fun, {"w": _normal(0, D, D), "v": _normal(1, D, D)}, (_uneven(5, B, D),)


def custom_vjp_on_data():
    def fun(params, x):
        features = jnp.tanh(x @ params["w"])
        adversary = _reverse_gradient(features) @ params["v"]
        return _half_square(features) + _half_square(adversary)

    return fun, {"w": _normal(0, D, D), "v": _normal(1, D, 2)}, (_uneven(5, B, D),)


def custom_vjp_on_data_and_parameter():
    def fun(params, x):
        hidden = jnp.tanh(_scaled_product(params["w"], x))
        return _half_square(_scaled_product(params["w"], hidden) @ params["v"])

    return fun, {"w": _normal(0, D, D), "v": _normal(1, D, 2)}, (_uneven(5, B, D),)


def custom_vjp_within_a_scan():
    def fun(w, x):
        def step(h, x_1xD):
            return jnp.tanh(_scaled_product(w, h) + _reverse_gradient(x_1xD @ w)), None

        h, _ = jax.lax.scan(step, jnp.zeros_like(x[:, 0]), x.swapaxes(0, 1))
        return _half_square(h)

    return fun, _normal(0, D, D, scale=0.4), (_uneven(5, B, 4, D),)


def _fixed_point(step, start):
    return jax.lax.while_loop(
        lambda state: jnp.sum((state[0] - state[1]) ** 2) > 1e-12,
        lambda state: (step(state[0]), state[0]),
        (step(start), start),
    )[0]


def _equilibrium_step(w, x, z):
    return jnp.tanh(0.2 * z @ w + x)


@jax.custom_vjp
def _equilibrium(w, x):
    return _fixed_point(lambda z: _equilibrium_step(w, x, z), jnp.zeros_like(x))


def _equilibrium_backward(saved, cotangent):
    w, x, z = saved
    _, by_state = jax.vjp(lambda z: _equilibrium_step(w, x, z), z)
    _, by_inputs = jax.vjp(lambda w, x: _equilibrium_step(w, x, z), w, x)
    return by_inputs(_fixed_point(lambda u: cotangent + by_state(u)[0], cotangent))


_equilibrium.defvjp(
    lambda w, x: (lambda z: (z, (w, x, z)))(_equilibrium(w, x)), _equilibrium_backward
)


def implicit_layer():
    """A fixed point found by a while loop, its derivative by the user's own rule."""

    def fun(w, x):
        return _half_square(_equilibrium(w, x) @ w)

    return fun, _normal(0, D, D, scale=0.6), (_uneven(5, B, D),)


def functions_with_rules_on_parameters():
    """relu, softplus and softmax carry custom rules inside JAX itself."""

    def fun(params, x):
        w = jax.nn.relu(params["w"]) * jax.nn.softplus(params["scale"])
        return _half_square(jax.nn.softmax(params["mix"]) * jnp.tanh(x @ w))

    params = {"w": _normal(0, D, D), "scale": _normal(1, 1, D), "mix": _normal(2, 1, D)}
    return fun, params, (_uneven(5, B, D),)


def gradient_inside():
    """One inner gradient step on the example, then the loss at the new weights."""

    def inner(w, x):
        return jnp.sum(jnp.tanh(x @ w) ** 2)

    def fun(w, x):
        adapted = w - 0.1 * jax.grad(inner)(w, x)
        return _half_square(x @ adapted)

    return fun, _normal(0, D, D), (_uneven(5, B, D),)


def stop_gradient_on_one_path():
    def fun(params, x):
        frozen = jax.lax.stop_gradient(params["w"])
        y = jnp.tanh(x @ params["w"]) + x @ frozen + params["b"]
        return _half_square(y * jax.lax.stop_gradient(y @ params["w"]))

    params = {"w": _normal(0, D, D, scale=0.4), "b": _normal(1, 1, D)}
    return fun, params, (_uneven(5, B, D),)


# What happens to a parameter before it meets data.


def weight_normalisation():
    def fun(params, x):
        direction = params["v"] / jnp.linalg.norm(params["v"], axis=0, keepdims=True)
        return _half_square(jnp.tanh(x @ (params["g"] * direction)))

    return fun, {"v": _normal(0, D, 3), "g": _normal(1, 1, 3)}, (_uneven(5, B, D),)


def gram_of_a_weight():
    def fun(w, x):
        return _half_square(x @ (w @ w.T))

    return fun, _normal(0, D, 3), (_uneven(5, B, D),)


def quadratic_form():
    def fun(w, x):
        return jnp.sin(jnp.sum((x @ w) * (x @ (w @ w.T @ w))))

    return fun, _normal(0, D, 3, scale=0.3), (_uneven(5, B, D),)


def low_rank_update_of_a_frozen_weight():
    frozen = _normal(9, D, D)

    def fun(params, x):
        hidden = jnp.tanh(x @ frozen.astype(x.dtype) + x @ params["a"] @ params["b"])
        return _half_square(hidden @ (frozen + params["a"] @ params["b"]))

    return fun, {"a": _normal(0, D, 2), "b": _normal(1, 2, D)}, (_uneven(5, B, D),)


def sum_of_two_parameters():
    def fun(params, x):
        return _half_square(jnp.tanh(x @ (params["w"] + params["v"].T + params["b"])))

    params = {"w": _normal(0, D, D), "v": _normal(1, D, D), "b": _normal(2, 1, D)}
    return fun, params, (_uneven(5, B, D),)


def reshapes_and_transposes():
    def fun(w, x):
        w = w.reshape(2, 3, D).transpose(2, 0, 1)[:, ::-1].reshape(D, 6)
        return _half_square(jnp.tanh(x @ w))

    return fun, _normal(0, 6, D), (_uneven(5, B, 3, D),)


def stacked_and_padded_parameters():
    def fun(params, x):
        w = jnp.concatenate([params["a"], jnp.pad(params["b"], ((0, 0), (1, 1)))])
        return _half_square(jnp.tanh(x @ w))

    return fun, {"a": _normal(0, 2, 5), "b": _normal(1, 2, 3)}, (_uneven(5, B, D),)


def parameters_cast_to_bfloat16():
    def fun(params, x):
        half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
        y = jnp.tanh(x.astype(jnp.bfloat16) @ half["w"] + half["b"])
        return _half_square(y.astype(x.dtype))

    return fun, {"w": _normal(0, D, D), "b": _normal(1, 1, D)}, (_uneven(5, B, D),)


def loss_with_a_penalty_on_the_weights():
    def fun(params, x):
        penalty = sum(jnp.sum(p**2) for p in jax.tree.leaves(params))
        return _half_square(jnp.tanh(x @ params["w"] + params["b"])) + 0.3 * penalty

    return fun, {"w": _normal(0, D, D), "b": _normal(1, 1, D)}, (_uneven(5, B, D),)


def penalty_times_data():
    """The penalty on the weights is itself weighted by the data."""

    def fun(w, x):
        return jnp.sum(x[0, 0] ** 2) * jnp.sum(w**2) + _half_square(x @ w)

    return fun, _normal(0, D, D), (_uneven(5, B, D),)


def penalty_alone():
    def fun(w, x):
        return jnp.sum(jnp.sin(w) ** 2)

    return fun, _normal(0, D, D), (_uneven(5, B, D),)


def unused_parameter():
    def fun(params, x):
        return _half_square(x @ params["w"])

    return fun, {"w": _normal(0, D, D), "unused": _normal(1, 3)}, (_uneven(5, B, D),)


def parameter_compared_only():
    """Through comparisons and roundings no derivative flows."""

    def fun(params, x):
        mask = (x > params["threshold"]).astype(x.dtype)
        index = jnp.argmax(x * params["pick"])
        steps = jnp.round(params["steps"])
        return _half_square(x @ params["w"] * mask * steps) + x[0, index]

    params = {
        "w": _normal(0, D, D),
        "threshold": _normal(1, 1, D),
        "pick": _normal(2, 1, D),
        "steps": np.full((1, D), 2.2, np.float32),
    }
    return fun, params, (_uneven(5, B, D),)


# Operations in which a parameter meets data.


def element_wise():
    """Scalars, rows and columns that multiply, divide, shift, and raise to a power."""

    def fun(params, x):
        y = x * params["row"] + params["column"] - params["scalar"]
        y = jnp.where(y > 0, y, params["slope"] * y)
        y = jnp.abs(y) ** params["power"] / params["temperature"]
        return _half_square(jnp.arctan2(y, params["row"]))

    params = {
        "row": _normal(0, 1, 1, D),
        "column": _normal(1, 1, 3, 1),
        "scalar": np.float32(0.3),
        "slope": np.float32(0.2),
        "power": np.float32(1.3),
        "temperature": np.float32(0.7),
    }
    return fun, params, (_uneven(5, B, 3, D),)


def maximum_of_parameter_and_data():
    def fun(params, x):
        y = jnp.maximum(params["floor"], x)
        return _half_square(jnp.clip(y, params["low"], params["high"]))

    params = {
        "floor": _normal(0, 1, D),
        "low": np.float32(-0.4),
        "high": np.float32(0.9),
    }
    return fun, params, (_uneven(5, B, D),)


def select_between_parameter_and_data():
    """Masked tokens are replaced by a learned vector."""

    def fun(mask_token, x):
        return _half_square(jnp.where(x[..., :1] > 0, x, mask_token) * x)

    return fun, _normal(0, 1, 1, D), (_uneven(5, B, 5, D),)


def class_token_concatenated_to_data():
    def fun(params, x):
        x = jnp.concatenate([params["token"], x], axis=1)
        x = jax.nn.softmax(x @ x.swapaxes(1, 2)) @ x
        return _half_square(x[:, 0] @ params["w"])

    params = {"token": _normal(0, 1, 1, D), "w": _normal(1, D, D)}
    return fun, params, (_uneven(5, B, 3, D),)


def heads_with_a_batched_product():
    def fun(params, x):
        heads = jnp.einsum("btd,hde->bhte", x, params["w"])
        return _half_square(jnp.einsum("bhte,hed->btd", jnp.tanh(heads), params["out"]))

    params = {"w": _normal(0, 2, D, 3), "out": _normal(1, 2, 3, D)}
    return fun, params, (_uneven(5, B, 3, D),)


def products_of_every_shape():
    """Vector, outer and full contractions; the parameter on either side."""

    def fun(params, x):
        vector = x[0]
        left = params["w"] @ vector
        inner = vector @ params["v"]
        outer = jnp.einsum("i,j->ij", params["v"], vector)
        full = jnp.einsum("ij,ij->", params["w"], outer)
        rows = jnp.einsum("ij,ij->i", params["w"], jnp.tanh(outer))
        return _half_square(left) + jnp.sin(inner + full) + _half_square(rows)

    return fun, {"w": _normal(0, D, D), "v": _normal(1, D)}, (_uneven(5, B, D),)


def weight_modulated_by_data():
    """The kernel itself depends on the example before it meets the input."""

    def fun(w, x):
        gated = w * jax.nn.sigmoid(x[0])[:, None]
        return _half_square(jnp.tanh(x @ gated) @ gated)

    return fun, _normal(0, D, D), (_uneven(5, B, D),)


def gather_with_ids_out_of_range():
    """The forms of indexing differ: clamped, dropped, or wrapped from the end."""

    def fun(params, ids, y):
        wrapped = params["a"][ids]
        dropped = params["a"].at[ids].get(mode="drop", fill_value=0.0)
        clipped = params["b"].at[ids].get(mode="clip")
        return _half_square(jnp.tanh(wrapped + dropped + clipped) * y)

    ids = _ids(5, B, T)
    ids[:, ::4] = V + 3
    ids[:, 2] = -2
    return (
        fun,
        {"a": _normal(0, V, D), "b": _normal(1, V, D)},
        (ids, _uneven(6, B, T, D)),
    )


def take_in_clip_and_fill_mode():
    def fun(params, ids, y):
        clipped = jnp.take(params["a"], ids, axis=0, mode="clip")
        filled = jnp.take(params["b"], ids, axis=0, mode="fill", fill_value=0.5)
        return _half_square(jnp.tanh(clipped * filled) * y)

    ids = _ids(5, B, T)
    ids[:, ::4] = V + 3
    return (
        fun,
        {"a": _normal(0, V, D), "b": _normal(1, V, D)},
        (ids, _uneven(6, B, T, D)),
    )


def gather_along_another_axis():
    def fun(table, ids, y):
        columns = jnp.take(table, ids[0], axis=1).T[None]
        elements = jnp.take_along_axis(table, ids[:, :D].T, axis=1)
        return _half_square(columns * y) + _half_square(elements)

    return fun, _normal(0, D, V), (_ids(5, B, T), _uneven(6, B, T, D))


def one_hot_embedding():
    def fun(embed, ids, y):
        one_hot = jax.nn.one_hot(ids, V, dtype=embed.dtype)
        return _half_square(jnp.tanh(one_hot @ embed) * y)

    return fun, _normal(0, V, D), (_ids(5, B, T), _uneven(6, B, T, D))


def dynamic_slice_of_a_parameter():
    def fun(table, start, x):
        window = jax.lax.dynamic_slice(
            table, (start[0], jnp.zeros_like(start[0])), (3, D)
        )
        row = jax.lax.dynamic_index_in_dim(table, start[0] + 1, keepdims=False)
        return _half_square(x @ window.T) + jnp.sum(jnp.sin(row) * x[0])

    start = np.array([0, 1, 2, 3, 9, 100], np.int32)
    return fun, _normal(0, 8, D), (start, _uneven(6, B, D))


def a_branch_whose_result_is_the_same_for_all_examples():
    def fun(params, x):
        def branches(number, h, w):
            return jax.lax.cond(
                number % 2 == 0, lambda h: (h @ w, w[0] * 2), lambda h: (h, w[0]), h
            )

        def step(h, entry):
            h, row = branches(*entry[:1], h, entry[1])
            return jnp.tanh(h), row

        h, rows = jax.lax.scan(step, x, (jnp.arange(3), params["in a loop"]))
        _, row = branches(jnp.argmax(params["alone"][0]), h, params["alone"])
        signs = jnp.sum(x)
        return 1e-3 * jnp.sum(h) + jnp.sum(rows**2) * signs + jnp.sum(row**2) * signs

    params = {"in a loop": _normal(0, 3, D, D), "alone": _normal(1, D, D)}
    x = _uneven(6, B // 2, T, D)
    return fun, params, (np.concatenate([x, np.float32(-0.3) * x]),)


def padded_with_a_parameter():
    def fun(params, x):
        w = jax.lax.pad(params["w"], params["c"][0, 0], ((1, 1, 0), (0, 0, 0)))
        return _half_square(x @ w) + _half_square(x[..., :1] @ params["c"])

    params = {"w": _normal(0, D - 2, 3), "c": _normal(1, 1, 1)}
    return fun, params, (_uneven(6, B, T, D),)


def cut_off_on_the_way():
    def fun(params, x):
        w = jnp.concatenate([params["kept"], params["cut"]], axis=1)[:, :3]
        return _half_square(x @ w)

    params = {"kept": _normal(0, D, 3), "cut": _normal(1, D, 2)}
    return fun, params, (_uneven(6, B, T, D),)


def scaled_so_that_the_square_underflows():
    def fun(w, x):
        return _half_square((1e9 * x) @ (w * 1e-23) * 1e13)

    return fun, _normal(0, D, 3), (_uneven(6, B, T, D),)


def lookups_of_one_row_in_a_loop():
    def fun(params, ids, x):
        def step(h, i):
            row = params["rows"][i] + params["columns"][:, i]
            return jnp.tanh(h @ params["w"] + row[None]), None

        h, _ = jax.lax.scan(step, x[0, :1], ids[0])
        return _half_square(h) + jnp.sum(jnp.sin(params["rows"][ids[0, 0]]))

    params = {
        "rows": _normal(0, V, D),
        "columns": _normal(1, D, V),
        "w": _normal(2, D, D),
    }
    ids = _ids(5, B, T)
    ids[0, 0], ids[1, 1] = V + 3, -V - 5
    return fun, params, (ids, _uneven(6, B, T, D))


def data_written_into_a_parameter():
    def fun(table, ids, y):
        added = table.at[ids[0]].add(y[0])
        written = jax.lax.dynamic_update_slice(
            table, y[0], (ids[0, 0], jnp.zeros_like(ids[0, 0]))
        )
        return _half_square(added) + jnp.sum(written**3)

    return fun, _normal(0, V, D), (_ids(5, B, T), _uneven(6, B, T, D))


def sort_and_cumulative_sum():
    def fun(params, x):
        y = jnp.sort(x * params["a"], axis=-1)
        z = jnp.cumsum(x + params["b"], axis=-1)
        return _half_square(y + jax.lax.cumlogsumexp(z, axis=1))

    return fun, {"a": _normal(0, 1, D), "b": _normal(1, 1, D)}, (_uneven(5, B, D),)


def spectral_convolution():
    """Complex multipliers in the Fourier domain from two real parameters."""

    def fun(params, x):
        multiplier = jax.lax.complex(params["re"], params["im"])
        y = jnp.fft.irfft(jnp.fft.rfft(x) * multiplier, n=8)
        return _half_square(y)

    params = {"re": _normal(0, 1, 5), "im": _normal(1, 1, 5)}
    return fun, params, (_uneven(5, B, 8),)


def linear_solve():
    """An implicit layer: the solution of a system that holds parameter and data."""

    def fun(w, x):
        matrix = jnp.eye(D, dtype=x.dtype) * 3 + w @ w.T + x.T @ x
        return _half_square(jnp.linalg.solve(matrix, x[0]))

    return fun, _normal(0, D, D), (_uneven(5, B, D),)


def dropout_with_a_key_per_example():
    def fun(w, x, key_data):
        key = jax.random.wrap_key_data(key_data[0])
        keep = jax.random.bits(key, x.shape, jnp.uint32) < np.uint32(2**31)
        return _half_square(jnp.where(keep, x, 0.0) @ w)

    keys = np.asarray(jax.random.key_data(jax.random.split(jax.random.key(0), B)))
    return fun, _normal(0, D, D), (_uneven(5, B, D), keys)


CASES = (
    raw_mlp,
    linen_mlp,
    nnx_mlp,
    equinox_mlp,
    linen_cnn,
    linen_lstm,
    linen_scanned_layers,
    linen_scan_with_shared_weights,
    linen_remat,
    linen_attention,
    linen_tied_transformer,
    linen_layer_norm,
    linen_rms_norm,
    linen_group_norm,
    tied_embedding_and_head,
    tied_embedding_table_alone,
    embedding_with_repeated_ids,
    dense_applied_twelve_times,
    dense_applied_twelve_times_to_a_sequence,
    tied_autoencoder,
    fused_projection_sliced_into_qkv,
    projection_sliced_after_the_product,
    overlapping_slices_of_one_weight,
    weight_used_as_kernel_and_as_matrix,
    one_bias_for_two_layers,
    position_table,
    position_table_and_tied_head,
    one_table_for_tokens_and_positions,
    conv1d_strided_same,
    conv1d_dilated_valid,
    conv1d_depthwise,
    conv2d_grouped,
    conv2d_grouped_strided_and_dilated,
    conv2d_depthwise_strided,
    conv2d_transposed,
    conv2d_negative_padding,
    conv3d,
    linen_conv_transpose,
    conv_kernel_used_twice,
    conv_of_a_parameter_image_with_data_kernels,
    scanned_rnn,
    scan_over_layers,
    scan_that_carries_its_weight,
    scan_that_updates_its_weight,
    scan_in_reverse_within_a_scan,
    scan_of_parameters_before_the_data,
    fori_loop_and_map,
    associative_scan,
    while_loop_on_data,
    cond_on_data,
    cond_on_parameters,
    cond_that_returns_a_parameter,
    switch_among_experts,
    cond_within_scan,
    remat_with_a_policy,
    remat_of_a_scan,
    jit_inside,
    vmap_inside,
    custom_jvp_on_a_parameter,
    custom_jvp_on_data_and_parameter,
    custom_vjp_on_data,
    custom_vjp_on_data_and_parameter,
    custom_vjp_within_a_scan,
    implicit_layer,
    functions_with_rules_on_parameters,
    gradient_inside,
    stop_gradient_on_one_path,
    weight_normalisation,
    gram_of_a_weight,
    quadratic_form,
    low_rank_update_of_a_frozen_weight,
    sum_of_two_parameters,
    reshapes_and_transposes,
    stacked_and_padded_parameters,
    parameters_cast_to_bfloat16,
    loss_with_a_penalty_on_the_weights,
    penalty_times_data,
    penalty_alone,
    unused_parameter,
    parameter_compared_only,
    element_wise,
    maximum_of_parameter_and_data,
    select_between_parameter_and_data,
    class_token_concatenated_to_data,
    heads_with_a_batched_product,
    products_of_every_shape,
    weight_modulated_by_data,
    gather_with_ids_out_of_range,
    take_in_clip_and_fill_mode,
    gather_along_another_axis,
    one_hot_embedding,
    dynamic_slice_of_a_parameter,
    a_branch_whose_result_is_the_same_for_all_examples,
    lookups_of_one_row_in_a_loop,
    padded_with_a_parameter,
    cut_off_on_the_way,
    scaled_so_that_the_square_underflows,
    data_written_into_a_parameter,
    sort_and_cumulative_sum,
    spectral_convolution,
    linear_solve,
    dropout_with_a_key_per_example,
)
TOLERANCES = {parameters_cast_to_bfloat16: ROUNDED}

# Compiling is most of the time of these tests, and the numbers do not depend on it.
_quick_jit = functools.partial(
    jax.jit, compiler_options={"xla_backend_optimization_level": 0}
)


def _name(case):
    return case.__name__


@pytest.mark.parametrize("case", CASES, ids=_name)
def test_norms_and_clipped_sum(case, subtests, float64_reference, assert_clipped_sum):
    """All methods in one compiled function: what they share is compiled once."""
    fun, params, batch = case()
    reference = float64_reference(fun, params, batch)
    some_are_clipped = reference.clip_norm < reference.norms_B.max()
    assert some_are_clipped or case is penalty_alone
    grad_fns = {
        method: clipped_grad(
            fun,
            l2_clip_norm=reference.clip_norm,
            batch_argnums=tuple(range(1, 1 + len(batch))),
            return_grad_norms=True,
            method=method,
        )
        for method in METHODS
    }
    results = _quick_jit(lambda *args: {m: f(*args) for m, f in grad_fns.items()})(
        params, *batch
    )
    tolerance = TOLERANCES.get(case, EXACT)
    for method, (clipped_sum, aux) in results.items():
        with subtests.test(method=method):
            np.testing.assert_allclose(
                aux.grad_norms, reference.norms_B, rtol=tolerance
            )
            assert_clipped_sum(clipped_sum, reference, tolerance)


@pytest.mark.parametrize(
    "case", [raw_mlp, tied_embedding_and_head, linen_cnn, scanned_rnn], ids=_name
)
def test_per_example_grad_norms(case, float64_reference):
    fun, params, batch = case()
    reference = float64_reference(fun, params, batch)
    norms_fn = per_example_grad_norms(
        fun, batch_argnums=tuple(range(1, 1 + len(batch)))
    )
    norms_B = _quick_jit(norms_fn)(params, *batch)
    assert norms_B.dtype == jnp.float32
    np.testing.assert_allclose(norms_B, reference.norms_B, rtol=EXACT)
