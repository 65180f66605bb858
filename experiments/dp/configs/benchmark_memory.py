"""Memory of a step, and the largest batch within a budget, by the compiler's account.

The Transformer of six layers is there twice: with its layers one after another, and
with remat of each layer in a scan.

Nothing is run, so the budget can be that of another machine with the same kind of
device: --config.memory_budget_gb=16.
"""

import ml_collections

from experiments.dp import benchmark_config

CELLS = {
    "tiny": ("mlp@8x8x1@4",),
    "small": (
        # What takes long to compile leaves out what says least: bookkeeping where auto
        # is the same, jax_privacy beside vmap, reweighting without remat, and quarters
        # where activations take the smaller part.
        "cnn@28x28x1@128@without=bookkeeping+jax_privacy+reweight_quarters",
        "lstm@28x28x1@128@without=bookkeeping+jax_privacy+reweight_quarters",
        "transformer:layers=6@128@16"
        "@without=bookkeeping+jax_privacy+vmap+reweight+reweight_quarters",
        "transformer:layers=6:scan=true:remat=true@128@16@without=jax_privacy",
        "resnet18:width=16@32x32x3@32"
        "@without=bookkeeping+jax_privacy+reweight+reweight_quarters",
        "vgg11:width=16@32x32x3@16"
        "@without=bookkeeping+reweight+bookkeeping_quarters+reweight_quarters",
    ),
    "full": (
        "mlp@28x28x1@128",
        "cnn@28x28x1@128",
        "lstm@28x28x1@128",
        "transformer:layers=6@512@128",
        "transformer:layers=6:scan=true:remat=true@512@128",
        "resnet18@256x256x3@128",
        "resnet50@256x256x3@128",
        "vgg16@256x256x3@128",
    ),
}


def get_config(scale: str = "small") -> ml_collections.ConfigDict:
    """Returns the config at a scale: tiny, small or full."""
    methods = (
        "auto",
        "bookkeeping",
        "reweight",
        "bookkeeping_quarters",
        "reweight_quarters",
        "vmap",
        "jax_privacy",
    )
    return benchmark_config.make(scale, CELLS, figure="memory", methods=methods)
