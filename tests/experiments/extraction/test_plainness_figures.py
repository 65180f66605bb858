import statistics

import numpy as np
import polars as pl
import pytest

from experiments.extraction import figure_list, plainness_figures, sweep_runs
from experiments.extraction.plainness_figures import ENTROPY_FIGURE, WHITESPACE_FIGURE
from experiments.extraction.report_figure import Choices, LeftOut
from tests.experiments.extraction import fake_sweeps

MEMBERS = {"small": 100_000, "large": 5_000_000}
BASELINES = {"other": 100_000, "another": 5_000_000}
CHOICES = Choices()


def with_much_space(records):
    """Half of the windows have none, the others a tenth to all of it."""
    tenths = pl.col("window_id") % 20 - 9
    share = pl.max_horizontal(tenths, 0).cast(pl.Float32) / 10
    return records.with_columns(whitespace=share, entropy=6 - 5 * share)


def read(folder, change, **derived):
    windows = fake_sweeps.make_windows((100, 150), (0, 8, 16), per_bucket=20)
    fake_sweeps.write(folder, windows, MEMBERS, BASELINES, further=change, **derived)
    return sweep_runs.load([folder])


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return read(tmp_path_factory.mktemp("sweeps") / "sweep", [with_much_space])


@pytest.fixture(scope="module")
def shown(runs):
    return WHITESPACE_FIGURE.measure(runs, CHOICES)


def rows_of(runs, model, where):
    return [
        row for row in runs.records.to_dicts() if row["model"] == model and where(row)
    ]


def test_bins_are_tenths_of_the_windows(runs, shown):
    """Half have no white space, so these are one bin, and five are left."""
    bins = shown.bins.partition_by("model", maintain_order=True)
    assert [part["model"][0] for part in bins] == ["large", "small", "another"]
    for part in bins:
        ends = part.select("whitespace_low", "whitespace_high").rows()
        tenths = [(0, 0), (0.1, 0.2), (0.3, 0.4), (0.5, 0.6), (0.7, 0.8), (0.9, 1)]
        np.testing.assert_allclose(ends, tenths, atol=1e-6)
        assert part["windows"].to_list() == [60, 12, 12, 12, 12, 12]
        np.testing.assert_allclose(
            part["whitespace"], [0, 0.15, 0.35, 0.55, 0.75, 0.95], atol=1e-6
        )
        for row in part.iter_rows(named=True):
            low, high = row["whitespace_low"], row["whitespace_high"]
            inside = rows_of(
                runs,
                row["model"],
                lambda r: low <= r["whitespace"] <= high,  # noqa: B023
            )
            fraction = statistics.fmean(r["extracted"] for r in inside)
            assert row["extracted"] == pytest.approx(fraction)
            assert row["clusters"] == len({r["cluster"] for r in inside})
            assert row["extracted_lower"] <= fraction <= row["extracted_upper"]


def test_a_bucket_has_its_white_space_beside_its_fraction(runs, shown):
    assert shown.buckets["bucket"].to_list() == [0, 8, 16] * 3
    for row in shown.buckets.iter_rows(named=True):
        inside = rows_of(runs, row["model"], lambda r: r["bucket"] == row["bucket"])  # noqa: B023
        assert row["windows"] == len(inside) == 40
        shares = [r["whitespace"] for r in inside]
        assert row["whitespace"] == pytest.approx(statistics.fmean(shares))
        mostly = [share > 0.5 for share in shares]
        assert row["mostly_whitespace"] == pytest.approx(statistics.fmean(mostly))
        assert row["mostly_whitespace"] == 0.25
        others = [r["extracted"] for r in inside if r["whitespace"] <= 0.5]
        assert row["extracted_of_others"] == pytest.approx(statistics.fmean(others))


def test_entropy_has_the_same_in_bits(runs):
    found = ENTROPY_FIGURE.measure(runs, CHOICES)
    assert found.bins.filter(model="large")["entropy_high"].to_list()[-1] == 6
    assert "mostly_whitespace" not in found.buckets.columns
    assert found.buckets["entropy"].mean() == pytest.approx(6 - 5 * 0.275)
    assert ENTROPY_FIGURE.draw(found).axes[0].get_xlabel().endswith("in bits")


def test_the_picture_has_the_fraction_and_the_measure(shown):
    left, right, beside = WHITESPACE_FIGURE.draw(shown).axes
    labels = [line.get_label() for line in left.lines]
    assert labels == ["large", "small", "another"]
    leading = shown.buckets.filter(model="large")
    (fraction,) = right.lines
    assert list(fraction.get_ydata()) == leading["extracted"].to_list()
    (share,) = beside.lines
    assert list(share.get_ydata()) == leading["whitespace"].to_list()
    assert beside.get_ylim()[0] == 0


def test_the_caption_is_about_what_was_asked(runs, shown, tmp_path):
    caption = WHITESPACE_FIGURE.caption(shown, runs)
    assert caption.startswith("Left: fraction of windows that are extractable against")
    assert "120 windows in" in caption
    masked = read(
        tmp_path / "sweep",
        [with_much_space, fake_sweeps.with_masking],
        masking="spans",
        suffix_length=None,
    )
    found = WHITESPACE_FIGURE.measure(masked, CHOICES)
    caption = WHITESPACE_FIGURE.caption(found, masked)
    assert "whose blanks are all filled perfectly" in caption
    drawn = WHITESPACE_FIGURE.draw(found).axes[0]
    assert drawn.get_ylabel() == "windows filled perfectly"


def test_what_is_not_known_is_said(tmp_path):
    def without_tokenizer(records):
        return with_much_space(records).with_columns(
            whitespace=pl.lit(None, pl.Float32)
        )

    runs = read(tmp_path / "one", [without_tokenizer])
    found = WHITESPACE_FIGURE.measure(runs, CHOICES)
    assert isinstance(found, LeftOut)
    assert "no tokenizer" in found.reason
    assert len(ENTROPY_FIGURE.measure(runs, CHOICES).bins) > 0
    earlier = read(tmp_path / "two", [])
    assert isinstance(ENTROPY_FIGURE.measure(earlier, CHOICES), LeftOut)
    for figure in (WHITESPACE_FIGURE, ENTROPY_FIGURE):
        assert figure in figure_list.FIGURES


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (np.arange(20), np.arange(1, 20, 2)),
        (np.zeros(5), [0]),
        (np.array([0.0] * 99 + [1.0]), [0, 1]),
        ([3.0, 1.0, 2.0], [1, 2, 3]),
    ],
)
def test_the_ends_of_bins(values, expected):
    np.testing.assert_array_equal(
        plainness_figures.upper_ends(np.asarray(values)), expected
    )
