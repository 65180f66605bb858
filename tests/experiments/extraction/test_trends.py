import dataclasses
import statistics

import numpy as np
import polars as pl
import pytest

from experiments.extraction import sweep_runs, trends
from experiments.extraction.cluster_statistics import LogLinearFit, NoFit
from tests.experiments.extraction import fake_sweeps

MEMBERS = {"small": 100_000, "large": 5_000_000, "medium": 800_000}
BASELINES = {"other": 100_000, "another": 5_000_000}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    windows = fake_sweeps.make_windows((100, 150, 200), (0, 4, 8, 12), per_bucket=25)
    # Lengths of different difficulty and size: the mean over lengths is its own.
    kept = (windows.length != 150) | (windows.window_id % 3 == 0)
    windows = fake_sweeps.Windows(
        *(getattr(windows, field.name)[kept] for field in dataclasses.fields(windows))
    )
    folder = tmp_path_factory.mktemp("sweeps") / "sweep"
    contexts = (20, 50, 100, 150)
    fake_sweeps.write(folder, windows, MEMBERS, BASELINES, contexts)
    return sweep_runs.load([folder])


def fractions(runs, key, *, full_context=True, measure="extracted"):
    """The fractions by `key(row)`, counted by hand."""
    outcomes = {}
    for row in runs.records.to_dicts():
        if not full_context or row["context"] == row["length"] - 50:
            outcomes.setdefault(key(row), []).append(row[measure])
    return {k: statistics.fmean(values) for k, values in outcomes.items()}


def windows_of(runs, key):
    ids = {}
    for row in runs.records.to_dicts():
        if row["context"] == row["length"] - 50:
            ids.setdefault(key(row), set()).add(row["window_id"])
    return {k: len(values) for k, values in ids.items()}


def test_by_parameters_takes_the_mean_over_lengths(runs):
    trend = trends.by_parameters(runs, seed=0)
    members, baselines = trend.series
    assert (members.baseline, baselines.baseline) == (False, True)
    assert [p.label for p in members.points] == ["small", "medium", "large"]
    assert [p.x for p in baselines.points] == [100_000, 5_000_000]
    by_length = fractions(runs, lambda row: (row["model"], row["length"]))
    pooled = fractions(runs, lambda row: row["model"])
    for point in (*members.points, *baselines.points):
        expected = statistics.fmean(
            by_length[point.label, length] for length in (100, 150, 200)
        )
        assert point.extracted.value == pytest.approx(expected, abs=1e-12)
        assert point.extracted.lower <= expected < point.extracted.upper
        assert point.windows == trend.windows == 233
    # The weights of windows do matter in this data.
    large = members.points[-1]
    assert abs(large.extracted.value - pooled["large"]) > 0.003


def test_by_parameters_fits_a_line_through_the_models_of_a_kind(runs):
    members, baselines = trends.by_parameters(runs, seed=0).series
    x, y = zip(*((p.x, p.extracted.value) for p in members.points), strict=True)
    slope, _ = np.polyfit(np.log10(x), y, 1)
    assert members.fit.slope == pytest.approx(slope)
    lower, upper = members.fit.slope_interval
    assert lower < slope < upper
    assert baselines.fit.num_points == 2


def test_windows_shared_by_models_are_resampled_together(runs):
    """The slope is far better known than from models asked about separate windows."""
    members = trends.by_parameters(runs, seed=0).series[0]
    small, _, large = (p.extracted for p in members.points)
    apart = np.hypot(small.upper - small.lower, large.upper - large.lower)
    decades = np.log10(members.points[-1].x / members.points[0].x)
    lower, upper = members.fit.slope_interval
    assert upper - lower < 0.9 * apart / decades


def test_by_repetitions_pools_the_lengths(runs):
    trend = trends.by_repetitions(runs, seed=0)
    names = [series.name for series in trend.series]
    assert names == ["large", "medium", "small", "another", "other"]
    by_bucket = fractions(runs, lambda row: (row["model"], row["bucket"]))
    sizes = windows_of(runs, lambda row: row["bucket"])
    for series in trend.series:
        for bucket, x, point in zip(
            (0, 4, 8, 12), trend.buckets["repetitions"], series.points, strict=True
        ):
            assert point.x == x
            expected = by_bucket[series.name, bucket]
            assert point.extracted.value == pytest.approx(expected, abs=1e-12)
            assert point.windows == sizes[bucket]
    assert trend.series[0].fit.slope > 3 * abs(trend.series[-1].fit.slope)


def test_by_context_shows_members_and_the_largest_baseline(runs):
    trend = trends.by_context(runs, seed=0)
    names = [series.name for series in trend.series]
    assert names == ["large", "medium", "small", "another"]
    by_context = fractions(runs, lambda row: (row["model"], row["context"]))
    for series in trend.series:
        assert [point.x for point in series.points] == [50, 100, 150]
        for point in series.points:
            expected = by_context[series.name, point.x]
            assert point.extracted.value == pytest.approx(expected, abs=1e-12)
        assert isinstance(series.fit, LogLinearFit)


def test_by_length_takes_all_windows_of_a_length(runs):
    trend = trends.by_length(runs, seed=0)
    names = [series.name for series in trend.series]
    assert names == ["large", "medium", "small", "another"]
    by_length = fractions(runs, lambda row: (row["model"], row["length"]))
    sizes = windows_of(runs, lambda row: row["length"])
    for series in trend.series:
        assert [point.x for point in series.points] == [100, 150, 200]
        for point in series.points:
            expected = by_length[series.name, point.x]
            assert point.extracted.value == pytest.approx(expected, abs=1e-12)
            assert point.windows == sizes[point.x]
        assert isinstance(series.fit, LogLinearFit)


def test_by_length_and_context_is_about_one_bucket_of_the_largest_model(runs):
    trend = trends.by_length_and_context(runs, bucket=8)
    assert [series.name for series in trend.series] == ["100", "150", "200"]
    assert [[p.x for p in s.points] for s in trend.series] == [
        [20, 50],
        [20, 50, 100],
        [20, 50, 100, 150],
    ]

    def key(row):
        return row["model"], row["bucket"], row["length"], row["context"]

    extracted = fractions(runs, key, full_context=False)
    right = fractions(runs, key, full_context=False, measure="tokens_correct")
    for series in trend.series:
        for point in series.points:
            cell = ("large", 8, int(series.name), point.x)
            assert point.extracted.value == pytest.approx(extracted[cell])
            assert point.tokens_correct.value == pytest.approx(right[cell] / 50)
        assert series.fit is None
    assert trend.windows == 25 + 9 + 25
    # The others have 8 windows of length 150.
    fullest = trends.by_length_and_context(runs, bucket=None)
    assert fullest.buckets["bucket"].to_list() == [8]


def with_records(runs, records):
    return dataclasses.replace(runs, records=records)


def test_models_are_compared_on_the_windows_of_all(runs):
    missed = (pl.col("model") == "other") & (pl.col("length") == 200)
    few = with_records(runs, runs.records.filter(~missed))
    for trend in (trends.by_parameters(few, 0), trends.by_repetitions(few, 0)):
        assert trend.lengths == (100, 150)
        assert {len(s.points) for s in trend.series} <= {2, 3, 4}
    by_length = fractions(few, lambda row: (row["model"], row["length"]))
    expected = (by_length["large", 100] + by_length["large", 150]) / 2
    large = trends.by_parameters(few, 0).series[0].points[-1]
    assert large.extracted.value == pytest.approx(expected)


def test_nothing_in_common_leaves_the_figures_empty(runs):
    gone = with_records(runs, runs.records.filter(pl.col("model") != "other"))
    measures = (trends.by_parameters, trends.by_repetitions, trends.by_context)
    for measure in (*measures, trends.by_length):
        trend = measure(gone, seed=0)
        assert (trend.series, trend.windows) == ((), 0)
    assert trends.by_length_and_context(gone, None).series


def test_an_empty_prompt_counts_but_has_no_place_on_a_logarithmic_axis(runs):
    empty = runs.records.filter(context=50, length=100).with_columns(
        context=pl.lit(0, pl.Int32),
        length=pl.lit(50, pl.Int32),
        window_id=pl.col("window_id") + 10_000,
        extracted=pl.lit(False),
    )
    more = with_records(runs, pl.concat([runs.records, empty]))
    assert trends.by_parameters(more, 0).lengths == (50, 100, 150, 200)
    assert trends.by_repetitions(more, 0).windows == 233 + 100
    assert trends.by_context(more, 0).contexts == (50, 100, 150)
    by_length = trends.by_length(more, 0).series[0].points
    assert [(p.x, p.extracted.value > 0) for p in by_length[:2]] == [
        (50, False),
        (100, True),
    ]
    assert trends.by_length_and_context(more, 12).lengths == (100, 150, 200)
    # Nothing else is left.
    only = with_records(runs, empty)
    assert trends.by_parameters(only, 0).series
    for trend in (trends.by_context(only, 0), trends.by_length_and_context(only, None)):
        assert (trend.series, trend.windows) == ((), 0)


def test_without_members_the_baselines_are_shown(runs):
    models = tuple(m for m in runs.models if m.baseline)
    records = runs.records.filter(pl.col("model").is_in([m.name for m in models]))
    alone = dataclasses.replace(runs, models=models, records=records)
    assert [s.baseline for s in trends.by_parameters(alone, 0).series] == [True]
    assert [s.name for s in trends.by_context(alone, 0).series] == ["another"]
    assert trends.by_length_and_context(alone, None).series[0].baseline


def test_one_model_has_no_fit(runs):
    models = runs.models[:1]
    records = runs.records.filter(pl.col("model") == models[0].name)
    alone = dataclasses.replace(runs, models=models, records=records)
    (series,) = trends.by_parameters(alone, 0).series
    assert series.fit == NoFit("fewer than two points")
    # One bucket and one length: nothing varies at all.
    single = with_records(alone, records.filter(bucket=0, length=100))
    assert trends.by_repetitions(single, 0).series[0].fit == NoFit(
        "fewer than two points"
    )


def test_right_tokens_are_unknown_after_verdicts_only(runs):
    unknown = with_records(
        runs, runs.records.with_columns(tokens_correct=pl.lit(None, pl.Int32))
    )
    points = trends.by_length_and_context(unknown, None).series[0].points
    assert [point.tokens_correct for point in points] == [None, None]


def test_the_seed_changes_intervals_of_slopes_and_nothing_else(runs):
    one, again, other = (trends.by_context(runs, seed).series[0] for seed in (0, 0, 1))
    assert one == again
    assert one.points == other.points
    assert one.fit.slope == other.fit.slope
    assert one.fit.slope_interval != other.fit.slope_interval
