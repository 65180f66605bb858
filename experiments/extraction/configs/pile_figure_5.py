"""Figure 5 of Carlini et al. 2023 (arXiv 2202.07646): GPT-J on the Pile.

Windows of every length are prompted with their first 50, 100, ... tokens and asked for
the 50 after them. Needed are EleutherAI/gpt-j-6b as a safetensors folder and an
evaluation set of the Pile in GPT-2's tokens, of lengths up to 500. Give other places as
--config.models and --config.windows.

One pass of the model over a window serves all of its contexts.
"""

import ml_collections

from experiments.extraction import sweep_config


def get_config() -> ml_collections.ConfigDict:
    """Returns the config."""
    return sweep_config.make(
        models=("checkpoints/gpt-j-6b",),
        windows="datasets/pile",
        contexts=tuple(range(50, 500, 50)),
        batch_size=32,
    )
