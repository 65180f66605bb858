import io

import matplotlib.image
import pytest

from experiments.extraction import approximate_figure
from experiments.extraction.approximate_figure import EDITED, SIMILAR
from experiments.extraction.report_figure import Choices
from tests.experiments.extraction import fake_sweeps

COLUMNS = {
    "bucket": [0, 0, 0, 0, 8],
    "extracted": [True, False, False, False, False],
    "bleu": [1.0, 0.75, 0.7500001, 0.1, 0.9],
    "edit_distance": [0, 5, 6, 40, 5],
    "tokens_correct": [50, 45, 40, 5, 25],
}
MEASURES = ("extracted", SIMILAR, EDITED, "tokens_correct")


def test_shares_by_hand():
    shown = approximate_figure.measure(fake_sweeps.runs_of(COLUMNS), Choices())
    # A BLEU of 0.75 is not above it; 5 of 50 tokens are 10 %, and 6 are more.
    expected = [(0, 0.25, 0.5, 0.5, 0.7), (8, 0.0, 1.0, 1.0, 0.5)]
    rows = shown.by_bucket.select("bucket", *MEASURES).rows()
    assert rows == [pytest.approx(row) for row in expected]
    assert shown.by_bucket["windows"].to_list() == [4, 1]
    assert (SIMILAR, EDITED) == ("bleu_over_0.75", "edits_up_to_10_percent")


def test_what_was_not_decoded_has_no_near_misses():
    runs = fake_sweeps.runs_of({"extracted": [True], "tokens_correct": [50]})
    assert approximate_figure.measure(runs, Choices()) is None


def test_the_caption_says_how_many_edits():
    runs = fake_sweeps.runs_of(COLUMNS)
    shown = approximate_figure.measure(runs, Choices())
    caption = approximate_figure.FIGURE.caption(shown, runs)
    assert "at most 5 edits of one token, 10 % of the suffix" in caption
    assert "On the right" not in caption


@pytest.mark.parametrize("models", [["a"] * 5, ["a", "a", "b", "a", "b"]])
def test_draws_one_panel_or_two(models):
    runs = fake_sweeps.runs_of(
        COLUMNS | {"model": models}, members={"a": 10, "b": 1_000}
    )
    shown = approximate_figure.measure(runs, Choices())
    figure = approximate_figure.FIGURE.draw(shown)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=25)
    picture.seek(0)
    assert matplotlib.image.imread(picture).std() > 0.02
    largest = max(models)
    own = shown.by_bucket.filter(model=largest)
    heights = [line.get_ydata().tolist() for line in figure.axes[0].get_lines()]
    assert heights == [own[name].to_list() for name in MEASURES]
    assert len(figure.axes) == len(set(models))
    assert [model.name for model in shown.models] == sorted(set(models), reverse=True)
