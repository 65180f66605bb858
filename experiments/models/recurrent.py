"""Recurrent classifiers of images: the RNN and the LSTM of Lee & Kifer 2021.

The rows of an image are the time steps, from top to bottom. In a colour image a step
sees one row of all channels, W * C numbers; the authors' code reshapes the channels
first, so that a step there sees three consecutive rows of one channel. The number of
parameters is the same: 21,514 (RNN) and 82,186 (LSTM) on 28x28x1, 30,218 and 117,002 on
32x32x3, with the two biases of PyTorch's cells, one for the input and one for the
recurrent product.

Everything that does not depend on the state (the input product and both biases) is
computed for all time steps at once, outside the scan; its body holds one product.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp


class _Gates(nn.Module):
    """What a recurrent layer adds up before its non-linearity.

    Attributes:
      size: Number of sums per time step: the width, times four in an LSTM.
      width: Size of the state.
    """

    size: int
    width: int

    @nn.compact
    def __call__(self, x_TxBxD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the input's part f32[T, B, size] and the recurrent kernel."""
        gates_TxBxP = nn.Dense(self.size, name="input")(x_TxBxD)
        recurrent_bias_P = self.param(
            "recurrent_bias", nn.initializers.zeros, (self.size,)
        )
        recurrent_kernel_MxP = self.param(
            "recurrent_kernel", _recurrent_init, (self.width, self.size)
        )
        return gates_TxBxP + recurrent_bias_P[None, None], recurrent_kernel_MxP


def _recurrent_init(key: jax.Array, shape: tuple[int, int], dtype: Any = jnp.float32):
    # An orthogonal matrix per gate neither shrinks nor stretches the state.
    width, size = shape
    keys = jax.random.split(key, size // width)
    init = nn.initializers.orthogonal()
    return jnp.concatenate([init(k, (width, width), dtype) for k in keys], axis=1)


class RNN(nn.Module):
    """h_t = tanh(W x_t + b + R h_{t-1} + b'), and a dense layer on the last h_t.

    Attributes:
      num_classes: Width of the output.
      width: Size of the state.
      layers: Recurrent layers; each reads the states of the one below.
    """

    num_classes: int
    width: int = 128
    layers: int = 1

    @nn.compact
    def __call__(self, images_BxHxWxC: jax.Array) -> jax.Array:
        """Returns logits_BxV."""
        x_TxBxD = _rows(images_BxHxWxC)
        state_BxM = jnp.zeros((x_TxBxD.shape[1], self.width))
        for i in range(self.layers):
            gates_TxBxM, kernel_MxM = _Gates(self.width, self.width, name=f"layer_{i}")(
                x_TxBxD
            )

            def step(h_BxM, gates_BxM, kernel_MxM=kernel_MxM):
                h_BxM = jnp.tanh(gates_BxM + h_BxM @ kernel_MxM)
                return h_BxM, h_BxM

            last_BxM, x_TxBxD = jax.lax.scan(step, state_BxM, gates_TxBxM)
        return nn.Dense(self.num_classes, name="head")(last_BxM)


class LSTM(nn.Module):
    """The LSTM of Hochreiter and Schmidhuber, and a dense layer on its last output.

    With gates (i, f, g, o) = W x_t + b + R h_{t-1} + b':
    c_t = sigmoid(f) c_{t-1} + sigmoid(i) tanh(g) and h_t = sigmoid(o) tanh(c_t).

    Attributes:
      num_classes: Width of the output.
      width: Size of h and of c.
      layers: Recurrent layers; each reads the outputs h of the one below.
    """

    num_classes: int
    width: int = 128
    layers: int = 1

    @nn.compact
    def __call__(self, images_BxHxWxC: jax.Array) -> jax.Array:
        """Returns logits_BxV."""
        x_TxBxD = _rows(images_BxHxWxC)
        state_BxM = jnp.zeros((x_TxBxD.shape[1], self.width))
        for i in range(self.layers):
            gates_TxBxP, kernel_MxP = _Gates(
                4 * self.width, self.width, name=f"layer_{i}"
            )(x_TxBxD)

            def step(carry, gates_BxP, kernel_MxP=kernel_MxP):
                h_BxM, c_BxM = carry
                gates_BxP = gates_BxP + h_BxM @ kernel_MxP
                i, f, g, o = jnp.split(gates_BxP, 4, axis=-1)
                c_BxM = nn.sigmoid(f) * c_BxM + nn.sigmoid(i) * jnp.tanh(g)
                h_BxM = nn.sigmoid(o) * jnp.tanh(c_BxM)
                return (h_BxM, c_BxM), h_BxM

            (last_BxM, _), x_TxBxD = jax.lax.scan(
                step, (state_BxM, state_BxM), gates_TxBxP
            )
        return nn.Dense(self.num_classes, name="head")(last_BxM)


def _rows(images_BxHxWxC: jax.Array) -> jax.Array:
    """The rows of each image as time steps, time first: f32[H, B, W * C]."""
    batch_size, height = images_BxHxWxC.shape[:2]
    return jnp.swapaxes(images_BxHxWxC.reshape(batch_size, height, -1), 0, 1)


def rnn(
    image_shape: tuple[int, int, int],
    num_classes: int,
    *,
    width: int = 128,
    layers: int = 1,
) -> RNN:
    """The RNN of Lee & Kifer 2021."""
    del image_shape
    return RNN(num_classes, width, layers)


def lstm(
    image_shape: tuple[int, int, int],
    num_classes: int,
    *,
    width: int = 128,
    layers: int = 1,
) -> LSTM:
    """The LSTM of Lee & Kifer 2021."""
    del image_shape
    return LSTM(num_classes, width, layers)
