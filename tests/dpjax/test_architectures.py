"""The layers of today's models: exact by every method, and none of them a fallback.

Each row of `ARCHITECTURES` builds a tiny model: `(fun, params, batch)`, where
`fun(params, *batch)` sees a batch of one. Its norms and clipped sums are compared with
float64 per-example gradients, and `dpjax.explain` must find a rule for every parameter.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dpjax import clipped_grad, explain

METHODS = ("bookkeeping", "reweight", "vmap")
B, T, D, H, V = 3, 4, 4, 5, 11
EXACT = 1e-5
# bfloat16 keeps 8 bits, and the methods round different sums to it.
ROUNDED = 3e-2

Model = tuple[Callable[..., Any], Any, tuple[Any, ...]]


class Case(NamedTuple):
    """One architecture.

    Attributes:
      name: of the test.
      build: makes `(fun, params, batch)`.
      tolerance: relative, of norms and sums.
      may_fall_back: it is exact, but no rule is promised for it.
    """

    name: str
    build: Callable[[], Model]
    tolerance: float = EXACT
    may_fall_back: bool = False


def _normal(seed, *shape, scale=1.0):
    values = np.random.default_rng(seed).standard_normal(shape)
    return (scale * values).astype(np.float32)


def _weights(**shapes):
    """Random weights of the given shapes, scaled by their fan-in."""
    return {
        name: _normal(i, *shape, scale=max(1, np.prod(shape[:-1])) ** -0.5)
        for i, (name, shape) in enumerate(shapes.items())
    }


def _uneven(*shape):
    """Data whose examples differ in size, so that their gradients do too."""
    sizes = np.linspace(0.3, 2.0, B).reshape(B, *[1] * len(shape))
    return _normal(100, B, *shape) * sizes.astype(np.float32)


def _ids(*shape, high=V):
    """Token ids; each row repeats some of them."""
    ids = np.random.default_rng(101).integers(0, high, (B, *shape))
    ids[..., 1::3] = ids[..., :1]
    return ids.astype(np.int32)


def _loss(y):
    return 0.5 * jnp.sum(jnp.sin(y) * y)


def _token_loss(logits_1xTxV, ids_1xT):
    log_probs = jax.nn.log_softmax(logits_1xTxV[:, :-1])
    return -jnp.mean(jnp.take_along_axis(log_probs, ids_1xT[:, 1:, None], axis=-1))


def _filled(shapes):
    """Random parameters of the given shapes, without compiling an initialiser."""
    leaves, treedef = jax.tree.flatten(shapes)
    filled = _weights(**{str(i): leaf.shape for i, leaf in enumerate(leaves)})
    return treedef.unflatten(filled.values())


def _linen(model, x):
    shapes = jax.eval_shape(model.init, jax.random.key(0), x[:1])["params"]
    return lambda params, x: _loss(model.apply({"params": params}, x)), _filled(shapes)


def linen_layer(model, *shape):
    """Any Linen module, on data of the given shape."""
    x = _uneven(*shape)
    return *_linen(model, x), (x,)


# Recurrent networks.


def linen_rnn(cell, *, bidirectional=False):
    class Network(nn.Module):
        @nn.compact
        def __call__(self, x):
            layers = [nn.RNN(cell(H, param_dtype=x.dtype)) for _ in range(2)]
            if bidirectional:
                return nn.Bidirectional(*layers)(x)
            return nn.Dense(3)(layers[0](x)[:, -1])

    return linen_layer(Network(), T, D)


def nnx_gru():
    class Network(nnx.Module):
        def __init__(self, rngs):
            self.rnn = nnx.RNN(nnx.GRUCell(D, H, rngs=rngs), rngs=False)
            self.head = nnx.Linear(H, 3, rngs=rngs)

        def __call__(self, x):
            start = jnp.zeros((1, H), x.dtype)
            return self.head(self.rnn(x, initial_carry=start)[:, -1])

    graph, shapes = nnx.split(nnx.eval_shape(lambda: Network(nnx.Rngs(0))))

    def fun(params, x):
        return _loss(nnx.merge(graph, params)(x))

    return fun, _filled(shapes), (_uneven(T, D),)


def recurrence(*, reverse=False, unroll=1, remat=False):
    """A learned initial state; weights that the body of a scan closes over."""

    def fun(params, x):
        def step(h, x_1xD):
            h = jnp.tanh(x_1xD @ params["w"] + h @ params["u"] + params["b"])
            return h, h * params["scale"]

        step = jax.checkpoint(step) if remat else step
        h, ys = jax.lax.scan(
            step, params["h0"], x.swapaxes(0, 1), reverse=reverse, unroll=unroll
        )
        return _loss(h) + _loss(ys)

    shapes = {"w": (D, H), "u": (H, H), "b": (1, H), "h0": (1, H), "scale": (1, H)}
    return fun, _weights(**shapes), (_uneven(T, D),)


def recurrence_with_fused_gates(*, slice_weights):
    """An LSTM whose gates are slices of one product, or of one weight."""

    def fun(params, x):
        def gates(h, x_1xD):
            if not slice_weights:
                y = x_1xD @ params["w"] + h @ params["u"] + params["b"]
                return jnp.split(y, 4, axis=-1)
            parts = [jnp.split(params[name], 4, axis=-1) for name in ("w", "u", "b")]
            return [x_1xD @ w + h @ u + b for w, u, b in zip(*parts, strict=True)]

        def step(carry, x_1xD):
            h, c = carry
            i, f, g, o = gates(h, x_1xD)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), None

        start = (params["h0"], params["c0"])
        (h, c), _ = jax.lax.scan(step, start, x.swapaxes(0, 1))
        return _loss(h) + _loss(c)

    shapes = {"w": (D, 4 * H), "u": (H, 4 * H), "b": (1, 4 * H)}
    return fun, _weights(**shapes, h0=(1, H), c0=(1, H)), (_uneven(T, D),)


def two_recurrent_layers():
    """The states of the first are the inputs of the second."""

    def layer(weights, x_Tx1xD):
        def step(h, x_1xD):
            h = jnp.tanh(x_1xD @ weights["w"] + h @ weights["u"])
            return h, h

        return jax.lax.scan(step, jnp.zeros_like(x_Tx1xD[0]), x_Tx1xD)[1]

    def fun(params, x):
        return _loss(layer(params[1], layer(params[0], x.swapaxes(0, 1))))

    params = [_weights(w=(D, D), u=(D, D)), _weights(u=(D, D), w=(D, D))]
    return fun, params, (_uneven(T, D),)


def convolutional_recurrence():
    def fun(params, x):
        def convolve(x, kernel):
            return jax.lax.conv_general_dilated(
                x, kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
            )

        def step(h, x_1xWxC):
            h = jnp.tanh(convolve(x_1xWxC, params["w"]) + convolve(h, params["u"]))
            return h, None

        start = jnp.zeros((1, 5, 3), x.dtype)
        return _loss(jax.lax.scan(step, start, x.swapaxes(0, 1))[0])

    return fun, _weights(w=(3, 2, 3), u=(3, 3, 3)), (_uneven(T, 5, 2),)


def selective_state_space():
    """A gated diagonal recurrence after a causal depthwise convolution."""

    def fun(params, x):
        x = jax.lax.conv_general_dilated(
            x,
            params["kernel"],
            (1,),
            ((2, 0),),
            dimension_numbers=("NWC", "WIO", "NWC"),
            feature_group_count=D,
        )
        step_1xTxD = jax.nn.softplus(x @ params["step"])
        inputs_1xTxN, outputs_1xTxN = x @ params["inputs"], x @ params["outputs"]
        decay_DxN = -jnp.exp(params["log_decay"])

        def advance(h_1xDxN, at_time):
            x, step, inputs, outputs = at_time
            decay = jnp.exp(step[..., None] * decay_DxN[None])
            h_1xDxN = decay * h_1xDxN + (step * x)[..., None] * inputs[:, None]
            y = jnp.sum(h_1xDxN * outputs[:, None], axis=-1)
            return h_1xDxN, y + params["skip"] * x

        along_time = (x, step_1xTxD, inputs_1xTxN, outputs_1xTxN)
        along_time = jax.tree.map(lambda y: y.swapaxes(0, 1), along_time)
        start = jnp.zeros((1, D, 2), x.dtype)
        return _loss(jax.lax.scan(advance, start, along_time)[1])

    shapes = {"kernel": (3, 1, D), "step": (D, D), "log_decay": (D, 2)}
    shapes |= {"inputs": (D, 2), "outputs": (D, 2), "skip": (1, D)}
    return fun, _weights(**shapes), (_uneven(T, D),)


# Scanned layers.


class _Block(nn.Module):
    """A pre-norm transformer block, in the form that nn.scan wants."""

    @nn.compact
    def __call__(self, x, _):
        mask = nn.make_causal_mask(x[..., 0])
        y = nn.MultiHeadDotProductAttention(num_heads=2)(nn.RMSNorm()(x), mask=mask)
        return x + nn.Dense(D)(nn.gelu(x + y)), None


class _Feedforward(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.Dense(D)(jnp.tanh(nn.LayerNorm()(x))), None


def linen_scanned_layers(block, *, shared=False):
    class Network(nn.Module):
        @nn.compact
        def __call__(self, x):
            options = (
                {"variable_broadcast": "params", "split_rngs": {"params": False}}
                if shared
                else {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
            )
            return nn.scan(block, length=3, **options)()(x, None)[0]

    return linen_layer(Network(), T, D)


def nnx_scanned_layers():
    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.LayerNorm(D, rngs=rngs)
            self.dense = nnx.Linear(D, D, rngs=rngs)

        def __call__(self, x):
            return x + jnp.tanh(self.dense(self.norm(x)))

    @nnx.split_rngs(splits=3)
    @nnx.vmap
    def stack(rngs):
        return Layer(rngs)

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def apply(x, layer):
        return layer(x)

    graph, shapes = nnx.split(nnx.eval_shape(lambda: stack(nnx.Rngs(0))))

    def fun(params, x):
        return _loss(apply(x, nnx.merge(graph, params)))

    return fun, _filled(shapes), (_uneven(T, D),)


def remat_of_scanned_layers():
    def fun(params, x):
        @jax.checkpoint
        def run(params, x):
            def layer(x, weights):
                return x + jnp.tanh(x @ weights["w"] + weights["b"]), None

            return jax.lax.scan(layer, x, params)[0]

        return _loss(run(params, x))

    return fun, _weights(w=(3, D, D), b=(3, 1, 1, D)), (_uneven(T, D),)


def recurrence_within_scanned_layers():
    """Along the inner scan a layer's weight is shared; along the outer it differs."""

    def fun(params, x):
        def layer(x_Tx1xD, weights):
            def step(h, x_1xD):
                h = jnp.tanh(x_1xD @ weights["w"] + h @ weights["u"] + weights["b"])
                return h, h

            return jax.lax.scan(step, jnp.zeros_like(x_Tx1xD[0]), x_Tx1xD)[1], None

        return _loss(jax.lax.scan(layer, x.swapaxes(0, 1), params)[0])

    shapes = {"w": (3, D, D), "u": (3, D, D), "b": (3, 1, D)}
    return fun, _weights(**shapes), (_uneven(T, D),)


def recurrence_within_shared_layers():
    """One weight along the inner scan and the outer: all its uses are one sum."""

    def fun(params, x):
        def layer(x_Tx1xD, scale):
            def step(h, x_1xD):
                h = jnp.tanh(x_1xD @ params["w"] + h @ params["u"] * scale)
                return h, h

            return jax.lax.scan(step, jnp.zeros_like(x_Tx1xD[0]), x_Tx1xD)[1], None

        scales = jnp.linspace(0.5, 1.5, 3, dtype=x.dtype)
        return _loss(jax.lax.scan(layer, x.swapaxes(0, 1), scales)[0])

    return fun, _weights(w=(D, D), u=(D, D)), (_uneven(T, D),)


def layers_scanned_within_a_recurrence():
    """At each step in time a state goes through scanned layers."""

    def fun(params, x):
        def step(h, x_1xD):
            def layer(h, w):
                return jnp.tanh(h @ w + x_1xD), None

            return jax.lax.scan(layer, h, params["w"])[0], None

        return _loss(jax.lax.scan(step, params["h0"], x.swapaxes(0, 1))[0])

    return fun, _weights(w=(2, D, D), h0=(1, D)), (_uneven(T, D),)


def scanned_layers_with_tied_weights():
    """Some weights are scanned over; others the body closes over."""

    def fun(params, x):
        def layer(x, norm_scale):
            y = jnp.tanh(x * norm_scale @ params["up"]) @ params["down"]
            return x + y, None

        x = jax.lax.scan(layer, x, params["scales"])[0]
        return _loss(x @ params["up"])

    return fun, _weights(up=(D, 6), down=(6, D), scales=(3, 1, 1, D)), (_uneven(T, D),)


def weight_within_and_outside_of_a_scan():
    def fun(w, x):
        step = lambda h, x_1xD: (jnp.tanh(x_1xD + h @ w), None)  # noqa: E731
        h = jax.lax.scan(step, x[:, 0], x.swapaxes(0, 1))[0]
        return _loss(x @ w) + _loss(h @ w)

    return fun, _normal(0, D, D, scale=0.5), (_uneven(T, D),)


def weight_of_two_scans():
    """Forward in time and backward, the second with the weight transposed."""

    def fun(w, x):
        def run(matrix, x_Tx1xD, reverse):
            step = lambda h, x_1xD: (jnp.tanh(x_1xD + h @ matrix),) * 2  # noqa: E731
            start = jnp.zeros_like(x_Tx1xD[0])
            return jax.lax.scan(step, start, x_Tx1xD, reverse=reverse)[1]

        return _loss(run(w.T, run(w, x.swapaxes(0, 1), False), True))

    return fun, _normal(0, D, D, scale=0.5), (_uneven(T, D),)


def slice_of_stacked_weights_outside_of_their_scan():
    """The first of the scanned layers is applied once more."""

    def fun(ws, x):
        x = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0]
        return _loss(x @ ws[0])

    return fun, _weights(w=(3, D, D))["w"], (_uneven(T, D),)


def mapped_layer():
    def fun(params, x):
        rows = jax.lax.map(lambda row: jnp.tanh(row @ params["w"] + params["b"]), x[0])
        return _loss(rows)

    return fun, _weights(w=(D, H), b=(H,)), (_uneven(T, D),)


def fori_loop():
    def fun(w, x):
        return _loss(jax.lax.fori_loop(0, 3, lambda i, x: jnp.tanh(x @ w), x))

    return fun, _normal(0, D, D, scale=0.5), (_uneven(T, D),)


# Attention.


def _attend(q_1xTxHxK, k_1xTxHxK, v_1xTxHxK):
    scores = jnp.einsum("bthk,bshk->bhts", q_1xTxHxK, k_1xTxHxK)
    return jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(scores), v_1xTxHxK)


def windowed_attention():
    """Two batch axes beside the example's, heads before and after the features."""

    def fun(params, x_1xWxTxD):
        q = jnp.einsum("bwtd,hdk->bhwtk", x_1xWxTxD, params["q"])
        k = jnp.einsum("bwtd,dhk->bwthk", x_1xWxTxD, params["k"])
        v = jnp.einsum("dkh,bwtd->hbwtk", params["v"], x_1xWxTxD)
        weights = jax.nn.softmax(
            jnp.einsum("bhwtk,bwshk->bwhts", q, k) + params["bias"]
        )
        y = jnp.einsum("bwhts,hbwsk->bwthk", weights, v)
        return _loss(jnp.einsum("bwthk,khd->bwtd", y, params["out"]))

    shapes = {"q": (2, D, 3), "k": (D, 2, 3), "v": (D, 3, 2), "out": (3, 2, D)}
    return fun, _weights(**shapes, bias=(1, 1, 2, 3, 3)), (_uneven(2, 3, D),)


def grouped_query_attention(groups):
    """Query heads share keys and values in groups; queries and keys are normalised."""

    def rms(x, scale):
        return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 0.1) * scale

    def fun(params, x):
        q = jnp.einsum("btd,dgrk->btgrk", x, params["q"])
        k, v = (jnp.einsum("btd,dgk->btgk", x, params[name]) for name in "kv")
        q, k = rms(q, params["q_scale"][None]), rms(k, params["k_scale"])
        scores = jax.nn.softmax(jnp.einsum("btgrk,bsgk->bgrts", q, k))
        y = jnp.einsum("bgrts,bsgk->btgrk", scores, v)
        return _loss(jnp.einsum("btgrk,grkd->btd", y, params["out"]))

    repeats = 4 // groups
    shapes = {"q": (D, groups, repeats, 3), "k": (D, groups, 3), "v": (D, groups, 3)}
    shapes |= {"q_scale": (1, 1, 1, 3), "k_scale": (1, 1, 1, 3)}
    return fun, _weights(**shapes, out=(groups, repeats, 3, D)), (_uneven(T, D),)


def fused_projection_split_after_the_product():
    def fun(params, x):
        q, k, v = jnp.split(x @ params["qkv"] + params["bias"], 3, axis=-1)
        heads = [y.reshape(1, T, 2, 3) for y in (q, k, v)]
        return _loss(_attend(*heads).reshape(1, T, 6) @ params["out"])

    shapes = {"qkv": (D, 18), "bias": (1, 1, 18), "out": (6, D)}
    return fun, _weights(**shapes), (_uneven(T, D),)


def fused_projection_with_an_axis_for_qkv():
    def fun(params, x):
        q, k, v = jnp.einsum("btd,dshk->sbthk", x, params["qkv"])
        return _loss(jnp.einsum("bthk,hkd->btd", _attend(q, k, v), params["out"]))

    return fun, _weights(qkv=(D, 3, 2, 3), out=(2, 3, D)), (_uneven(T, D),)


def projections_as_slices_of_one_leaf():
    def fun(params, x):
        q, k, v = (params["qkv"][:, i : i + 6] for i in (0, 6, 12))
        heads = [(x @ w).reshape(1, T, 2, 3) for w in (q, k, v)]
        return _loss(_attend(*heads).reshape(1, T, 6) @ params["out"])

    return fun, _weights(qkv=(D, 18), out=(6, D)), (_uneven(T, D),)


def projections_as_entries_of_one_leaf():
    """A leading axis of three, indexed."""

    def fun(params, x):
        q, k, v = (jnp.einsum("btd,dhk->bthk", x, params["qkv"][i]) for i in range(3))
        return _loss(jnp.einsum("bthk,hkd->btd", _attend(q, k, v), params["out"]))

    return fun, _weights(qkv=(3, D, 2, 3), out=(2, 3, D)), (_uneven(T, D),)


def projections_concatenated_from_leaves():
    """Three leaves, one product."""

    def fun(params, x):
        qkv = jnp.concatenate([params["q"], params["k"], params["v"]], axis=1)
        q, k, v = (y.reshape(1, T, 2, 3) for y in jnp.split(x @ qkv, 3, axis=-1))
        return _loss(_attend(q, k, v))

    return fun, _weights(q=(D, 6), k=(D, 6), v=(D, 6)), (_uneven(T, D),)


def relative_position_bias():
    """A table of biases, looked up by distances that no example changes."""

    def fun(params, x):
        distances = np.arange(T)[:, None] - np.arange(T)[None] + T - 1
        bias = params["table"][distances].transpose(2, 0, 1)[None]
        q, k = (jnp.einsum("btd,dhk->bhtk", x, params[name]) for name in "qk")
        scores = jax.nn.softmax(jnp.einsum("bhtk,bhsk->bhts", q, k) + bias)
        return _loss(jnp.einsum("bhts,bsd->bthd", scores, x))

    shapes = {"table": (2 * T - 1, 2), "q": (D, 2, 3), "k": (D, 2, 3)}
    return fun, _weights(**shapes), (_uneven(T, D),)


def vision_transformer_stem():
    """Patches by a strided convolution, a class token, learned positions."""

    def fun(params, x):
        patches = jax.lax.conv_general_dilated(
            x,
            params["kernel"],
            (2, 2),
            "VALID",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        tokens = jnp.concatenate([params["token"], patches.reshape(1, 4, D)], axis=1)
        tokens = tokens + params["positions"]
        mixed = jax.nn.softmax(tokens @ tokens.swapaxes(1, 2)) @ tokens
        return _loss(mixed[:, 0] @ params["head"])

    shapes = {"kernel": (2, 2, 2, D), "token": (1, 1, D), "positions": (1, 5, D)}
    return fun, _weights(**shapes, head=(D, 3)), (_uneven(4, 4, 2),)


# Embeddings.


def embedding(mode, *, out_of_range=False):
    """Repeated ids in one mode of gathering; some beyond both ends of the table."""
    ids = _ids(6)
    if out_of_range:
        ids[:, 3] = V + 2
        ids[:, 5] = -V - 3

    def fun(table, ids, y):
        rows = table.at[ids].get(mode=mode, fill_value=0.5 if mode == "fill" else None)
        return _loss(jnp.tanh(rows) * y)

    return fun, _normal(0, V, D), (ids, _uneven(6, D))


def embedding_with_negative_ids():
    """By brackets: from the end of the table, and filled beyond it."""
    ids = _ids(6) - V // 2
    ids[:, 3] = V + 2

    def fun(table, ids, y):
        return _loss(jnp.tanh(table[ids]) * y)

    return fun, _normal(0, V, D), (ids, _uneven(6, D))


def embedding_by_linen():
    table = nn.Embed(V, D)
    ids = _ids(6)

    def fun(params, ids, y):
        return _loss(table.apply({"params": params}, ids) * y)

    return fun, {"embedding": _normal(0, V, D)}, (ids, _uneven(6, D))


def language_model_with_tied_embedding():
    def fun(params, ids):
        hidden = params["embed"][ids] * 2.0 + params["positions"][: ids.shape[1]][None]
        hidden = jnp.tanh(hidden @ params["w"])
        return _token_loss(hidden @ params["embed"].T, ids)

    shapes = {"embed": (V, D), "positions": (2 * T, D), "w": (D, D)}
    return fun, _weights(**shapes), (_ids(2 * T - 1),)


def language_model_with_a_head_over_chunks():
    """The tied head inside a scan over pieces of the sequence, to save memory."""

    def fun(embed, ids):
        hidden = jnp.tanh(embed[ids[:, :-1]])
        chunks = (hidden.reshape(2, T, D), ids[:, 1:].reshape(2, T))

        def add(total, chunk):
            hidden_TxD, targets_T = chunk
            log_probs = jax.nn.log_softmax(hidden_TxD @ embed.T)
            picked = jnp.take_along_axis(log_probs, targets_T[:, None], axis=-1)
            return total - picked.sum(), None

        return jax.lax.scan(add, jnp.zeros((), embed.dtype), chunks)[0]

    return fun, _normal(0, V, D), (_ids(2 * T + 1),)


def language_model_with_lookups_in_a_recurrence():
    """Each step looks its token up, and predicts the next one by the same table."""

    def fun(params, ids):
        def step(h, pair):
            token_1, target_1 = pair
            h = jnp.tanh(params["embed"][token_1] + h @ params["u"])
            log_probs = jax.nn.log_softmax(h @ params["embed"].T)
            return h, jnp.take_along_axis(log_probs, target_1[:, None], axis=-1)

        pairs = (ids[:, :-1].T, ids[:, 1:].T)
        _, picked = jax.lax.scan(step, jnp.zeros((1, D), params["u"].dtype), pairs)
        return -jnp.mean(picked)

    return fun, _weights(embed=(V, D), u=(D, D)), (_ids(T + 1),)


def language_model_of_scanned_blocks():
    """The whole of it: lookup, positions, scanned blocks under remat, tied head."""

    class Network(nn.Module):
        @nn.compact
        def __call__(self, ids):
            embed = nn.Embed(V, D)
            positions = self.param("positions", nn.initializers.normal(), (T, D))
            x = embed(ids) + positions[None]
            blocks = nn.scan(
                nn.remat(_Block, prevent_cse=False),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=2,
            )
            return embed.attend(nn.LayerNorm()(blocks()(x, None)[0]))

    ids = _ids(T)
    shapes = jax.eval_shape(Network().init, jax.random.key(0), ids[:1])["params"]

    def fun(params, ids):
        return _token_loss(Network().apply({"params": params}, ids), ids)

    return fun, _filled(shapes), (ids,)


def prompt_tuning():
    """Learned rows before those of the example, at a frozen table."""
    frozen = _normal(9, V, D)

    def fun(params, ids):
        rows = jnp.asarray(frozen, params["prompt"].dtype)[ids]
        x = jnp.concatenate([params["prompt"], rows], axis=1)
        return _loss(_attend(*[x[:, :, None]] * 3)[:, :, 0] @ params["head"])

    return fun, _weights(prompt=(1, 2, D), head=(D, 3)), (_ids(T),)


# Convolutions.


def one_kernel_at_two_sizes():
    """An image and its half, seen by the same convolution and head."""

    def fun(params, x):
        def features(x):
            y = jax.lax.conv_general_dilated(
                x,
                params["kernel"],
                (1, 1),
                "SAME",
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
            )
            return jnp.tanh(y + params["bias"])

        half = x[:, ::2, ::2]
        return sum(_loss(features(y).mean((1, 2)) @ params["head"]) for y in (x, half))

    shapes = {"kernel": (3, 3, 2, 3), "bias": (1, 1, 1, 3), "head": (3, D)}
    return fun, _weights(**shapes), (_uneven(6, 6, 2),)


def residual_block():
    """GroupNorm in place of BatchNorm, and a strided shortcut."""

    class Network(nn.Module):
        @nn.compact
        def __call__(self, x):
            y = nn.Conv(4, (3, 3), strides=2, use_bias=False)(x)
            y = nn.relu(nn.GroupNorm(num_groups=2)(y))
            y = nn.GroupNorm(num_groups=2)(nn.Conv(4, (3, 3), use_bias=False)(y))
            return nn.Dense(3)(
                nn.relu(y + nn.Conv(4, (1, 1), strides=2)(x)).mean((1, 2))
            )

    return linen_layer(Network(), 6, 6, 3)


# Adapters.


def adapters_beside_frozen_weights():
    frozen = _normal(9, D, D)

    def fun(params, x):
        base = jnp.asarray(frozen, x.dtype)
        for layer in params:
            x = jnp.tanh(x @ base + 2.0 * (x @ layer["a"] @ layer["b"]))
        return _loss(x)

    return fun, [_weights(a=(D, 2), b=(2, D)) for _ in range(2)], (_uneven(T, D),)


def adapters_of_scanned_layers():
    """Frozen weights are scanned over beside the adapters."""
    frozen = _normal(9, 3, D, D)

    def fun(params, x):
        def layer(x, weights):
            base, adapter = weights
            return jnp.tanh(x @ base + x @ adapter["a"] @ adapter["b"]), None

        return _loss(jax.lax.scan(layer, x, (jnp.asarray(frozen, x.dtype), params))[0])

    return fun, _weights(a=(3, D, 2), b=(3, 2, D)), (_uneven(T, D),)


def adapters_merged_into_frozen_weights():
    frozen = _normal(9, D, D)

    def fun(params, x):
        merged = jnp.asarray(frozen, x.dtype) + params["a"] @ params["b"]
        return _loss(jnp.tanh(x @ merged))

    return fun, _weights(a=(D, 2), b=(2, D)), (_uneven(T, D),)


# Mixtures of experts.

E = 3


def experts_indexed_by_token():
    def fun(params, x):
        gates = jax.nn.softmax(x @ params["router"])
        expert = jnp.argmax(gates, axis=-1)
        up, bias = params["up"][expert], params["bias"][expert]
        hidden = jnp.tanh(jnp.einsum("btd,btdf->btf", x, up) + bias)
        y = jnp.einsum("btf,btfd->btd", hidden, params["down"][expert])
        return _loss(y * gates.max(-1, keepdims=True))

    shapes = {"router": (D, E), "up": (E, D, H), "bias": (E, H), "down": (E, H, D)}
    return fun, _weights(**shapes), (_uneven(T, D),)


def experts_by_dispatch():
    """Tokens are sent to places of experts, of which there are too few for all."""

    def fun(params, x):
        gates = jax.nn.softmax(x @ params["router"])
        choice = jax.nn.one_hot(jnp.argmax(gates, -1), E, dtype=x.dtype)
        place = jnp.cumsum(choice, axis=1) * choice - 1
        dispatch = jax.nn.one_hot(place.astype(jnp.int32), 2, dtype=x.dtype)
        sent = jnp.einsum("btec,btd->becd", dispatch, x)
        hidden = jnp.einsum("becd,edf->becf", sent, params["up"])
        hidden = jnp.tanh(hidden + params["bias"])
        y = jnp.einsum("becf,efd->becd", hidden, params["down"])
        combine = dispatch * (gates * choice).sum(-1)[..., None, None]
        return _loss(jnp.einsum("btec,becd->btd", combine, y))

    shapes = {"router": (D, E), "up": (E, D, H), "down": (E, H, D)}
    return fun, _weights(**shapes, bias=(1, E, 1, H)), (_uneven(T, D),)


def experts_all_weighted_by_the_top_two():
    """Every expert sees every token; all but two get weight 0."""

    def fun(params, x):
        scores, chosen = jax.lax.top_k(x @ params["router"], 2)
        weights = jax.nn.softmax(scores)[..., None] * jax.nn.one_hot(
            chosen, E, dtype=x.dtype
        )
        hidden = jax.nn.silu(jnp.einsum("btd,edf->btef", x, params["gate"]))
        hidden = hidden * jnp.einsum("btd,edf->btef", x, params["up"])
        y = jnp.einsum("btef,efd->bted", hidden, params["down"])
        return _loss(jnp.einsum("btke,bted->btd", weights, y))

    shapes = {"router": (D, E), "gate": (E, D, H), "up": (E, D, H), "down": (E, H, D)}
    return fun, _weights(**shapes), (_uneven(T, D),)


# Low precision.


def _floats_to(dtype, tree):
    return jax.tree.map(
        lambda x: jnp.asarray(x, dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x,
        tree,
    )


def in_bfloat16(build):
    """Parameters and data in bfloat16."""
    fun, params, batch = build()
    return fun, _floats_to(jnp.bfloat16, params), _floats_to(jnp.bfloat16, batch)


def in_mixed_precision(build):
    """Parameters in float32, products in bfloat16."""
    fun, params, batch = build()

    def mixed(params, *batch):
        half = _floats_to(jnp.bfloat16, (params, batch))
        return fun(half[0], *half[1]).astype(jax.tree.leaves(params)[0].dtype)

    return mixed, params, batch


_partial = functools.partial
_lstm = _partial(linen_rnn, nn.OptimizedLSTMCell)
_attention = nn.MultiHeadDotProductAttention(num_heads=2)
_transposed = _partial(nn.ConvTranspose, 3, (3, 2), strides=(2, 1))

ARCHITECTURES = (
    Case("simple cell", _partial(linen_rnn, nn.SimpleCell)),
    Case("LSTM cell", _partial(linen_rnn, nn.LSTMCell)),
    Case("optimised LSTM cell", _lstm),
    Case("GRU cell", _partial(linen_rnn, nn.GRUCell)),
    Case("bidirectional", _partial(linen_rnn, nn.SimpleCell, bidirectional=True)),
    Case("NNX GRU", nnx_gru),
    Case("recurrence", recurrence),
    Case("recurrence in reverse", _partial(recurrence, reverse=True)),
    Case("recurrence unrolled by two", _partial(recurrence, unroll=2)),
    Case("recurrence with remat in the body", _partial(recurrence, remat=True)),
    Case(
        "gates from one product",
        _partial(recurrence_with_fused_gates, slice_weights=False),
    ),
    Case(
        "gates from slices of one weight",
        _partial(recurrence_with_fused_gates, slice_weights=True),
    ),
    Case("two recurrent layers", two_recurrent_layers),
    Case("convolutional recurrence", convolutional_recurrence),
    Case("selective state space", selective_state_space),
    Case(
        "scanned layers with shared weights",
        _partial(linen_scanned_layers, _Feedforward, shared=True),
    ),
    Case(
        "scanned layers with remat in the body",
        _partial(linen_scanned_layers, nn.remat(_Feedforward, prevent_cse=False)),
    ),
    Case("NNX scanned layers", nnx_scanned_layers),
    Case("remat of scanned layers", remat_of_scanned_layers),
    Case("recurrence in scanned layers", recurrence_within_scanned_layers),
    Case("recurrence in shared layers", recurrence_within_shared_layers),
    Case("scanned layers in a recurrence", layers_scanned_within_a_recurrence),
    Case("scanned layers with tied weights", scanned_layers_with_tied_weights),
    Case("weight in and outside of a scan", weight_within_and_outside_of_a_scan),
    Case("weight of two scans", weight_of_two_scans),
    Case(
        "one of the scanned layers again",
        slice_of_stacked_weights_outside_of_their_scan,
        may_fall_back=True,
    ),
    Case("lax.map", mapped_layer),
    Case("fori_loop", fori_loop, may_fall_back=True),
    Case("attention", _partial(linen_layer, _attention, T, D)),
    Case("windowed attention", windowed_attention),
    Case("multi-query attention", _partial(grouped_query_attention, 1)),
    Case("grouped-query attention", _partial(grouped_query_attention, 2)),
    Case("QKV split after the product", fused_projection_split_after_the_product),
    Case("QKV as an axis of the product", fused_projection_with_an_axis_for_qkv),
    Case("QKV as slices of a leaf", projections_as_slices_of_one_leaf),
    Case("QKV as entries of a leaf", projections_as_entries_of_one_leaf),
    Case("QKV as a concatenation of leaves", projections_concatenated_from_leaves),
    Case("relative position bias", relative_position_bias),
    Case("vision transformer stem", vision_transformer_stem),
    Case("LayerNorm", _partial(linen_layer, nn.LayerNorm(), 3, D)),
    Case("RMSNorm", _partial(linen_layer, nn.RMSNorm(), 3, D)),
    Case("GroupNorm", _partial(linen_layer, nn.GroupNorm(2), 3, 3, D)),
    Case("nn.Embed", embedding_by_linen),
    Case("embedding in bounds", _partial(embedding, "promise_in_bounds")),
    Case("embedding clipped", _partial(embedding, "clip", out_of_range=True)),
    Case("embedding filled", _partial(embedding, "fill", out_of_range=True)),
    Case("embedding by brackets", embedding_with_negative_ids),
    Case("tied embedding", language_model_with_tied_embedding),
    Case("tied head over chunks", language_model_with_a_head_over_chunks),
    Case("tied lookups in a recurrence", language_model_with_lookups_in_a_recurrence),
    Case("language model of scanned blocks", language_model_of_scanned_blocks),
    Case("prompt tuning", prompt_tuning),
    Case("1-D convolution, strided", _partial(linen_layer, nn.Conv(3, 3, 2), 7, 2)),
    Case(
        "1-D convolution, causal and depthwise",
        _partial(
            linen_layer,
            nn.Conv(6, 3, feature_group_count=3, padding="CAUSAL"),
            5,
            3,
        ),
    ),
    Case(
        "2-D convolution, grouped, strided and dilated",
        _partial(
            linen_layer,
            nn.Conv(4, (2, 3), (2, 1), kernel_dilation=(1, 2), feature_group_count=2),
            5,
            6,
            4,
        ),
    ),
    Case(
        "2-D convolution, circular",
        _partial(linen_layer, nn.Conv(3, (3, 3), padding="CIRCULAR"), 4, 4, 2),
    ),
    Case("3-D convolution", _partial(linen_layer, nn.Conv(3, (2, 2, 2)), 3, 3, 3, 2)),
    Case(
        "3-D convolution, depthwise and strided",
        _partial(
            linen_layer,
            nn.Conv(2, (2, 3, 1), (1, 2, 1), feature_group_count=2),
            3,
            4,
            2,
            2,
        ),
    ),
    Case("transposed convolution", _partial(linen_layer, _transposed(), 3, 4, 2)),
    Case(
        "transposed convolution with the kernel of a convolution",
        _partial(linen_layer, _transposed(transpose_kernel=True), 3, 4, 2),
    ),
    Case("locally connected", _partial(linen_layer, nn.ConvLocal(3, 2), 5, 2)),
    Case("one kernel at two sizes", one_kernel_at_two_sizes),
    Case("residual block", residual_block),
    Case("adapters", adapters_beside_frozen_weights),
    Case("adapters of scanned layers", adapters_of_scanned_layers),
    Case("adapters, merged", adapters_merged_into_frozen_weights, may_fall_back=True),
    Case("experts indexed by token", experts_indexed_by_token),
    Case("experts by dispatch", experts_by_dispatch),
    Case("experts by top two", experts_all_weighted_by_the_top_two),
    *(
        Case(f"{name} in {precision}", _partial(lower, build), ROUNDED)
        for precision, lower in (
            ("bfloat16", in_bfloat16),
            ("mixed precision", in_mixed_precision),
        )
        for name, build in (
            ("recurrence", recurrence),
            ("scanned layers", remat_of_scanned_layers),
            ("convolution", _partial(linen_layer, nn.Conv(3, 3, 2), 7, 2)),
            ("group norm", _partial(linen_layer, nn.GroupNorm(2), 3, 3, D)),
            ("language model", language_model_with_tied_embedding),
        )
    ),
)

# Compiling is most of the time of these tests, and the numbers do not depend on it.
_COMPILER_OPTIONS: dict[str, Any] = {"xla_backend_optimization_level": 0}
if jax.__version_info__ < (0, 11):  # Gone from later releases; halves the time.
    _COMPILER_OPTIONS["xla_cpu_use_fusion_emitters"] = False
_quick_jit = functools.partial(jax.jit, compiler_options=_COMPILER_OPTIONS)


@pytest.mark.parametrize("case", ARCHITECTURES, ids=lambda case: case.name)
def test_architecture(case, subtests, float64_reference, assert_clipped_sum):
    fun, params, batch = case.build()
    batch_argnums = tuple(range(1, 1 + len(batch)))
    reference = float64_reference(fun, *_floats_to(np.float32, (params, batch)))
    assert reference.norms_B.min() < reference.clip_norm < reference.norms_B.max()
    with subtests.test("no fallback"):
        explanation = explain(fun, params, *batch, batch_argnums=batch_argnums)
        assert case.may_fall_back or not explanation.fallbacks
    grad_fns = {
        method: clipped_grad(
            fun,
            l2_clip_norm=reference.clip_norm,
            batch_argnums=batch_argnums,
            return_grad_norms=True,
            method=method,
        )
        for method in METHODS
    }
    results = _quick_jit(lambda *args: {m: f(*args) for m, f in grad_fns.items()})(
        params, *batch
    )
    for method, (clipped_sum, aux) in results.items():
        with subtests.test(method=method):
            assert aux.grad_norms.dtype == jnp.float32
            np.testing.assert_allclose(
                aux.grad_norms, reference.norms_B, rtol=case.tolerance
            )
            assert_clipped_sum(clipped_sum, reference, case.tolerance)
