import dataclasses
import io

import matplotlib.colors
import matplotlib.image
import numpy as np
import polars as pl
import pytest

from experiments.extraction import figures, sweep_runs, trends
from tests.experiments.extraction import fake_sweeps

MEMBERS = {"small": 100_000, "large": 5_000_000}
BASELINES = {"other": 100_000, "another": 5_000_000}
FIGURES = {
    "1a": (lambda runs: trends.by_parameters(runs, 0), figures.draw_by_parameters),
    "1b": (lambda runs: trends.by_repetitions(runs, 0), figures.draw_by_repetitions),
    "1c": (lambda runs: trends.by_context(runs, 0), figures.draw_by_context),
    "2b": (lambda runs: trends.by_length(runs, 0), figures.draw_by_length),
    "5": (
        lambda runs: trends.by_length_and_context(runs, None),
        figures.draw_by_length_and_context,
    ),
}


def read(folder, members, baselines, lengths=(100, 200), buckets=(0, 8), contexts=()):
    windows = fake_sweeps.make_windows(lengths, buckets, per_bucket=8)
    fake_sweeps.write(folder, windows, members, baselines, contexts)
    return sweep_runs.load([folder])


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweeps") / "sweep"
    return read(folder, MEMBERS, BASELINES, contexts=(50, 150))


def lines(ax):
    """The points of each line of the legend."""
    return {
        str(line.get_label()): list(zip(*line.get_data(), strict=True))
        for line in ax.get_lines()
        if not str(line.get_label()).startswith("_")
    }


def coordinates(series):
    return [(point.x, point.extracted.value) for point in series.points]


def test_figure_1a_shows_the_points_and_the_fits(runs):
    trend = trends.by_parameters(runs, 0)
    (ax,) = figures.draw_by_parameters(trend).axes
    drawn = lines(ax)
    members, baselines = trend.series
    assert drawn["trained on the corpus"] == coordinates(members)
    assert drawn["baseline"] == coordinates(baselines)
    fits = [label for label in drawn if label.startswith("fit: ")]
    assert fits[0] == f"fit: {100 * members.fit.slope:+.1f} pp per tenfold"
    # Two points: the line ends in them.
    np.testing.assert_allclose(drawn[fits[0]], coordinates(members), atol=1e-12)
    assert {text.get_text() for text in ax.texts} >= {*MEMBERS, *BASELINES}
    assert ax.get_xscale() == "log"
    assert ax.get_xlabel() == "parameters"


def test_figure_1b_lets_the_largest_of_each_kind_stand_out(runs):
    trend = trends.by_repetitions(runs, 0)
    (ax,) = figures.draw_by_repetitions(trend).axes
    drawn = lines(ax)
    assert drawn["large, 5M"] == coordinates(trend.series[0])
    assert any(label.startswith("fit to large: ") for label in drawn)
    alphas = {str(line.get_label()): line.get_alpha() for line in ax.get_lines()}
    strong = {label for label, alpha in alphas.items() if alpha == 1}
    assert strong == {"large, 5M", "another, 5M (baseline)"}
    assert len(ax.collections) == 2


def test_figure_1c_has_a_line_and_intervals_for_each_model(runs):
    trend = trends.by_context(runs, 0)
    (ax,) = figures.draw_by_context(trend).axes
    drawn = lines(ax)
    assert list(drawn) == ["large, 5M", "small, 100K", "another, 5M (baseline)"]
    for series, points, bars in zip(
        trend.series, drawn.values(), ax.collections, strict=True
    ):
        np.testing.assert_allclose(points, coordinates(series), rtol=0.02)
        assert [y for _, y in points] == [y for _, y in coordinates(series)]
        ends = [segment[:, 1].tolist() for segment in bars.get_segments()]
        assert ends == [[p.extracted.lower, p.extracted.upper] for p in series.points]


def test_figure_2b_is_about_lengths(runs):
    trend = trends.by_length(runs, 0)
    (ax,) = figures.draw_by_length(trend).axes
    drawn = lines(ax)
    assert list(drawn) == ["large, 5M", "small, 100K", "another, 5M (baseline)"]
    for series, points in zip(trend.series, drawn.values(), strict=True):
        np.testing.assert_allclose(points, coordinates(series), rtol=0.02)
    assert ax.get_xlabel() == "tokens of the window"
    assert ax.get_xticks().tolist() == [100, 200]


def test_figure_5_has_a_panel_for_each_measure(runs):
    trend = trends.by_length_and_context(runs, None)
    left, right = figures.draw_by_length_and_context(trend).axes
    for series, extracted, correct in zip(
        trend.series, lines(left).values(), lines(right).values(), strict=True
    ):
        heights = [p.tokens_correct.value for p in series.points]
        assert [y for _, y in extracted] == [y for _, y in coordinates(series)]
        assert [y for _, y in correct] == heights
        x = [point.x for point in series.points]
        np.testing.assert_allclose([x for x, _ in extracted], x, rtol=0.05)
    assert right.get_ylabel() == "right tokens of the suffix"


def test_figure_5_leaves_out_what_is_not_known(runs):
    unknown = runs.records.with_columns(tokens_correct=pl.lit(None, pl.Int32))
    trend = trends.by_length_and_context(
        dataclasses.replace(runs, records=unknown), None
    )
    assert len(figures.draw_by_length_and_context(trend).axes) == 1


def test_the_sample_is_in_the_picture(runs):
    trend = trends.by_context(runs, 0)
    (ax,) = figures.draw_by_context(trend).axes
    assert any("32 windows in" in text.get_text() for text in ax.texts)


def test_names_of_models_are_taken_literally(tmp_path):
    """Also those that Matplotlib leaves out, and formulas that are none."""
    members = {"_small": 100_000, "a$b^$": 5_000_000}
    runs = read(tmp_path / "sweep", members, {})
    for measure, draw in FIGURES.values():
        figure = draw(measure(runs))
        figure.savefig(io.BytesIO(), format="png")
    drawn = figures.draw_by_repetitions(trends.by_repetitions(runs, 0))
    (legend,) = drawn.legends
    names = {text.get_text().split(",")[0] for text in legend.get_texts()}
    assert names >= members.keys()


def test_lines_differ_in_colour_and_in_marker(tmp_path):
    members = {f"m{i}": 10_000 * 2**i for i in range(8)}
    runs = read(tmp_path / "sweep", members, {})
    (ax,) = figures.draw_by_context(trends.by_context(runs, 0)).axes
    styles = [(line.get_color(), line.get_marker()) for line in ax.get_lines()]
    assert len({color for color, _ in styles}) == 8
    assert len({marker for _, marker in styles}) == 8
    lightness = [sum(matplotlib.colors.to_rgb(color)) for color, _ in styles]
    # The largest first, and darkest.
    assert lightness == sorted(lightness)


@pytest.mark.parametrize("figure", FIGURES)
@pytest.mark.parametrize(
    ("members", "baselines", "lengths", "buckets"),
    [
        ({"a": 7}, {}, (100,), (0,)),
        ({}, {"b": 10_000}, (100,), (0,)),
        ({"a": 10_000, "twin": 10_000}, {"b": 10_001}, (100, 150), (0, 4)),
        # So small that they extract nothing.
        ({"a": 1, "b": 2}, {"c": 1}, (100, 500), (0, 4)),
        # So large that they extract everything.
        ({"a": 10**13, "b": 10**14}, {"c": 1}, (100, 500), (0, 4)),
    ],
)
def test_draws_whatever_was_measured(
    tmp_path, figure, members, baselines, lengths, buckets
):
    measure, draw = FIGURES[figure]
    trend = measure(read(tmp_path / "sweep", members, baselines, lengths, buckets))
    picture = io.BytesIO()
    draw(trend).savefig(picture, format="png", dpi=25)
    picture.seek(0)
    assert matplotlib.image.imread(picture).std() > 0.02
