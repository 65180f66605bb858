import csv
import dataclasses
import io

import polars as pl
import pytest

from experiments.extraction import memorized_sets, sweep_runs, tables, trends
from experiments.extraction.cluster_statistics import LogLinearFit
from tests.experiments.extraction import fake_sweeps


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweeps") / "sweep"
    windows = fake_sweeps.make_windows(per_bucket=10)
    fake_sweeps.write(folder, windows, {"a": 10_000, "b": 3_000_000}, {"c": 10_000})
    return sweep_runs.load([folder])


@pytest.fixture(scope="module")
def found(runs):
    return {
        "figure_1a": trends.by_parameters(runs, 0),
        "figure_1b": trends.by_repetitions(runs, 0),
        "figure_1c": trends.by_context(runs, 0),
        "figure_2b": trends.by_length(runs, 0),
        "figure_5": trends.by_length_and_context(runs, 12),
    }


TABLES = {
    "figure_1a": tables.by_parameters,
    "figure_1b": tables.by_repetitions,
    "figure_1c": tables.by_context,
    "figure_2b": tables.by_length,
    "figure_5": tables.by_length_and_context,
}
KEYS = {
    "figure_1a": ["model", "baseline", "params"],
    "figure_1b": [
        *("model", "baseline", "params", "bucket"),
        *("count_low", "count_high", "repetitions"),
    ],
    "figure_1c": ["model", "baseline", "params", "context"],
    "figure_2b": ["model", "baseline", "params", "length"],
    "figure_5": ["model", "bucket", "count_low", "count_high", "length", "context"],
}


@pytest.mark.parametrize("figure", KEYS)
def test_the_csv_has_every_point_to_the_last_bit(figure, found):
    trend = found[figure]
    text = TABLES[figure](trend).write_csv()
    rows = list(csv.DictReader(io.StringIO(text)))
    names = [f"extracted{end}" for end in ("", "_lower", "_upper")]
    if figure == "figure_5":
        names += [f"tokens_correct{end}" for end in ("", "_lower", "_upper")]
    assert list(rows[0]) == [*KEYS[figure], *names, "windows", "clusters"]
    points = [point for series in trend.series for point in series.points]
    for row, point in zip(rows, points, strict=True):
        estimate = point.extracted
        expected = [estimate.value, estimate.lower, estimate.upper]
        assert [float(row[name]) for name in names[:3]] == expected
        assert row["model"] == point.label
        assert int(row["windows"]) == point.windows
        assert int(row["clusters"]) == point.clusters


def test_a_row_of_figure_1b_says_which_bucket(found):
    rows = tables.by_repetitions(found["figure_1b"]).to_dicts()
    for row in rows:
        assert row["count_low"] <= row["repetitions"] <= row["count_high"]
        assert 2 ** (row["bucket"] / 4) <= row["count_low"]
        assert row["count_high"] < 2 ** ((row["bucket"] + 1) / 4)


@pytest.fixture(scope="module")
def fits(found):
    return tables.fits({figure: trend.series for figure, trend in found.items()})


def test_the_fits_say_what_is_missing(fits):
    rows = fits.to_dicts()
    assert [(row["figure"], row["series"]) for row in rows] == [
        *(("figure_1a", name) for name in ("trained on the corpus", "baseline")),
        *(("figure_1b", name) for name in ("b", "a", "c")),
        *(("figure_1c", name) for name in ("b", "a", "c")),
        *(("figure_2b", name) for name in ("b", "a", "c")),
    ]
    members, baseline, largest = rows[:3]
    assert "two points" in members["note"]
    assert members["r_squared"] == pytest.approx(1)
    assert baseline["note"] == "no fit: fewer than two points"
    assert baseline["slope"] is None
    assert (largest["points"], largest["note"]) == (4, "")
    assert largest["slope_lower"] < largest["slope"] < largest["slope_upper"]


def test_a_fit_without_an_interval_says_so(found):
    trend = found["figure_1c"]
    series = dataclasses.replace(trend.series[0], fit=LogLinearFit(3, 0.0, 0.1, 0.0))
    (row,) = tables.fits({"figure_1c": [series]}).to_dicts()
    assert (row["slope"], row["r_squared"], row["slope_lower"]) == (0, 0, None)
    assert row["note"] == "no interval: resampling says nothing"


def test_fits_of_nothing_are_an_empty_table():
    table = tables.fits({})
    assert table.is_empty()
    assert tables.markdown(table).startswith("|")


def test_markdown_is_for_people(found, fits):
    text = tables.markdown(fits)
    header, rule, first, second, *_ = text.splitlines()
    assert len({len(line) for line in text.splitlines()}) == 1
    assert "slope, pp per tenfold" in header
    assert set(rule) == {"|", "-"}
    assert "| +" in first
    assert "intercept" not in header
    assert "| -  " in second
    table = tables.by_parameters(found["figure_1a"])
    point = found["figure_1a"].series[0].points[1].extracted
    ends = f"[{100 * point.lower:.2f}, {100 * point.upper:.2f}]"
    assert f"| {100 * point.value:.2f} % {ends}" in tables.markdown(table)
    assert "| 3,000,000 " in tables.markdown(table)


def test_a_bar_in_a_name_does_not_end_the_cell(found):
    table = tables.by_parameters(found["figure_1a"]).with_columns(model=pl.lit("x|y"))
    assert "| x\\|y  |" in tables.markdown(table)


def test_table_1_is_a_matrix(runs):
    totals = memorized_sets.totals(runs.records, runs.models)
    pairs = memorized_sets.pairs(runs.records, runs.models)
    shown = memorized_sets.MemorizedSets(totals, pairs, (100, 50)).shown()
    header, a, b, c = tables.set_matrix(*shown)
    assert header == [
        *("model", "parameters", "memorised", "by it alone"),
        *("not by a", "not by b", "not by c"),
    ]
    assert [row[0] for row in (a, b, c)] == ["a", "b", "c"]
    assert (a[4], b[5], c[6], c[3]) == ("-",) * 4
    # What two models share is the same from either side.
    assert int(a[2]) - int(a[5]) == int(b[2]) - int(b[4])
    assert int(b[2]) - int(b[6]) == int(c[2]) - int(c[5])
    assert int(b[2]) > int(a[2])
