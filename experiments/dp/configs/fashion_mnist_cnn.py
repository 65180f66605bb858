"""A private tanh CNN on Fashion-MNIST at epsilon 2.7.

The files are those of Debian's package dataset-fashion-mnist. The architecture and the
privacy budget are those of Papernot et al. 2021 (arXiv 2007.14191), who report 86.1 %.
Measured here with --config.seed=0: test accuracy 86.41 % at epsilon 2.70.
"""

import ml_collections

from experiments.dp import train_config


def get_config() -> ml_collections.ConfigDict:
    """Returns the config."""
    return train_config.make(
        dataset="idx:/usr/share/datasets/fashion-mnist",
        model="tempered_cnn",
        epsilon=2.7,
        delta=1e-5,
        l2_clip_norm=0.1,
        batch_size=2048,
        num_steps=1170,
        learning_rate=4.0,
        momentum=0.9,
        log_interval=39,
        checkpoint_interval=78,
    )
