"""The MLP and the CNN of Lee & Kifer 2021 on 28x28 images, batch 128."""

import ml_collections

from experiments.dp import benchmark_config


def get_config() -> ml_collections.ConfigDict:
    """Returns the config."""
    return benchmark_config.make(models=("mlp", "cnn"), batch_sizes=(128,))
