"""Memory of a step, and the largest batch within a budget, by the compiler's account.

Nothing is run, so the budget can be that of another machine with the same kind of
device: --config.memory_budget_gb=16.
"""

import ml_collections

from experiments.dp import benchmark_config

CELLS = {
    "tiny": ("mlp@8x8x1@4",),
    "small": (
        "mlp@28x28x1@128",
        "cnn@28x28x1@128",
        "lstm@28x28x1@128",
        "transformer@512@16",
        "resnet18:width=16@32x32x3@16",
        "vgg11:width=16@32x32x3@16",
    ),
    "full": (
        "mlp@28x28x1@128",
        "cnn@28x28x1@128",
        "lstm@28x28x1@128",
        "transformer@512@128",
        "resnet18@256x256x3@128",
        "resnet50@256x256x3@128",
        "vgg16@256x256x3@128",
    ),
}


def get_config(scale: str = "small") -> ml_collections.ConfigDict:
    """Returns the config at a scale: tiny, small or full."""
    methods = ("auto", "reweight", "vmap", "multi_loss", "one_by_one_loop")
    return benchmark_config.make(scale, CELLS, figure="memory", methods=methods)
