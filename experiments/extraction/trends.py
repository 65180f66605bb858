"""The points, intervals and fits of each figure, from the records of a sweep."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import polars as pl

from experiments.extraction import cluster_statistics, estimates, queries
from experiments.extraction.cluster_statistics import ClusterTotals, LogLinearFit, NoFit
from experiments.extraction.estimates import Estimate
from experiments.extraction.sweep_runs import Model, SweepRuns


@dataclasses.dataclass(frozen=True)
class Point:
    """One point of a figure.

    Attributes:
      x: Number of parameters, repetitions, or tokens of context.
      label: The model.
      extracted: Fraction of windows that are extractable.
      windows: Number of windows behind it.
      clusters: Number of clusters in which they lie.
      tokens_correct: Share of the suffix's tokens that are predicted, where it is known
        and shown.
    """

    x: float
    label: str
    extracted: Estimate
    windows: int
    clusters: int
    tokens_correct: Estimate | None = None


@dataclasses.dataclass(frozen=True)
class Series:
    """Points that belong together; `fit` is None where no trend is asked for."""

    name: str
    baseline: bool
    points: tuple[Point, ...]
    fit: LogLinearFit | NoFit | None
    params: int | None = None


@dataclasses.dataclass(frozen=True)
class Trend:
    """What one figure shows.

    Attributes:
      about: Which windows these are, for a caption.
      series: The one that the figure is about first; empty if no window fits.
      windows: Number of different windows in the figure.
      clusters: Number of clusters in which they lie.
      lengths: Lengths of these windows.
      contexts: Lengths of their prompts.
      buckets: As `queries.buckets` has them, for these windows.
    """

    about: str
    series: tuple[Series, ...]
    windows: int
    clusters: int
    lengths: tuple[int, ...]
    contexts: tuple[int, ...]
    buckets: pl.DataFrame

    @property
    def sample(self) -> str:
        """How many windows, in words."""
        return f"{self.windows:,} windows in {self.clusters:,} clusters"


def protocol_records(runs: SweepRuns) -> pl.DataFrame:
    """What Figures 1a, 1b and 1c are about: full context, windows of every model."""
    full = queries.at_full_context(runs.records, runs.suffix_length)
    return queries.shared_by_models(full, len(runs.models))


def by_parameters(runs: SweepRuns, seed: int) -> Trend:
    """Figure 1a: the fraction against parameters, for members and for baselines.

    A model's fraction is the mean over lengths of the fraction at each length, as in
    section 3.2 of Carlini et al. 2023. A resample draws the same clusters for all
    models of a series, which were asked about the same windows.
    """
    records = protocol_records(runs)
    series = []
    for name, baseline in (("trained on the corpus", False), ("baseline", True)):
        models = [m for m in _by_size(runs.models) if m.baseline == baseline]
        if models and len(records):
            series.append(_sizes(records, name, models, seed))
    return _trend(records, series, f"mean over {_lengths(records)}")


def by_repetitions(runs: SweepRuns, seed: int) -> Trend:
    """Figure 1b: the fraction against repetitions, all lengths pooled, for each model.

    A bucket stands at the geometric mean of its windows' counts.
    """
    records = protocol_records(runs)
    places = queries.buckets(records)
    series = [
        _line(records, model, "bucket", places["repetitions"].to_numpy(), seed)
        for model in largest_first(runs.models)
        if len(records)
    ]
    return _trend(records, series, f"{_lengths(records)} pooled")


def by_context(runs: SweepRuns, seed: int) -> Trend:
    """Figure 1c: the fraction against context, all buckets pooled.

    For each model that has seen the corpus, and the largest baseline. An empty prompt
    has no place on a logarithmic axis and is left out.
    """
    records = protocol_records(runs).filter(pl.col("context") > 0)
    contexts = records["context"].unique().sort().to_numpy()
    series = [
        _line(records, model, "context", contexts, seed)
        for model in members_and_a_baseline(runs.models)
        if len(records)
    ]
    about = "all numbers of occurrences pooled"
    return _trend(records, series, about)


def by_length(runs: SweepRuns, seed: int) -> Trend:
    """Figure 2b: the fraction against the length of windows, as in `by_context`.

    An empty prompt is one of the windows as long as the suffix.
    """
    records = protocol_records(runs)
    lengths = records["length"].unique().sort().to_numpy()
    series = [
        _line(records, model, "length", lengths, seed)
        for model in members_and_a_baseline(runs.models)
        if len(records)
    ]
    return _trend(records, series, "full context")


def by_length_and_context(runs: SweepRuns, bucket: int | None) -> Trend:
    """Figure 5: a line for each length against context, in one bucket.

    For the largest model that has seen the corpus (the largest of all if none has). An
    empty prompt is left out, as in `by_context`.

    Args:
      runs: The sweeps.
      bucket: Which bucket; None takes the fullest one.
    """
    model = largest_first(runs.models)[0]
    records = queries.models_with(runs.records, [model.name])
    records = records.filter(pl.col("context") > 0)
    if len(records):
        chosen = queries.fullest_bucket(records) if bucket is None else bucket
        records = records.filter(pl.col("bucket") == chosen)
    series = []
    for (length,), rows in records.sort("length").group_by(
        "length", maintain_order=True
    ):
        contexts = rows["context"].unique().sort().to_numpy()
        totals = estimates.totals_by(rows, "context", rows["extracted"].to_numpy())
        correct = _tokens_correct(rows, "context")
        points = _points(model, contexts, totals, correct)
        series.append(Series(f"{length}", model.baseline, points, None, model.params))
    return _trend(records, series, f"{model.name}, {_occurrences(records)}")


def _by_size(models: Sequence[Model]) -> list[Model]:
    return sorted(models, key=lambda model: model.params)


def largest_first(models: Sequence[Model]) -> list[Model]:
    """By size, the models that have seen the corpus before the baselines."""
    return sorted(models, key=lambda model: (model.baseline, -model.params))


def members_and_a_baseline(models: Sequence[Model]) -> list[Model]:
    """The models that have seen the corpus, and the largest that has not, by size."""
    ordered = largest_first(models)
    baselines = [model for model in ordered if model.baseline]
    return [model for model in ordered if not model.baseline] + baselines[:1]


def _sizes(
    records: pl.DataFrame, name: str, models: Sequence[Model], seed: int
) -> Series:
    """One point for each model: the mean over lengths."""
    records = queries.models_with(records, [model.name for model in models])
    lengths = records["length"].unique().sort()
    order = {model.name: i for i, model in enumerate(models)}
    models_N = records["model"].replace_strict(order, return_dtype=pl.Int64).to_numpy()
    lengths_N = np.searchsorted(lengths.to_numpy(), records["length"].to_numpy())
    totals = cluster_statistics.cluster_totals(
        records["extracted"].to_numpy(),
        records["cluster"].to_numpy(),
        models_N * len(lengths) + lengths_N,
        len(models) * len(lengths),
    )
    mix_GxK = np.kron(np.eye(len(models)), np.full((len(lengths), 1), 1 / len(lengths)))
    params_K = np.array([model.params for model in models], np.float64)
    fractions = estimates.of(cluster_statistics.intervals(totals, mix_GxK))
    windows, clusters = (records[c].n_unique() for c in ("window_id", "cluster"))
    points = tuple(
        Point(model.params, model.name, estimate, windows, clusters)
        for model, estimate in zip(models, fractions, strict=True)
    )
    fit = cluster_statistics.log_linear_fit(params_K, totals, mix_GxK, seed=seed)
    return Series(name, models[0].baseline, points, fit)


def _line(
    records: pl.DataFrame, model: Model, column: str, x_G: np.ndarray, seed: int
) -> Series:
    """One point for each value of `column`, which stand at `x_G`, in order."""
    rows = queries.models_with(records, [model.name])
    totals = estimates.totals_by(rows, column, rows["extracted"].to_numpy())
    points = _points(model, x_G, totals)
    fit = cluster_statistics.log_linear_fit(x_G, totals, seed=seed)
    return Series(model.name, model.baseline, points, fit, model.params)


def _points(
    model: Model,
    x_G: np.ndarray,
    totals: ClusterTotals,
    tokens_correct: Sequence[Estimate | None] | None = None,
) -> tuple[Point, ...]:
    extracted = estimates.of(cluster_statistics.intervals(totals))
    correct = tokens_correct or [None] * len(extracted)
    sizes = zip(totals.num_windows_G, totals.num_clusters_G, strict=True)
    return tuple(
        Point(float(x), model.name, estimate, int(windows), int(clusters), share)
        for x, estimate, (windows, clusters), share in zip(
            x_G, extracted, sizes, correct, strict=True
        )
    )


def _tokens_correct(rows: pl.DataFrame, column: str) -> list[Estimate] | None:
    """The share of the suffix that is right, which a sweep of verdicts only lacks."""
    if rows["tokens_correct"].has_nulls():
        return None
    shares = (rows["tokens_correct"] / rows["num_targets"]).to_numpy()
    return estimates.means_by(rows, column, shares)


def _lengths(records: pl.DataFrame) -> str:
    lengths = records["length"].unique().sort()
    if len(lengths) == 1:
        return f"length {lengths[0]}"
    return f"{len(lengths)} lengths"


def _occurrences(records: pl.DataFrame) -> str:
    counts = records["count"].unique().sort().to_list()
    if len(counts) <= 1:
        return f"{sum(counts):,} occurrences"
    return f"{counts[0]:,} to {counts[-1]:,} occurrences"


def _trend(records: pl.DataFrame, series: Sequence[Series], about: str) -> Trend:
    return Trend(
        about=about,
        series=tuple(series),
        windows=records["window_id"].n_unique(),
        clusters=records["cluster"].n_unique(),
        lengths=tuple(records["length"].unique().sort()),
        contexts=tuple(records["context"].unique().sort()),
        buckets=queries.buckets(records),
    )
