"""Figure 5 of Carlini et al. 2023 (arXiv 2202.07646) on a model of your own.

Windows of every length are prompted with their first tokens, as many as each of
--config.contexts says, and asked for the 50 after them. Give one model as
--config.models and an evaluation set of its corpus as --config.windows. One pass over a
window serves all contexts.
"""

import ml_collections

from experiments.extraction import sweep_config


def get_config() -> ml_collections.ConfigDict:
    """Returns the config."""
    return sweep_config.make(
        batch_size=32, contexts=(50, 100, 150, 200, 250, 300, 350, 400, 450)
    )
