"""Residual networks: ResNet-18, 34, 50 and 101 (He et al. 2016, arXiv 1512.03385).

The architecture is that of torchvision, with the stem of Lee & Kifer 2021: a 6x6
convolution of stride 2 and padding 3 where torchvision has a 7x7 one. Their blocks keep
the affine part of batch normalisation frozen at values that were trained on ImageNet,
while its batch statistics mix examples. Here batch normalisation gives way to one of
`experiments.models.normalization`. Numbers of parameters with 10 classes:

| | paper: trainable + frozen | `norm=group` (trainable) | `norm=frozen` (trainable) |
|---|---|---|---|
| ResNet-18 | 11,171,466 + 7,680 | 11,179,146 | 11,169,546 |
| ResNet-34 | 21,272,202 + 15,104 | 21,287,306 | 21,270,282 |
| ResNet-50 | 23,480,714 + 45,312 | 23,526,026 | 23,472,906 |
| ResNet-101 | 42,420,618 + 97,536 | 42,518,154 | 42,412,810 |

`group` trains what the paper freezes and the scales and biases of the stem and the
shortcuts, so it has their sum; `frozen` trains neither.
"""

import math
from collections.abc import Callable
from typing import Literal

import flax.linen as nn
import jax

from experiments.models.normalization import Norm, Normalization

Stem = Literal["strided", "small"]
EXPANSION = 4


class ResNet(nn.Module):
    """A stem, stages of residual blocks, the mean over pixels, a dense layer.

    Attributes:
      num_classes: Width of the output.
      blocks: Number of blocks in each stage; a stage after the first halves height and
        width and doubles the channels.
      bottleneck: Whether a block is 1x1, 3x3, 1x1 convolutions, the last with four
        times the channels, or two 3x3 ones.
      width: Channels of the stem and of the first stage.
      norm: See `experiments.models.normalization`.
      stem: `strided`: 6x6 convolution of stride 2, 3x3 max pooling of stride 2.
        `small`: 3x3 convolution of stride 1, for images of 32 pixels and less.
    """

    num_classes: int
    blocks: tuple[int, ...]
    bottleneck: bool
    width: int = 64
    norm: Norm = "group"
    stem: Stem = "strided"

    @nn.compact
    def __call__(self, images_BxHxWxC: jax.Array) -> jax.Array:
        """Returns logits_BxV."""
        x = self._stem(images_BxHxWxC)
        # In `frozen`, every branch adds 1 / (number of blocks) of the variance.
        branch_scale = 1 / math.sqrt(sum(self.blocks))
        for stage, num_blocks in enumerate(self.blocks):
            for i in range(num_blocks):
                block = Block(
                    self.width * 2**stage,
                    stride=2 if stage > 0 and i == 0 else 1,
                    bottleneck=self.bottleneck,
                    norm=self.norm,
                    branch_scale=branch_scale,
                    name=f"stage_{stage}_block_{i}",
                )
                x = block(x)
        return nn.Dense(self.num_classes, name="head")(x.mean(axis=(1, 2)))

    def _stem(self, x: jax.Array) -> jax.Array:
        size, stride, padding = (6, 2, 3) if self.stem == "strided" else (3, 1, 1)
        x = _conv(self.width, size, stride, padding, "stem_conv")(x)
        x = nn.relu(Normalization(self.norm, name="stem_norm")(x))
        if self.stem == "small":
            return x
        return nn.max_pool(x, (3, 3), (2, 2), ((1, 1), (1, 1)))


class Block(nn.Module):
    """relu(shortcut(x) + branch(x)).

    Attributes:
      channels: Of the 3x3 convolutions.
      stride: Of the first 3x3 convolution.
      bottleneck: See `ResNet`.
      norm: See `ResNet`.
      branch_scale: What `frozen` multiplies the branch by.
    """

    channels: int
    stride: int
    bottleneck: bool
    norm: Norm
    branch_scale: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns f32[B, H / stride, W / stride, channels (times 4)]."""
        wide = self.channels * (EXPANSION if self.bottleneck else 1)
        # Channels, kernel size, stride and padding of each convolution.
        convolutions = [
            (self.channels, 3, self.stride, 1),
            (self.channels, 3, 1, 1),
        ]
        if self.bottleneck:
            convolutions = [
                (self.channels, 1, 1, 0),
                (self.channels, 3, self.stride, 1),
                (wide, 1, 1, 0),
            ]
        y = x
        last = len(convolutions) - 1
        for i, (channels, size, stride, padding) in enumerate(convolutions):
            y = _conv(channels, size, stride, padding, f"conv_{i}")(y)
            scale = self.branch_scale if i == last else 1.0
            y = Normalization(self.norm, scale, name=f"norm_{i}")(y)
            y = y if i == last else nn.relu(y)
        if self.stride != 1 or x.shape[-1] != wide:
            x = _conv(wide, 1, self.stride, 0, "shortcut_conv")(x)
            x = Normalization(self.norm, name="shortcut_norm")(x)
        return nn.relu(x + y)


def _conv(channels: int, size: int, stride: int, padding: int, name: str) -> nn.Conv:
    return nn.Conv(
        channels,
        (size, size),
        strides=stride,
        padding=padding,
        use_bias=False,
        kernel_init=nn.initializers.he_normal(),
        name=name,
    )


def _builder(blocks: tuple[int, ...], bottleneck: bool) -> Callable[..., ResNet]:
    def build(
        image_shape: tuple[int, int, int],
        num_classes: int,
        *,
        blocks: tuple[int, ...] = blocks,
        width: int = 64,
        norm: Norm = "group",
        stem: Stem = "strided",
    ) -> ResNet:
        del image_shape
        return ResNet(num_classes, blocks, bottleneck, width, norm, stem)

    return build


resnet18 = _builder((2, 2, 2, 2), bottleneck=False)
resnet34 = _builder((3, 4, 6, 3), bottleneck=False)
resnet50 = _builder((3, 4, 6, 3), bottleneck=True)
resnet101 = _builder((3, 4, 23, 3), bottleneck=True)
