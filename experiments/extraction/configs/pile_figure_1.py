"""Figure 1 of Carlini et al. 2023 (arXiv 2202.07646): GPT-Neo and GPT-J on the Pile.

The GPT-2 models, which have not seen the Pile, are the baseline. Needed are the models
as safetensors folders (EleutherAI/gpt-neo-125m, EleutherAI/gpt-neo-1.3B,
EleutherAI/gpt-neo-2.7B, EleutherAI/gpt-j-6b; openai-community/gpt2, gpt2-medium,
gpt2-large and gpt2-xl), and an evaluation set of the Pile in GPT-2's tokens: lengths
50, 100, ..., 500 with 1,000 windows per bucket. Give other places as --config.models,
--config.baselines and --config.windows.

In float32 the 6B model takes 24 GB.
"""

import ml_collections

from experiments.extraction import sweep_config


def get_config() -> ml_collections.ConfigDict:
    """Returns the config."""
    return sweep_config.make(
        models=(
            "checkpoints/gpt-neo-125m",
            "checkpoints/gpt-neo-1.3B",
            "checkpoints/gpt-neo-2.7B",
            "checkpoints/gpt-j-6b",
        ),
        baselines=(
            "checkpoints/gpt2",
            "checkpoints/gpt2-medium",
            "checkpoints/gpt2-large",
            "checkpoints/gpt2-xl",
        ),
        windows="datasets/pile",
        batch_size=64,
    )
