"""Image classifiers: the MLP and the CNN of Lee & Kifer 2021, and a tanh CNN.

No layer here mixes examples (no batch normalisation), so per-example gradients exist.
"""

import dataclasses
from collections.abc import Callable
from typing import Literal

import flax.linen as nn
import jax

Activation = Literal["relu", "sigmoid", "tanh"]

ACTIVATIONS: dict[Activation, Callable[[jax.Array], jax.Array]] = {
    "relu": nn.relu,
    "sigmoid": nn.sigmoid,
    "tanh": nn.tanh,
}


class MLP(nn.Module):
    """Fully connected layers on the flattened image.

    With the defaults and 28x28x1 images: 784-128-256-10, 136,074 parameters.

    Attributes:
      num_classes: Width of the output.
      hidden_sizes: Widths of the hidden layers.
      activation: Name of the activation between layers.
    """

    num_classes: int
    hidden_sizes: tuple[int, ...] = (128, 256)
    activation: Activation = "sigmoid"

    @nn.compact
    def __call__(self, images_BxHxWxC: jax.Array) -> jax.Array:
        """Returns logits_BxV."""
        x = images_BxHxWxC.reshape(images_BxHxWxC.shape[0], -1)
        for size in self.hidden_sizes:
            x = ACTIVATIONS[self.activation](nn.Dense(size)(x))
        return nn.Dense(self.num_classes)(x)


@dataclasses.dataclass(frozen=True)
class ConvLayer:
    """One convolution, its activation and the max pooling after it (window 2x2)."""

    channels: int
    kernel_size: int
    stride: int = 1
    padding: str = "VALID"
    pool_stride: int = 2


class CNN(nn.Module):
    """Convolutions with max pooling, one hidden dense layer.

    With the defaults and 28x28x1 images, 129,388 parameters: conv 5x5x20, ReLU, pool,
    conv 5x5x50, ReLU, pool, dense 128, ReLU, dense 10.

    Attributes:
      num_classes: Width of the output.
      layers: The convolutions, in order.
      hidden_size: Width of the dense layer.
      activation: Name of the activation.
    """

    num_classes: int
    layers: tuple[ConvLayer, ...] = (ConvLayer(20, 5), ConvLayer(50, 5))
    hidden_size: int = 128
    activation: Activation = "relu"

    @nn.compact
    def __call__(self, images_BxHxWxC: jax.Array) -> jax.Array:
        """Returns logits_BxV."""
        activation = ACTIVATIONS[self.activation]
        x = images_BxHxWxC
        for layer in self.layers:
            x = nn.Conv(
                layer.channels,
                (layer.kernel_size, layer.kernel_size),
                strides=layer.stride,
                padding=layer.padding,
            )(x)
            x = activation(x)
            x = nn.max_pool(x, (2, 2), (layer.pool_stride, layer.pool_stride))
        if x.size == 0:
            raise ValueError("the convolutions leave nothing of images this small")
        x = x.reshape(x.shape[0], -1)
        x = activation(nn.Dense(self.hidden_size)(x))
        return nn.Dense(self.num_classes)(x)


def mlp(
    image_shape: tuple[int, int, int],
    num_classes: int,
    *,
    hidden_sizes: tuple[int, ...] = (128, 256),
    activation: Activation = "sigmoid",
) -> MLP:
    """The MLP of Lee & Kifer 2021."""
    del image_shape
    return MLP(num_classes, hidden_sizes, activation)


def cnn(
    image_shape: tuple[int, int, int],
    num_classes: int,
    *,
    channels: tuple[int, ...] = (20, 50),
    kernel_size: int = 5,
    hidden_size: int = 128,
    activation: Activation = "relu",
) -> CNN:
    """The CNN of Lee & Kifer 2021.

    Its two unpadded 5x5 convolutions need 16 pixels (16, 12, 6, 2, 1); on smaller
    images, such as the 8x8 digits, all are padded ("SAME") instead.
    """
    padding = "VALID" if min(image_shape[:2]) >= 16 else "SAME"
    layers = tuple(ConvLayer(c, kernel_size, padding=padding) for c in channels)
    return CNN(num_classes, layers, hidden_size, activation)


def tempered_cnn(image_shape: tuple[int, int, int], num_classes: int) -> CNN:
    """The tanh CNN of Papernot et al. 2021 (arXiv 2007.14191): 26,010 parameters.

    Bounded activations keep per-example gradients small, so clipping loses less.
    """
    del image_shape
    layers = (
        ConvLayer(16, 8, stride=2, padding="SAME", pool_stride=1),
        ConvLayer(32, 4, stride=2, padding="VALID", pool_stride=1),
    )
    return CNN(num_classes, layers=layers, hidden_size=32, activation="tanh")
