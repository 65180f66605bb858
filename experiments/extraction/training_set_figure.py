"""Figure 4c of Carlini et al. 2023: models of one size, trained on different data.

Models are compared on the same windows, and repetitions are those in the corpus that
the evaluation set was taken from: the one before deduplication, if it is Figure 4c that
is to be made. The first of the models, in the sweep's order, is the one that the others
are compared with.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import matplotlib.figure
import polars as pl

from experiments.extraction import (
    bucket_fractions,
    panels,
    queries,
    tables,
    trends,
    two_proportions,
)
from experiments.extraction.report_figure import Choices, Figure, LeftOut
from experiments.extraction.sweep_runs import Model, SweepRuns

FEW_REPEATS = 35
"""Below it deduplicated data made a difference in the paper."""


@dataclasses.dataclass(frozen=True)
class TrainingSets:
    """What the figure shows.

    Attributes:
      fractions: As `bucket_fractions.table` has them, of these models.
      tests: As `compared` has them.
      windows: Number of different windows.
      clusters: Number of clusters in which they lie.
    """

    fractions: pl.DataFrame
    tests: pl.DataFrame
    windows: int
    clusters: int


def of_one_size(models: Sequence[Model]) -> list[Model]:
    """The models trained on the corpus that have as many parameters as another one.

    The most models of one size; of several such sizes the largest. Fewer than two are
    nothing to compare, so that the list is then empty.

    Example:
      >>> sizes = {"a": 7, "b": 3, "c": 7, "d": 3, "e": 1}
      >>> models = [Model(name, "", size, False) for name, size in sizes.items()]
      >>> [model.name for model in of_one_size(models)]
      ['a', 'c']
    """
    members = [model for model in models if not model.baseline]
    sizes = [model.params for model in members]
    most = max(sizes, key=lambda size: (sizes.count(size), size), default=0)
    same = [model for model in members if model.params == most]
    return same if len(same) > 1 else []


def compared(records: pl.DataFrame, models: Sequence[Model]) -> pl.DataFrame:
    """Whether the first model extracts more than each of the others.

    Args:
      records: With one row for each window and model.
      models: At least two, asked about the same windows.

    Returns:
      model, other, repetitions ("all", "below 35", "35 or more", or "bucket"), bucket
      (null but for buckets), count_low, count_high, and what `two_proportions.compare`
      finds: windows, clusters, differing_clusters, extracted, extracted_by_other,
      difference with its interval, and z and p of both tests.
    """
    first, *others = models
    places = ["window_id", "context"]
    ordered = {
        model.name: queries.models_with(records, [model.name]).sort(places)
        for model in models
    }
    rows = []
    for other in others:
        both = ordered[first.name].with_columns(
            extracted_by_other=ordered[other.name]["extracted"]
        )
        for label, bucket, part in _groups(both):
            found = two_proportions.compare(
                part["extracted"].to_numpy(),
                part["extracted_by_other"].to_numpy(),
                part["cluster"].to_numpy(),
            )
            rows.append(
                {
                    "model": first.name,
                    "other": other.name,
                    "repetitions": label,
                    "bucket": bucket,
                    "count_low": part["count"].min(),
                    "count_high": part["count"].max(),
                    "windows": found.windows,
                    "clusters": found.clusters,
                    "differing_clusters": found.differing_clusters,
                    "extracted": found.first,
                    "extracted_by_other": found.second,
                    "difference": found.difference,
                    "difference_lower": found.lower,
                    "difference_upper": found.upper,
                    "pooled_z": found.pooled_z,
                    "pooled_p": found.pooled_p,
                    "clustered_z": found.clustered_z,
                    "clustered_p": found.clustered_p,
                }
            )
    return pl.DataFrame(rows, schema_overrides={"bucket": pl.Int32()})


def _groups(rows: pl.DataFrame) -> Iterator[tuple[str, int | None, pl.DataFrame]]:
    """The windows that are compared together: what they are, and their rows."""
    few = pl.col("count") < FEW_REPEATS
    for label, part in (
        ("all", rows),
        (f"below {FEW_REPEATS}", rows.filter(few)),
        (f"{FEW_REPEATS} or more", rows.filter(~few)),
    ):
        if len(part):
            yield label, None, part
    for (bucket,), part in rows.sort("bucket").group_by("bucket", maintain_order=True):
        yield "bucket", bucket, part


def _measure(runs: SweepRuns, choices: Choices) -> TrainingSets | LeftOut | None:
    del choices
    models = of_one_size(runs.models)
    if not models:
        return None
    records = trends.protocol_records(runs)
    if records.is_empty():
        return LeftOut("no window was put to every model with all of its context")
    return TrainingSets(
        bucket_fractions.table(records, models),
        compared(records, models),
        records["window_id"].n_unique(),
        records["cluster"].n_unique(),
    )


def _caption(shown: TrainingSets, runs: SweepRuns) -> str:
    del runs
    first = shown.tests["model"][0]
    overall = shown.tests.filter(pl.col("repetitions").is_in(["all", _FEW]))
    findings = " ".join(_finding(row) for row in overall.iter_rows(named=True))
    return (
        "Fraction of windows that are extractable against how often they occur in the "
        "corpus that the evaluation set was taken from, for models of as many "
        f"parameters, all lengths pooled. {shown.windows:,} windows in "
        f"{shown.clusters:,} clusters, the same for every model. Bands are 95 % "
        f"intervals. The others are compared with `{first}`, the first of the sweep. "
        f"{findings} p is the probability that the clusters' differences add up to as "
        "much if each is as likely to be in favour of either model; where fewer than "
        "six clusters differ it is never below 0.05. Intervals are wide where few "
        "clusters differ, and may then hold 0 even if p is small. "
        "tables/figure_4c_tests.csv has each bucket, and also the two-proportion z "
        "test, for which windows are independent."
    )


_FEW = f"below {FEW_REPEATS}"


def _finding(row: dict[str, Any]) -> str:
    which = {"all": "All windows", _FEW: f"Fewer than {FEW_REPEATS} repetitions"}
    shares = [row[name] for name in ("extracted_by_other", "extracted")]
    points = [row[f"difference{end}"] for end in ("", "_lower", "_upper")]
    own, first = (f"{100 * share:.2f} %" for share in shares)
    difference, lower, upper = (f"{100 * share:+.2f}" for share in points)
    p = row["clustered_p"]
    return (
        f"{which[row['repetitions']]}: {first} against {own} by `{row['other']}`, "
        f"{difference} [{lower}, {upper}] points, p {tables.p_value(p)}."
    )


def _draw(shown: TrainingSets) -> matplotlib.figure.Figure:
    figure = panels.new_figure()
    about = [
        "models of one size, all lengths pooled",
        f"{shown.windows:,} windows in {shown.clusters:,} clusters; 95 % intervals",
    ]
    ax = panels.panel(figure, "Extractable fraction by training set", about)
    lines = shown.fractions.partition_by("model", maintain_order=True)
    colors = panels.shades(len(lines))[::-1]
    for i, (line, color) in enumerate(zip(lines, colors, strict=True)):
        x = line["repetitions"]
        ax.fill_between(
            x,
            line["extracted_lower"],
            line["extracted_upper"],
            color=color,
            alpha=0.18,
            linewidth=0,
        )
        style = panels.line_style(color, panels.marker(i))
        ax.plot(x, line["extracted"], **style, label=line["model"][0])
    panels.log_axis(ax, shown.fractions["repetitions"].to_list(), _AXIS)
    panels.legend(figure, ax)
    return figure


_AXIS = "occurrences in the original corpus"

FIGURE_4C = Figure(
    name="figure_4c",
    title="Figure 4c: training data",
    measure=_measure,
    caption=_caption,
    draw=_draw,
    table=lambda shown: shown.fractions,
    further_tables={"tests": lambda shown: shown.tests},
)
