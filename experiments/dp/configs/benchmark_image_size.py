"""Time per step as the images get larger, as Lee & Kifer 2021 do it on LSUN.

On two cores the networks are narrower, and the images and batches smaller.
"""

import ml_collections

from experiments.dp import benchmark_config

CELLS = {
    "tiny": ("cnn@8x8x1@2", "cnn@16x16x1@2"),
    "small": (
        *(f"cnn@{n}x{n}x3@8" for n in (32, 64, 96)),
        *(f"resnet18:width=16@{n}x{n}x3@8" for n in (32, 64, 128)),
        # Filter gradients of single examples would take minutes on a CPU.
        *(f"vgg11:width=8@{n}x{n}x3@8" for n in (32, 64)),
        "vgg11:width=8@128x128x3@8@without=jax_privacy+multi_loss",
    ),
    "full": (
        *(f"resnet18@{n}x{n}x3@32@without=multi_loss" for n in (32, 64, 128, 256)),
        *(f"vgg16@{n}x{n}x3@32@without=multi_loss" for n in (32, 64, 128, 256)),
    ),
}


def get_config(scale: str = "small") -> ml_collections.ConfigDict:
    """Returns the config at a scale: tiny, small or full."""
    return benchmark_config.make(
        scale, CELLS, figure="image_size", **benchmark_config.SWEEP
    )
