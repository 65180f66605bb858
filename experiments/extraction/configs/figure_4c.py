"""Figure 4c of Carlini et al. 2023 (arXiv 2202.07646): deduplicated training data.

Give models of one size as --config.models: first the one that was trained on the corpus
as it is, then those trained on what deduplicate left of it, by near-duplicate documents
and by repeated substrings. The evaluation set is that of the original corpus, so the
repetitions are those before deduplication.
"""

import ml_collections

from experiments.extraction import sweep_config


def get_config() -> ml_collections.ConfigDict:
    """Returns the config."""
    return sweep_config.make(batch_size=32)
