import io

import matplotlib.image
import numpy as np
import pytest

from experiments.extraction import discoverable, discoverable_figure
from experiments.extraction.report_figure import Choices
from experiments.extraction.sweep_runs import Scheme
from tests.experiments.extraction import fake_sweeps

LOGPROBS = [np.log(0.6), np.log(0.13), 0.0, -np.inf]
COLUMNS = {"extracted": [True, False, True, False], "suffix_logprob": LOGPROBS}


def share(shown, p, n):
    name = discoverable_figure.column_of(p)
    (row,) = shown.rates.filter(queries=n).to_dicts()
    assert row[f"{name}_lower"] <= row[name] <= row[f"{name}_upper"]
    return row[name]


def test_shares_by_hand():
    shown = discoverable_figure.measure(fake_sweeps.runs_of(COLUMNS), Choices())
    # With p = 0.5: 0.6 >= 0.5 and 0.87^5 <= 0.5 < 0.87^4; the last is never drawn.
    assert [share(shown, 0.5, n) for n in (1, 4, 6, 10**6)] == [0.5, 0.5, 0.75, 0.75]
    # With p = 0.9: 0.4^3 <= 0.1 < 0.4^2, and 0.87^17 <= 0.1 < 0.87^16.
    assert [share(shown, 0.9, n) for n in (2, 3, 16, 25)] == [0.25, 0.5, 0.5, 0.75]
    assert share(shown, 0.1, 1) == 0.75
    assert shown.rates["extracted"].unique().to_list() == [0.5]
    assert shown.scheme == Scheme(1.0, None)
    assert shown.drawn is None


def test_rates_are_those_of_discoverable_py_and_grow():
    rng = np.random.default_rng(0)
    logprob_N = -rng.exponential(5, size=200).astype(np.float32)
    runs = fake_sweeps.runs_of({"suffix_logprob": logprob_N, "bucket": [0] * 200})
    shown = discoverable_figure.measure(runs, Choices())
    for p in discoverable_figure.P:
        name = discoverable_figure.column_of(p)
        for n, found in shown.rates.select("queries", name).rows():
            assert found == pytest.approx(discoverable.rate(logprob_N, n, p))
        assert shown.rates[name].is_sorted()
    assert shown.rates["queries"].to_list() == discoverable_figure.queries().tolist()


def test_a_scheme_takes_the_place_of_the_plain_model():
    runs = fake_sweeps.runs_of(
        COLUMNS | {"scheme_logprob": [0.0] * 4}, scheme=Scheme(0.5, 40)
    )
    shown = discoverable_figure.measure(runs, Choices())
    assert share(shown, 0.9, 1) == 1
    caption = discoverable_figure.FIGURE.caption(shown, runs)
    assert "(temperature 0.5, the 40 likeliest tokens)" in caption
    assert "extracts, 50.00 %; with p = 0.5 it is 100.00 % at n = 1,000,000" in caption
    assert "draws that were made" not in caption


def test_draws_that_were_made_are_compared_with_the_probabilities():
    runs = fake_sweeps.runs_of(
        COLUMNS | {"scheme_logprob": LOGPROBS, "samples_extracted": [1, 0, 2, 0]},
        scheme=Scheme(1.0, None),
        samples=2,
    )
    shown = discoverable_figure.measure(runs, Choices())
    expected = ((1 - 0.4**2) + (1 - 0.87**2) + 1 + 0) / 4
    assert shown.drawn == (2, 0.5, pytest.approx(expected))
    caption = discoverable_figure.FIGURE.caption(shown, runs)
    assert "one or more gave the suffix of 50.00 % of the windows" in caption
    assert f"{100 * expected:.2f} % were to be expected" in caption


def test_verdicts_and_blanks_have_no_draws():
    unknown = fake_sweeps.runs_of({"extracted": [True]})
    assert discoverable_figure.measure(unknown, Choices()) is None
    blanks = fake_sweeps.runs_of(COLUMNS, masking="iid", suffix_length=None)
    assert discoverable_figure.measure(blanks, Choices()) is None


def test_draws():
    shown = discoverable_figure.measure(fake_sweeps.runs_of(COLUMNS), Choices())
    figure = discoverable_figure.FIGURE.draw(shown)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=25)
    picture.seek(0)
    assert matplotlib.image.imread(picture).std() > 0.02
    (ax,) = figure.axes
    labels = [line.get_label() for line in ax.get_lines()]
    assert labels == ["p = 0.1", "p = 0.5", "p = 0.9", "greedy decoding"]
    assert ax.get_xscale() == "log"
