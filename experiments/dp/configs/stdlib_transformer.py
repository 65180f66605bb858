"""A private Transformer that tells packages of the standard library by their source."""

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
