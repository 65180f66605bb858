"""Figure 1 of Carlini et al. 2023 (arXiv 2202.07646) on models of your own.

Each window's prompt is all of it but the last 50 tokens. Give the folders of models of
several sizes as --config.models, of models that never saw the corpus as
--config.baselines, and an evaluation set of the corpus as --config.windows.
"""

import ml_collections

from experiments.extraction import sweep_config


def get_config() -> ml_collections.ConfigDict:
    """Returns the config."""
    return sweep_config.make(batch_size=32)
