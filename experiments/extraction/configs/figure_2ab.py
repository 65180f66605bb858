"""Figures 2a and 2b of Carlini et al. 2023 (arXiv 2202.07646): windows drawn at random.

Give models and baselines as for figure_1.py, and as --config.windows a set that was
made by build_dataset --sample=uniform. The paper takes lengths 100, 200, 500 and 1,000
and 100,000 windows of the Pile; each prompt is all but the last 50 tokens.
"""

import ml_collections

from experiments.extraction import sweep_config


def get_config() -> ml_collections.ConfigDict:
    """Returns the config."""
    return sweep_config.make(batch_size=32)
