"""The fraction of windows that each model extracts in each bucket of repetitions."""

from collections.abc import Sequence

import polars as pl

from experiments.extraction import estimates, queries
from experiments.extraction.sweep_runs import Model


def table(records: pl.DataFrame, models: Sequence[Model]) -> pl.DataFrame:
    """One row for each model and bucket.

    Args:
      records: With one row for each window and model.
      models: Some of the models, each of which has a record.

    Returns:
      model, baseline, params, bucket, count_low, count_high, repetitions (see
      `queries.buckets`), extracted, extracted_lower, extracted_upper, windows,
      clusters; in the order of `models`, and of buckets.
    """
    buckets = queries.buckets(records).to_dicts()
    rows = []
    for model in models:
        own = queries.models_with(records, [model.name]).sort("bucket")
        parts = own.partition_by("bucket", maintain_order=True)
        known = [b for b in buckets if b["bucket"] in set(own["bucket"])]
        fractions = estimates.means_by(own, "bucket", own["extracted"].to_numpy())
        rows += [
            {
                "model": model.name,
                "baseline": model.baseline,
                "params": model.params,
                **bucket,
                "extracted": fraction.value,
                "extracted_lower": fraction.lower,
                "extracted_upper": fraction.upper,
                "windows": len(part),
                "clusters": part["cluster"].n_unique(),
            }
            for bucket, part, fraction in zip(known, parts, fractions, strict=True)
        ]
    return pl.DataFrame(rows)
