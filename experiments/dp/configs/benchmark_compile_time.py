"""Time to trace and compile a step of each of the classifiers of Lee & Kifer 2021."""

import ml_collections

from experiments.dp import benchmark_config

CELLS = {
    "tiny": ("mlp@8x8x1@4",),
    "small": (
        "mlp@28x28x1@128",
        "cnn@28x28x1@128",
        "rnn@28x28x1@128",
        "lstm@28x28x1@128",
        "transformer@64@32",
        "resnet18:width=16@32x32x3@16",
        "vgg11:width=16@32x32x3@16",
    ),
    "full": (
        "mlp@28x28x1@128",
        "cnn@28x28x1@128",
        "rnn@28x28x1@128",
        "lstm@28x28x1@128",
        "transformer@512@128",
        "resnet18@256x256x3@128",
        "resnet50@256x256x3@128",
        "vgg16@256x256x3@128",
    ),
}


def get_config(scale: str = "small") -> ml_collections.ConfigDict:
    """Returns the config at a scale: tiny, small or full."""
    # Bookkeeping is what auto chooses for all of them.
    methods = (
        "auto",
        "reweight",
        "vmap",
        "jax_privacy",
        "multi_loss",
        "one_by_one_loop",
    )
    return benchmark_config.make(
        scale, CELLS, figure="compile_time", methods=methods, compile_repetitions=2
    )
