"""Figure 3 of Carlini et al. 2023 (arXiv 2202.07646): examples as text.

Prompt, truth and what each model makes of the prompt, with matching tokens green: the
selection "memorised only by the largest model" of report.html. Give models of several
sizes and an evaluation set of their corpus; with --config.corpus=tokens:DIR the
selection takes the paper's stricter rule, that what the other models say occurs nowhere
in the corpus.
"""

import ml_collections

from experiments.extraction import sweep_config


def get_config() -> ml_collections.ConfigDict:
    """Returns the config."""
    return sweep_config.make(batch_size=32, decode=True)
