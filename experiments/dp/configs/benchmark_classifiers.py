"""Time per step of the classifiers of Lee & Kifer 2021, on the shapes of their data.

28x28x1 is MNIST and Fashion-MNIST, 32x32x3 CIFAR-10, 512 tokens IMDB, 256x256x3 LSUN.
On two cores ResNet and VGG are narrower, their images smaller and their batches too.
"""

import ml_collections

from experiments.dp import benchmark_config

# Of what the second shape of a model is compared with, to save time on two cores.
_FEWER = "@without=noise_only+bookkeeping+vmap+multi_loss+one_by_one_scan"

CELLS = {
    "tiny": ("mlp@8x8x1@4",),
    "small": (
        "mlp@28x28x1@128",
        f"mlp@32x32x3@128{_FEWER}",
        "cnn@28x28x1@128",
        f"cnn@32x32x3@128{_FEWER}",
        "rnn@28x28x1@128",
        f"rnn@32x32x3@128{_FEWER}",
        "lstm@28x28x1@128",
        f"lstm@32x32x3@128{_FEWER}",
        "transformer@64@32",
        "resnet18:width=16@32x32x3@16",
        "vgg11:width=16@32x32x3@8",
    ),
    "full": (
        "mlp@28x28x1@128",
        "mlp@32x32x3@128",
        "cnn@28x28x1@128",
        "cnn@32x32x3@128",
        "rnn@28x28x1@128",
        "rnn@32x32x3@128",
        "lstm@28x28x1@128",
        "lstm@32x32x3@128",
        "transformer@512@128@without=multi_loss",
        "resnet18@256x256x3@128@without=multi_loss",
        "resnet50@256x256x3@128@without=multi_loss",
        "vgg11@256x256x3@128@without=multi_loss",
        "vgg16@256x256x3@128@without=multi_loss",
    ),
}


def get_config(scale: str = "small") -> ml_collections.ConfigDict:
    """Returns the config at a scale: tiny, small or full."""
    # How long compiling takes has a config of its own.
    return benchmark_config.make(
        scale, CELLS, repetitions=21, slow_repetitions=3, compile_repetitions=1
    )
