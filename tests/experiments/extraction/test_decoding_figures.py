import io

import matplotlib.image
import polars as pl
import pytest

from experiments.errors import RunError
from experiments.extraction import decoding_figures
from experiments.extraction.report_figure import Choices
from tests.experiments.extraction import fake_sweeps

COLUMNS = {
    "bucket": [4, 4, 0, 0, 0, 0],
    "extracted": [True, True, False, False, True, False],
    "beam_extracted": [True, False, False, True, True, False],
    "beam_identical": [True, False, True, False, True, True],
    "anywhere": [True, True, True, False, True, True],
}


@pytest.fixture
def runs():
    return fake_sweeps.runs_of(COLUMNS, beams=100)


def test_beams_against_greedy_by_hand(runs):
    shown = decoding_figures.beams(runs, Choices())
    table = shown.by_bucket
    columns = ["bucket", "count_low", "windows", "clusters", "extracted"]
    columns += ["beam_extracted", "gain", "beam_identical"]
    assert table.select(columns).rows() == [
        (0, 1, 4, 4, 0.25, 0.5, 0.25, 0.75),
        (4, 2, 2, 2, 1.0, 0.5, -0.5, 0.5),
    ]
    for name in ("extracted", "beam_extracted", "beam_identical"):
        assert (table[f"{name}_lower"] < table[f"{name}_upper"]).all()
    (row,) = shown.summary.to_dicts()
    assert (row["model"], row["beams"], row["buckets"]) == ("model", 100, 2)
    assert (row["mean_gain"], row["largest_gain"]) == (-0.125, 0.25)
    assert (row["bucket"], row["count_low"], row["count_high"]) == (0, 1, 1)
    assert (row["identical"], row["identical_pooled"]) == (0.625, pytest.approx(2 / 3))
    assert row["mean_gain_lower"] < -0.125 < row["mean_gain_upper"]


def test_the_caption_has_the_numbers_of_the_beams(runs):
    shown = decoding_figures.beams(runs, Choices())
    caption = decoding_figures.BEAMS.caption(shown, runs)
    assert "the most likely of 100 beams" in caption
    assert "beams gain -12.50 points (95 % interval" in caption
    assert "at most +25.00 points at 1 occurrences" in caption
    assert "62.5 % in the mean over buckets, and in 66.7 % of all windows" in caption


def test_anywhere_against_the_true_suffix_by_hand(runs):
    shown = decoding_figures.anywhere(runs, Choices())
    assert shown.by_bucket.select("bucket", "extracted", "anywhere", "gain").rows() == [
        (0, 0.25, 0.75, 0.5),
        (4, 1.0, 1.0, 0.0),
    ]
    (row,) = shown.summary.to_dicts()
    assert (row["mean_gain"], row["largest_gain"], row["bucket"]) == (0.25, 0.5, 0)
    caption = decoding_figures.ANYWHERE.caption(shown, runs)
    assert "the difference is +25.00 points" in caption
    assert "at most +50.00 points at 1 occurrences" in caption


def test_what_is_extracted_must_be_found_anywhere():
    runs = fake_sweeps.runs_of(COLUMNS | {"anywhere": [False] + [True] * 5})
    with pytest.raises(RunError, match=r"^window 0 is extracted by .* yet not found"):
        decoding_figures.anywhere(runs, Choices())


def test_the_largest_member_that_was_asked_is_shown():
    names = ["small", "large", "largest", "other"]
    runs = fake_sweeps.runs_of(
        {
            "window_id": [0, 0, 0, 0],
            "model": names,
            "extracted": [True, False, False, False],
            "anywhere": [True, True, None, True],
        },
        members={"small": 1, "large": 5, "largest": 9},
        baselines={"other": 99},
    )
    shown = decoding_figures.anywhere(runs, Choices())
    assert shown.by_bucket.select("model", "params", "anywhere").row(0) == (
        "large",
        5,
        1.0,
    )


def test_shorter_prompts_and_sweeps_without_them_are_left_out(runs):
    short = fake_sweeps.runs_of(COLUMNS | {"context": [50] * 5 + [20]})
    shown = decoding_figures.anywhere(short, Choices())
    assert shown.by_bucket["windows"].to_list() == [3, 2]
    without = fake_sweeps.runs_of({"extracted": [True]})
    assert decoding_figures.beams(without, Choices()) is None
    assert decoding_figures.anywhere(without, Choices()) is None


def test_without_a_difference_there_is_no_interval():
    same = COLUMNS | {"anywhere": COLUMNS["extracted"]}
    runs = fake_sweeps.runs_of(same)
    shown = decoding_figures.anywhere(runs, Choices())
    assert shown.gain.interval is None
    assert shown.summary["mean_gain_lower"].to_list() == [None]
    caption = decoding_figures.ANYWHERE.caption(shown, runs)
    assert "the difference is +0.00 points, at most" in caption


@pytest.mark.parametrize("figure", ["BEAMS", "ANYWHERE"])
@pytest.mark.parametrize("columns", [{}, {"bucket": [0] * 6}])
def test_draws(figure, columns):
    figure = getattr(decoding_figures, figure)
    runs = fake_sweeps.runs_of(COLUMNS | columns, beams=7)
    shown = figure.measure(runs, Choices())
    picture = io.BytesIO()
    drawn = figure.draw(shown)
    drawn.savefig(picture, format="png", dpi=25)
    picture.seek(0)
    assert matplotlib.image.imread(picture).std() > 0.02
    (first, *_) = drawn.axes
    heights = [line.get_ydata().tolist() for line in first.get_lines()]
    other = "beam_extracted" if figure is decoding_figures.BEAMS else "anywhere"
    assert heights == [shown.by_bucket[n].to_list() for n in ("extracted", other)]
    assert isinstance(figure.table(shown), pl.DataFrame)
