"""A private VGG on scikit-learn's digits: a VGG-11 cut to their size.

Two stages of one convolution, a sixteenth of the width: 256 units per dense layer.
"""

import ml_collections

from experiments.dp import train_config


def get_config() -> ml_collections.ConfigDict:
    """Returns the config."""
    return train_config.make(
        dataset="digits",
        model="vgg11:blocks=1-1:width=4",
        epsilon=3.0,
        delta=1e-4,
        l2_clip_norm=1.0,
        batch_size=512,
        num_steps=60,
        learning_rate=0.25,
        momentum=0.9,
        log_interval=5,
        checkpoint_interval=20,
    )
