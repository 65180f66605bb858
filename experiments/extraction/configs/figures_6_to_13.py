"""Figures 6 to 13 of Carlini et al. 2023 (arXiv 2202.07646): selected examples.

Windows that all models memorised (Figure 6), only the largest (7 to 9), only the
smallest (10), with few repetitions (11), not in spite of thousands (12), and those that
a baseline continues too (13) are selections of report.html. Give models of several
sizes, baselines, and an evaluation set of the corpus; --config.corpus=tokens:DIR for
the paper's stricter rule of "only".
"""

import ml_collections

from experiments.extraction import sweep_config


def get_config() -> ml_collections.ConfigDict:
    """Returns the config."""
    return sweep_config.make(batch_size=32, decode=True)
