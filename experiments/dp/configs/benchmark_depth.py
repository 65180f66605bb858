"""Time per step as the network gets deeper: ResNet, VGG, MLP, Transformer.

On two cores ResNet and VGG are narrower, and their images and batches smaller.
"""

import ml_collections

from experiments.dp import benchmark_config

CELLS = {
    "tiny": ("mlp:hidden_sizes=4@8x8x1@2", "mlp:hidden_sizes=4-4@8x8x1@2"),
    "small": (
        "resnet18:width=16@32x32x3@16",
        "resnet34:width=16@32x32x3@16",
        "vgg11:width=8@32x32x3@8",
        "vgg16:width=8@32x32x3@8",
        "vgg19:width=8@32x32x3@8",
        "mlp:hidden_sizes=256-256@28x28x1@128",
        "mlp:hidden_sizes=256-256-256-256@28x28x1@128",
        "mlp:hidden_sizes=256-256-256-256-256-256-256-256@28x28x1@128",
        "transformer:layers=1@64@16",
        "transformer:layers=2@64@16",
        "transformer:layers=4@64@16",
    ),
    "full": (
        "resnet18@256x256x3@64@without=multi_loss",
        "resnet34@256x256x3@64@without=multi_loss",
        "resnet50@256x256x3@64@without=multi_loss",
        "resnet101@256x256x3@64@without=multi_loss",
        "vgg11@256x256x3@64@without=multi_loss",
        "vgg13@256x256x3@64@without=multi_loss",
        "vgg16@256x256x3@64@without=multi_loss",
        "vgg19@256x256x3@64@without=multi_loss",
        "mlp:hidden_sizes=1024-1024@28x28x1@128",
        "mlp:hidden_sizes=1024-1024-1024-1024@28x28x1@128",
        "mlp:hidden_sizes=1024-1024-1024-1024-1024-1024-1024-1024@28x28x1@128",
        "transformer:layers=1@512@32",
        "transformer:layers=2@512@32",
        "transformer:layers=4@512@32",
        "transformer:layers=8@512@32",
    ),
}


def get_config(scale: str = "small") -> ml_collections.ConfigDict:
    """Returns the config at a scale: tiny, small or full."""
    return benchmark_config.make(scale, CELLS, figure="depth", **benchmark_config.SWEEP)
