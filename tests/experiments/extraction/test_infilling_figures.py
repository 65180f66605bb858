import statistics

import polars as pl
import pytest

from experiments.extraction import (
    figure_list,
    infilling_figures,
    report_figure,
    sweep_runs,
)
from experiments.extraction.infilling_figures import FIGURE_4A, FIGURE_4B
from tests.experiments.extraction import fake_sweeps

MEMBERS = {"large": 5_000_000, "small": 100_000, "medium": 800_000}
CHOICES = report_figure.Choices()
MASKED = {
    "further": [fake_sweeps.with_masking],
    "masking": "iid",
    "suffix_length": None,
}


def read(folder, members=MEMBERS, lengths=(100, 140, 200), **derived):
    windows = fake_sweeps.make_windows(lengths, (0, 4, 8, 12), per_bucket=20)
    fake_sweeps.write(folder, windows, members, {"other": 100_000}, **derived)
    return sweep_runs.load([folder])


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return read(tmp_path_factory.mktemp("sweeps") / "sweep", **MASKED)


@pytest.fixture(scope="module")
def sizes(runs):
    return FIGURE_4A.measure(runs, CHOICES)


def fractions(runs, *names):
    """The fraction of records that agree in these columns, counted by hand."""
    outcomes = {}
    for row in runs.records.to_dicts():
        outcomes.setdefault(tuple(row[n] for n in names), []).append(row["extracted"])
    return {key: statistics.fmean(values) for key, values in outcomes.items()}


def test_figure_4a_has_the_mean_over_lengths_and_their_spread(runs, sizes):
    by_length = fractions(runs, "model", "length")
    table = FIGURE_4A.table(sizes)
    assert table["model"].to_list() == ["small", "medium", "large", "other"]
    for row in table.iter_rows(named=True):
        own = [by_length[row["model"], length] for length in (100, 140, 200)]
        assert row["extracted"] == pytest.approx(statistics.fmean(own))
        assert row["lengths_deviation"] == pytest.approx(statistics.pstdev(own))
        assert row["lengths_least"] == pytest.approx(min(own))
        assert row["lengths_most"] == pytest.approx(max(own))
        assert row["windows"] == 240
    lengths = FIGURE_4A.further_tables["lengths"](sizes)
    assert {
        (row["model"], row["length"]): pytest.approx(row["extracted"])
        for row in lengths.iter_rows(named=True)
    } == by_length
    assert lengths["windows"].unique().to_list() == [80]


def test_figure_4a_has_a_dark_band_within_a_light_one(sizes):
    (ax,) = FIGURE_4A.draw(sizes).axes
    assert ax.get_ylabel() == "windows filled perfectly"
    light, dark, bars, *baseline = ax.collections
    assert len(baseline) == 3
    assert light.get_alpha() < dark.get_alpha()
    spread = sizes.spread.filter(model="large").row(0, named=True)
    mean = sizes.trend.series[0].points[-1].extracted.value

    def ends(band):
        (path,) = band.get_paths()
        heights = path.vertices[path.vertices[:, 0] == MEMBERS["large"], 1]
        return heights.min(), heights.max()

    assert ends(light) == pytest.approx(
        (spread["lengths_least"], spread["lengths_most"])
    )
    deviation = spread["lengths_deviation"]
    assert ends(dark) == pytest.approx((mean - deviation, mean + deviation))
    assert len(bars.get_segments()) == 3


def test_figure_4b_pools_lengths(runs):
    trend = FIGURE_4B.measure(runs, CHOICES)
    by_bucket = fractions(runs, "model", "bucket")
    table = FIGURE_4B.table(trend)
    assert len(table) == len(by_bucket) == 16
    for row in table.iter_rows(named=True):
        expected = by_bucket[row["model"], row["bucket"]]
        assert row["extracted"] == pytest.approx(expected)
        assert row["extracted_lower"] <= expected <= row["extracted_upper"]
    (ax,) = FIGURE_4B.draw(trend).axes
    assert ax.get_ylabel() == "windows filled perfectly"
    assert ax.get_title("left").startswith("Blanks filled perfectly")


def test_captions_say_how_tokens_were_dropped(runs, sizes):
    trend = FIGURE_4B.measure(runs, CHOICES)
    for caption in (FIGURE_4A.caption(sizes, runs), FIGURE_4B.caption(trend, runs)):
        assert "15 % of the tokens, dropped one by one at random" in caption
        assert "100, 140, 200" in caption


def test_a_sweep_has_the_figures_of_what_it_asked(runs, tmp_path):
    found = figure_list.measure(runs, CHOICES)
    names = [finding.figure.name for finding in found.figures]
    assert {"figure_4a", "figure_4b"} <= set(names)
    assert not {"figure_1a", "figure_1b", "figure_1c", "figure_5"} & set(names)
    assert {f.figure.name for f in found.figures if f.series} == {
        "figure_4a",
        "figure_4b",
    }
    prompted = read(tmp_path / "sweep", lengths=(100,))
    for figure in (FIGURE_4A, FIGURE_4B):
        assert figure.measure(prompted, CHOICES) is None


def test_one_length_has_no_spread():
    lengths = pl.DataFrame({"model": ["a"], "extracted": [0.3]})
    (row,) = infilling_figures.spread_over_lengths(lengths).to_dicts()
    assert row == {
        "model": "a",
        "lengths_deviation": 0,
        "lengths_least": 0.3,
        "lengths_most": 0.3,
    }
