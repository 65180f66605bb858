"""A private LSTM on scikit-learn's digits, whose rows are the time steps."""

import ml_collections

from experiments.dp import train_config


def get_config() -> ml_collections.ConfigDict:
    """Returns the config."""
    return train_config.make(
        dataset="digits",
        model="lstm",
        epsilon=3.0,
        delta=1e-4,
        l2_clip_norm=1.0,
        batch_size=512,
        num_steps=150,
        optimizer="adam",
        learning_rate=0.02,
        log_interval=10,
        checkpoint_interval=50,
    )
