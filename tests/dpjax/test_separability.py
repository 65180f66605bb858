"""`require_separable` against losses that mix examples, and losses that do not."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import require_separable


def _normal(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def _mlp_params(dtype=jnp.float32):
    return {
        "hidden": _normal(0, 4, 8, dtype=dtype),
        "bias": _normal(1, 1, 8, dtype=dtype),
        "head": _normal(2, 8, 3, dtype=dtype),
        "unused": jnp.ones((), dtype),
    }


def _hidden(params, x_BxD):
    return jnp.tanh(x_BxD @ params["hidden"] + params["bias"])


def _mean_loss(params, x_BxD):
    return jnp.mean((_hidden(params, x_BxD) @ params["head"]) ** 2)


def _contrastive_loss(params, x_BxD):
    z_BxH = _hidden(params, x_BxD)
    return -jnp.mean(jnp.diag(jax.nn.log_softmax(z_BxH @ z_BxH.T)))


def _normalised_loss(params, x_BxD):
    z_BxH = _hidden(params, x_BxD)
    centred_BxH = z_BxH - jnp.mean(z_BxH, axis=0, keepdims=True)
    scale_1xH = jnp.sqrt(jnp.mean(centred_BxH**2, axis=0, keepdims=True) + 1e-2)
    return jnp.mean((centred_BxH / scale_1xH @ params["head"]) ** 4)


def _balanced_loss(params, x_BxD):
    """A loss with the load-balancing term of Switch Transformers (arXiv 2101.03961)."""
    gates_BxE = jax.nn.softmax(_hidden(params, x_BxD))
    chosen_BxE = jax.nn.one_hot(jnp.argmax(gates_BxE, axis=-1), gates_BxE.shape[-1])
    balance = jnp.sum(jnp.mean(chosen_BxE, axis=0) * jnp.mean(gates_BxE, axis=0))
    return _mean_loss(params, x_BxD) + 0.01 * gates_BxE.shape[-1] * balance


def _token_mean_loss(params, x_BxD):
    """The mean over the kept entries of all rows; each row keeps another number."""
    kept_BxD = x_BxD > 0
    loss_BxD = jnp.mean(_hidden(params, x_BxD) ** 2, axis=1, keepdims=True) * kept_BxD
    return jnp.sum(loss_BxD) / jnp.sum(kept_BxD)


def _summed_and_regularised_loss(params, x_BxD):
    return jnp.sum(_hidden(params, x_BxD) ** 2) + jnp.sum(params["head"] ** 2)


def _sum_loss(params, x_BxD):
    return _mean_loss(params, x_BxD) * x_BxD.shape[0]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("loss", [_mean_loss, _sum_loss])
def test_means_and_sums_over_rows_pass(dtype, loss):
    x_BxD = _normal(3, 8, 4, dtype=dtype)
    require_separable(loss, _mlp_params(dtype), x_BxD, num_rows=7)


@pytest.mark.parametrize(
    ("loss", "paths"),
    [
        (_contrastive_loss, [r"\['hidden'\]", r"\['bias'\]"]),
        (_normalised_loss, [r"\['hidden'\]", r"\['bias'\]", r"\['head'\]"]),
        (_balanced_loss, [r"\['hidden'\]", r"\['bias'\]"]),
        (_token_mean_loss, [r"\['hidden'\]", r"\['bias'\]"]),
        (_summed_and_regularised_loss, [r"\['head'\]"]),
        (lambda p, x: _mean_loss(p, x[:1]), [r"\['hidden'\]", r"\['head'\]"]),
    ],
    ids=["contrastive", "batch norm", "balancing", "tokens", "regulariser", "first"],
)
def test_losses_that_mix_are_refused_by_parameter(loss, paths):
    with pytest.raises(ValueError, match=r"fun mixes examples: on 4 rows") as error:
        require_separable(loss, _mlp_params(), _normal(3, 8, 4))
    assert "\n" not in str(error.value)
    for path in paths:
        error.match(rf"{path} \(\d[\d.e+]* %\)")
    assert "unused" not in str(error.value)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("loss", [_contrastive_loss, _normalised_loss])
def test_mixing_shows_in_half_precision(loss, dtype):
    with pytest.raises(ValueError, match=r"fun mixes examples.*\['hidden'\]"):
        require_separable(loss, _mlp_params(dtype), _normal(3, 8, 4, dtype=dtype))


class Encoder(nn.Module):
    """Attention, whose key's bias has a gradient of rounding alone, and a norm."""

    dtype: object
    use_batch_norm: bool = False

    @nn.compact
    def __call__(self, x_BxTxD):
        x_BxTxD += nn.MultiHeadDotProductAttention(2, dtype=self.dtype)(x_BxTxD)
        norm = (
            nn.BatchNorm(use_running_average=False, dtype=self.dtype)
            if self.use_batch_norm
            else nn.LayerNorm(dtype=self.dtype)
        )
        return nn.Dense(3, dtype=self.dtype)(norm(x_BxTxD))


@pytest.mark.parametrize(
    ("dtype", "use_batch_norm"),
    [(jnp.float32, False), (jnp.bfloat16, False), (jnp.bfloat16, True)],
)
def test_a_model_in_mixed_precision(dtype, use_batch_norm):
    model = Encoder(dtype, use_batch_norm)
    x_BxTxD, y_BxTxC = _normal(4, 5, 6, 8), _normal(5, 5, 6, 3)
    variables = jax.jit(model.init)(jax.random.key(0), x_BxTxD)
    statistics = variables.get("batch_stats", {})

    def loss(params, statistics, x_BxTxD, y_BxTxC):
        out, _ = model.apply(
            {"params": params, "batch_stats": statistics},
            x_BxTxD,
            mutable=["batch_stats"],
        )
        return jnp.mean((out - y_BxTxC) ** 2), out

    args = (variables["params"], statistics, x_BxTxD, y_BxTxC)
    options = {"has_aux": True, "batch_argnums": (2, 3)}
    if not use_batch_norm:
        require_separable(loss, *args, **options)
        return
    with pytest.raises(ValueError, match=r"examples.*Attention_0'\]\['out'\]"):
        require_separable(loss, *args, **options)


def test_batches_of_integers_trees_and_several_parameter_arguments():
    def loss(table, batch, scale):
        return jnp.mean(table[batch["ids"]] * scale * batch["weight"][:, None])

    batch = {"ids": jnp.array([0, 2, 2, 1]), "weight": jnp.arange(4.0)}
    require_separable(loss, _normal(6, 3, 2), batch, 2.0, argnums=(0, 2))


def test_complex_parameters():
    def loss(w, x_B):
        return jnp.mean(jnp.abs(w * x_B) ** 2)

    require_separable(loss, jnp.complex64(1 + 2j), jnp.arange(3.0))
    with pytest.raises(ValueError, match="gradient of the parameter"):
        require_separable(
            lambda w, x_B: loss(w, x_B) ** 2, jnp.complex64(1 + 2j), jnp.arange(3.0)
        )


def test_more_rows_see_more():
    def loss(w, x_B):
        return jnp.mean(w * x_B) * (1 if x_B.shape[0] < 6 else 2)

    require_separable(loss, 1.0, jnp.arange(8.0))
    with pytest.raises(ValueError, match="on 6 rows"):
        require_separable(loss, 1.0, jnp.arange(8.0), num_rows=6)


def test_many_parameters_are_counted_beyond_the_first_few():
    params = {f"w{i}": jnp.float32(i + 1) for i in range(9)}

    def loss(params, x_B):
        return jnp.mean(x_B) ** 2 * sum(params.values())

    with pytest.raises(ValueError, match=r"(\['w\d'\] \([\d.]+ %\)(, )?){5} and 4 "):
        require_separable(loss, params, jnp.arange(1.0, 5.0))


def test_a_loss_that_needs_other_rows():
    def loss(w, x_B):
        similarity_BxB = jnp.where(jnp.eye(x_B.shape[0]) > 0, -jnp.inf, w * x_B @ x_B.T)
        return jnp.mean(jax.nn.logsumexp(similarity_BxB, axis=1) * w)

    with pytest.raises(ValueError, match="parameter is not finite on a single row"):
        require_separable(loss, 1.0, jnp.arange(1.0, 4.0)[:, None])


def test_a_gradient_that_is_not_finite():
    x_BxD = _normal(3, 8, 4).at[1, 2].set(jnp.nan)
    with pytest.raises(ValueError, match=r"\['bias'\] is not finite on the batch"):
        require_separable(_mean_loss, _mlp_params(), x_BxD)


@pytest.mark.parametrize(
    ("x_B", "options", "message"),
    [
        (jnp.arange(4.0), {"num_rows": 1}, r"num_rows=1 must be >= 2"),
        (jnp.arange(1.0), {}, r"the batch has 1 rows, but must have at least 2"),
        (jnp.ones(4), {}, r"first rows of the batch are equal"),
        (jnp.arange(4.0), {"prng_argnum": 0}, r"got prng_argnum, but"),
        (jnp.arange(4.0), {"labels": 0}, r"got labels, but"),
        (jnp.arange(4.0), {"argnums": 1}, r"argnums=1 and batch_argnums=1 overlap"),
    ],
)
def test_what_cannot_be_compared(x_B, options, message):
    with pytest.raises(ValueError, match=message):
        require_separable(lambda w, x_B: jnp.mean(w * x_B), 1.0, x_B, **options)


def test_traced_arguments():
    def step(w, x_B):
        require_separable(lambda w, x_B: jnp.mean(w * x_B), w, x_B)

    with pytest.raises(ValueError, match="got traced arguments"):
        jax.jit(step)(1.0, jnp.arange(4.0))
