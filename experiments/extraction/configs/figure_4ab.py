"""Figures 4a and 4b of Carlini et al. 2023 (arXiv 2202.07646): T5 fills blanks.

A window counts as memorised if the model fills all of its blanks exactly: 15 % of its
tokens, dropped one by one at random. Give T5 models of several sizes as --config.models
and as --config.windows an evaluation set of their corpus in their tokens (the paper: T5
v1.1 from 77M to 11B parameters, on C4). --config.masking=spans drops spans of three
tokens on average, as in T5's training.
"""

import ml_collections

from experiments.extraction import sweep_config


def get_config() -> ml_collections.ConfigDict:
    """Returns the config."""
    return sweep_config.make(batch_size=32, masking="iid")
