"""Time per step as the batch grows."""

import ml_collections

from experiments.dp import benchmark_config

CELLS = {
    "tiny": ("mlp@8x8x1@2", "mlp@8x8x1@4"),
    "small": (
        *(f"mlp@28x28x1@{size}" for size in (8, 32, 128, 512)),
        *(f"cnn@28x28x1@{size}" for size in (8, 32, 128)),
        *(f"lstm@28x28x1@{size}" for size in (8, 32, 128)),
        *(f"transformer@64@{size}" for size in (4, 16, 64)),
    ),
    "full": (
        *(f"mlp@28x28x1@{size}" for size in (16, 32, 64, 128, 256, 512)),
        *(f"cnn@28x28x1@{size}" for size in (16, 32, 64, 128, 256, 512)),
        *(f"lstm@28x28x1@{size}" for size in (16, 32, 64, 128, 256, 512)),
        *(f"transformer@512@{size}" for size in (16, 32, 64, 128)),
        *(
            f"resnet18@256x256x3@{size}@without=multi_loss"
            for size in (16, 32, 64, 128)
        ),
    ),
}


def get_config(scale: str = "small") -> ml_collections.ConfigDict:
    """Returns the config at a scale: tiny, small or full."""
    return benchmark_config.make(
        scale, CELLS, figure="batch_size", **benchmark_config.SWEEP
    )
