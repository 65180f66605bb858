"""Every method in seconds: too small to say which is fast, enough to see them run."""

import ml_collections

from experiments.dp import benchmark_config


def get_config() -> ml_collections.ConfigDict:
    """Returns the config."""
    return benchmark_config.make(
        models=("mlp",),
        batch_sizes=(4,),
        image_shape=(8, 8, 1),
        repetitions=2,
        slow_repetitions=1,
        compile_repetitions=1,
        round_seconds=0.001,
    )
