"""A private Transformer that tells packages of the standard library by their source.

Measured with --config.seed=1 on the library of Python 3.11.7, files held out: test
accuracy 53.1 % at epsilon 3.00, delta 1e-5; 67.4 % after 180 steps with the same
clipping and no noise. The ten classes hold 6 to 15 % of the training windows.
"""

import ml_collections

from experiments.dp import train_config


def get_config() -> ml_collections.ConfigDict:
    """Returns the config."""
    return train_config.make(
        dataset="stdlib",
        sequence_length=64,
        model="transformer:width=64:heads=4",
        epsilon=3.0,
        delta=1e-5,
        l2_clip_norm=1.0,
        batch_size=512,
        num_steps=250,
        optimizer="adam",
        learning_rate=0.006,
        log_interval=10,
        checkpoint_interval=50,
    )
