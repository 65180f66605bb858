"""VGG-11, 13, 16 and 19 (Simonyan & Zisserman 2015, arXiv 1409.1556).

The architecture is that of torchvision without batch normalisation, as in Lee & Kifer
2021, with as many parameters: 128,807,306, 128,991,818, 134,301,514 and 139,611,210
with 10 classes. Two differences: there is no dropout (of 0.5 in torchvision, in the
dense layers), since the noise of private training is regularisation enough; and
`norm=group` or `norm=frozen` (see `experiments.models.normalization`) puts a stand-in
where torchvision's second family has batch normalisation. `group` adds two numbers per
channel: 5,504, 5,888, 8,448 and 11,008.
"""

from collections.abc import Callable
from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from experiments.models.normalization import Normalization

Norm = Literal["none", "group", "frozen"]
MAX_CHANNELS_OVER_WIDTH, DENSE_OVER_WIDTH = 8, 64
FINAL_SIZE = 7


class VGG(nn.Module):
    """3x3 convolutions with ReLU and max pooling, three dense layers.

    Attributes:
      num_classes: Width of the output.
      blocks: Number of convolutions in each stage; a stage ends with 2x2 max pooling.
      width: Channels of the first stage. They double from stage to stage, up to 8 times
        as many; the two hidden dense layers have 64 times as many units.
      norm: See the module; `none` normalises nothing.
    """

    num_classes: int
    blocks: tuple[int, ...]
    width: int = 64
    norm: Norm = "none"

    @nn.compact
    def __call__(self, images_BxHxWxC: jax.Array) -> jax.Array:
        """Returns logits_BxV."""
        x = images_BxHxWxC
        for stage, num_convolutions in enumerate(self.blocks):
            channels = self.width * min(2**stage, MAX_CHANNELS_OVER_WIDTH)
            for i in range(num_convolutions):
                place = f"stage_{stage}_{i}"
                x = nn.Conv(
                    channels,
                    (3, 3),
                    padding=1,
                    kernel_init=nn.initializers.he_normal(),
                    name=f"{place}_conv",
                )(x)
                if self.norm != "none":
                    x = Normalization(self.norm, name=f"{place}_norm")(x)
                x = nn.relu(x)
            x = nn.max_pool(x, (2, 2), (2, 2))
        if x.size == 0:
            raise ValueError("the pooling leaves nothing of images this small")
        x = adaptive_mean_pool(x, FINAL_SIZE)
        x = x.reshape(x.shape[0], -1)
        for i in range(2):
            x = nn.relu(
                nn.Dense(
                    DENSE_OVER_WIDTH * self.width,
                    kernel_init=nn.initializers.he_normal(),
                    name=f"dense_{i}",
                )(x)
            )
        return nn.Dense(self.num_classes, name="head")(x)


def adaptive_mean_pool(x_BxHxWxC: jax.Array, size: int) -> jax.Array:
    """Means over rectangles, f32[B, size, size, C], whatever the height and the width.

    Row i of the result averages the rows from floor(i H / size) up to
    ceil((i + 1) H / size), as torch's AdaptiveAvgPool2d does, so fewer rows than `size`
    are repeated. Columns likewise.

    Example:
      >>> x_BxHxWxC = jnp.arange(4.0).reshape(1, 4, 1, 1)
      >>> adaptive_mean_pool(x_BxHxWxC, 2)[0, :, 0, 0].tolist()
      [0.5, 2.5]
    """
    _, height, width, _ = x_BxHxWxC.shape
    if height == width == size:
        return x_BxHxWxC
    rows_IxH, columns_JxW = _mean_matrix(height, size), _mean_matrix(width, size)
    return jnp.einsum("ih,jw,bhwc->bijc", rows_IxH, columns_JxW, x_BxHxWxC)


def _mean_matrix(length: int, size: int) -> np.ndarray:
    starts_I = np.arange(size) * length // size
    stops_I = -(-np.arange(1, size + 1) * length // size)
    places_L = np.arange(length)
    is_in_IxL = (places_L >= starts_I[:, None]) & (places_L < stops_I[:, None])
    return (is_in_IxL / is_in_IxL.sum(axis=1, keepdims=True)).astype(np.float32)


def _builder(blocks: tuple[int, ...]) -> Callable[..., VGG]:
    def build(
        image_shape: tuple[int, int, int],
        num_classes: int,
        *,
        blocks: tuple[int, ...] = blocks,
        width: int = 64,
        norm: Norm = "none",
    ) -> VGG:
        del image_shape
        return VGG(num_classes, blocks, width, norm)

    return build


vgg11 = _builder((1, 1, 2, 2, 2))
vgg13 = _builder((2, 2, 2, 2, 2))
vgg16 = _builder((2, 2, 3, 3, 3))
vgg19 = _builder((2, 2, 4, 4, 4))
