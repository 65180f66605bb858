"""A GPT-NeoX on the sources of the standard library, the largest of four sizes.

With a vocabulary of 2,048 entries, as in launch/figure_1.sh, it has 2.6 M parameters.
1,000 steps visit that script's corpus 7.4 times.
"""

import ml_collections

from experiments.extraction import lm_config


def get_config() -> ml_collections.ConfigDict:
    """Returns the config."""
    return lm_config.make(
        corpus="stdlib",
        model="gpt_neox:layers=4:width=192:heads=6",
        sequence_length=256,
        batch_size=16,
        num_steps=1000,
        learning_rate=0.002,
        log_interval=20,
        checkpoint_interval=200,
    )
