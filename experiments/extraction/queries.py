"""What each figure takes from the records of a sweep: queries, and no statistics.

A record is at *full context* when its prompt is all of its window but the suffix, as in
Carlini et al. 2023 (arXiv 2202.07646), where a window of length l is prompted by its
first l - 50 tokens. Figures 1a, 1b and 1c are about these records alone.
"""

from collections.abc import Sequence

import polars as pl

# In float32 the logits of one window differ by less than this from one batch shape to
# another; a margin below it may change its sign, and with it the verdict.
NEAR_TIE = 1e-3


def at_full_context(records: pl.DataFrame, suffix_length: int | None) -> pl.DataFrame:
    """The records whose prompt and suffix make up the whole window.

    Where blanks are filled in (`suffix_length` is None), all of a window is seen or
    asked for, and every record is one.

    Example:
      >>> records = pl.DataFrame({"length": [100, 100], "context": [20, 50]})
      >>> at_full_context(records, suffix_length=50)["context"].to_list()
      [50]
    """
    if suffix_length is None:
        return records
    return records.filter(pl.col("context") + suffix_length == pl.col("length"))


def shared_by_models(records: pl.DataFrame, num_models: int) -> pl.DataFrame:
    """The records of the windows and contexts that every model was asked about.

    Models are compared on the same windows: another run may have taken more windows for
    its models, or longer ones.

    Example:
      >>> records = pl.DataFrame(
      ...     {"model": ["a", "a", "b"], "window_id": [1, 2, 2], "context": [50] * 3})
      >>> shared_by_models(records, num_models=2)["window_id"].to_list()
      [2, 2]
    """
    return records.filter(pl.len().over("window_id", "context") == num_models)


def windows_per_bucket(records: pl.DataFrame) -> pl.DataFrame:
    """Number of different windows in each length and bucket.

    Returns:
      length, bucket, windows; in ascending order.
    """
    return (
        records.group_by("length", "bucket")
        .agg(windows=pl.col("window_id").n_unique())
        .sort("length", "bucket")
    )


def buckets(records: pl.DataFrame) -> pl.DataFrame:
    """The range of counts in each bucket, and the place of its middle.

    Returns:
      bucket, count_low, count_high (both included), repetitions (geometric mean of the
      windows' counts, the middle on a logarithmic axis); in ascending order.

    Example:
      >>> records = pl.DataFrame({"window_id": [1, 2], "bucket": 0, "count": [2, 8]})
      >>> buckets(records).rows()
      [(0, 2, 8, 4.0)]
    """
    middle = 2 ** pl.col("count").log(2).mean()
    return (
        records.unique("window_id")
        .group_by("bucket")
        .agg(
            count_low=pl.col("count").min(),
            count_high=pl.col("count").max(),
            # Rounding shall not take the middle of a single count beside it.
            repetitions=middle.clip(pl.col("count").min(), pl.col("count").max()),
        )
        .sort("bucket")
    )


def fullest_bucket(records: pl.DataFrame) -> int:
    """The bucket with most windows at every length, at least one record.

    That is the one whose least number of windows over the lengths is largest; among
    equals the one with more windows in all, and then the one with more repetitions.
    """
    num_lengths = records["length"].n_unique()
    windows = pl.col("windows")
    ranked = (
        windows_per_bucket(records)
        .group_by("bucket")
        .agg(
            least=pl.when(pl.len() == num_lengths).then(windows.min()).otherwise(0),
            total=windows.sum(),
        )
        .sort("least", "total", "bucket")
    )
    return int(ranked["bucket"][-1])


def verdicts_per_model(records: pl.DataFrame) -> pl.DataFrame:
    """How many records each model has, and how many of them are close calls.

    Returns:
      model, records, extracted, ties, near_ties; the last two are null where the sweep
      took verdicts only. A near-tie is a margin within `NEAR_TIE` of 0, ties included.
    """
    near = pl.col("min_margin").abs() < NEAR_TIE
    return records.group_by("model", maintain_order=True).agg(
        records=pl.len(),
        extracted=pl.col("extracted").sum(),
        ties=_sum_or_null(pl.col("tie")),
        near_ties=_sum_or_null(near),
    )


def models_with(records: pl.DataFrame, names: Sequence[str]) -> pl.DataFrame:
    """The records of the named models."""
    return records.filter(pl.col("model").is_in(list(names)))


def _sum_or_null(values: pl.Expr) -> pl.Expr:
    """The sum, which is unknown if any value is."""
    return pl.when(values.is_null().any()).then(None).otherwise(values.sum())
