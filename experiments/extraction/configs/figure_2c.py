"""Figure 2c of Carlini et al. 2023 (arXiv 2202.07646): beams, and matches anywhere.

Of every prompt the most likely continuation that 100 beams find is compared with that
of greedy decoding (left), and it is looked up whether what greedy decoding gives occurs
anywhere in the corpus (right). Give one model as --config.models, an evaluation set of
its corpus as --config.windows, and the corpus as --config.corpus=tokens:DIR. A search
with 100 beams takes some twenty times as long as greedy decoding:
--config.windows_per_bucket takes fewer windows.
"""

import ml_collections

from experiments.extraction import sweep_config


def get_config() -> ml_collections.ConfigDict:
    """Returns the config."""
    return sweep_config.make(batch_size=32, decode=True, beams=100)
