"""A GPT-NeoX of 5.8 M parameters on the standard library, large among four sizes."""

import ml_collections

from experiments.extraction import lm_config


def get_config() -> ml_collections.ConfigDict:
    """Returns the config."""
    return lm_config.make(
        corpus="stdlib",
        tokenizer="bpe:2048",
        model="gpt_neox:layers=6:width=256:heads=8",
        sequence_length=256,
        batch_size=16,
        num_steps=4000,
        learning_rate=0.001,
        log_interval=20,
        checkpoint_interval=200,
    )
