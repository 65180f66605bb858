"""A GPT-NeoX of 1.1 M parameters on the standard library, small among four sizes."""

import ml_collections

from experiments.extraction import lm_config


def get_config() -> ml_collections.ConfigDict:
    """Returns the config."""
    return lm_config.make(
        corpus="stdlib",
        tokenizer="bpe:2048",
        model="gpt_neox:layers=3:width=128:heads=4",
        sequence_length=256,
        batch_size=16,
        num_steps=4000,
        learning_rate=0.002,
        log_interval=20,
        checkpoint_interval=200,
    )
