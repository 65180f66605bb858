"""Table 1 of Carlini et al. 2023 (arXiv 2202.07646): what only some models memorise.

Give models of several sizes as --config.models and an evaluation set of their corpus as
--config.windows. The paper's table is about windows of one length; report takes that
with most windows, or --table_1_length. Which text only one model memorises by the
stricter rule, that the others' output occurs nowhere in the corpus, takes
--config.decode=True and --config.corpus=tokens:DIR as well.
"""

import ml_collections

from experiments.extraction import sweep_config


def get_config() -> ml_collections.ConfigDict:
    """Returns the config."""
    return sweep_config.make(batch_size=32)
