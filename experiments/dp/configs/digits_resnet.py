"""A private residual network on scikit-learn's digits: a ResNet-18 cut to their size.

Two stages of one block, a quarter of the width, and a stem that keeps all 8x8 pixels.
"""

import ml_collections

from experiments.dp import train_config


def get_config() -> ml_collections.ConfigDict:
    """Returns the config."""
    return train_config.make(
        dataset="digits",
        model="resnet18:blocks=1-1:width=16:stem=small",
        epsilon=3.0,
        delta=1e-4,
        l2_clip_norm=1.0,
        batch_size=512,
        num_steps=60,
        learning_rate=1.0,
        momentum=0.9,
        log_interval=5,
        checkpoint_interval=20,
    )
