import polars as pl
import pytest

from experiments.extraction import (
    figure_list,
    report_figure,
    sweep_runs,
    training_set_figure,
    two_proportions,
)
from experiments.extraction.sweep_runs import Model
from experiments.extraction.training_set_figure import FIGURE_4C
from tests.experiments.extraction import fake_sweeps

SIZE = 5_000_000
MEMBERS = {"original": SIZE, "near": SIZE, "exact": SIZE, "big": 2 * SIZE}
WINDOWS = fake_sweeps.make_windows((100, 150), (0, 8, 21), per_bucket=20)
CHOICES = report_figure.Choices()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweeps") / "sweep"
    fake_sweeps.write(folder, WINDOWS, MEMBERS, {"other": SIZE})
    records = pl.read_parquet(folder / "records.parquet")
    # Deduplicated data: what comes up to 30 times is hardly memorised.
    forgotten = pl.col("window_id") % 3 > 0
    small = pl.Series(["near", "exact"])
    lost = pl.col("model").is_in(small) & forgotten & (pl.col("count") < 35)
    verdict = pl.when(lost).then(False).otherwise("extracted")
    mismatch = pl.when(lost).then(0).otherwise("first_mismatch")
    correct = pl.when(lost).then(0).otherwise("tokens_correct")
    records.with_columns(
        extracted=verdict,
        first_mismatch=mismatch.cast(pl.Int32),
        tokens_correct=correct.cast(pl.Int32),
    ).write_parquet(folder / "records.parquet")
    return sweep_runs.load([folder])


@pytest.fixture(scope="module")
def shown(runs):
    return FIGURE_4C.measure(runs, CHOICES)


def verdicts(runs, model, low=1, high=10**9):
    rows = runs.records.filter(
        pl.col("model") == model, pl.col("count").is_between(low, high)
    ).sort("window_id")
    return rows["extracted"].to_numpy(), rows["cluster"].to_numpy()


def test_a_line_for_each_model_of_that_size_in_the_order_of_the_sweep(runs, shown):
    lines = shown.fractions.partition_by("model", maintain_order=True)
    assert [line["model"][0] for line in lines] == ["original", "near", "exact"]
    for line in lines:
        assert line["bucket"].to_list() == [0, 8, 21]
        for row in line.iter_rows(named=True):
            extracted, _ = verdicts(
                runs, row["model"], row["count_low"], row["count_high"]
            )
            assert row["windows"] == len(extracted) == 40
            assert row["extracted"] == pytest.approx(extracted.mean())
            assert row["extracted_lower"] <= row["extracted"] <= row["extracted_upper"]


def test_the_first_is_tested_against_each_other_model(runs, shown):
    keys = shown.tests.select("model", "other", "repetitions", "bucket").rows()
    groups = [
        *((label, None) for label in ("all", "below 35", "35 or more")),
        *(("bucket", bucket) for bucket in (0, 8, 21)),
    ]
    assert keys == [
        ("original", other, *group) for other in ("near", "exact") for group in groups
    ]
    for row, (low, high) in zip(
        shown.tests.filter(other="exact").to_dicts(),
        [(1, 99), (1, 34), (35, 99), (1, 1), (4, 4), (38, 45)],
        strict=True,
    ):
        first, clusters = verdicts(runs, "original", low, high)
        second, _ = verdicts(runs, "exact", low, high)
        found = two_proportions.compare(first, second, clusters)
        assert (row["windows"], row["clusters"]) == (found.windows, found.clusters)
        assert row["extracted"] == found.first
        assert row["extracted_by_other"] == found.second
        assert row["difference"] == found.difference
        assert row["pooled_p"] == found.pooled_p
        assert row["clustered_p"] == found.clustered_p
    few, many = (
        shown.tests.filter(other="exact", repetitions=label).row(0, named=True)
        for label in ("below 35", "35 or more")
    )
    assert few["difference_lower"] > 0
    assert many["difference"] == 0


def test_the_caption_says_what_was_found(runs, shown):
    caption = FIGURE_4C.caption(shown, runs)
    row = shown.tests.filter(other="near", repetitions="below 35").row(0, named=True)
    assert (
        f"Fewer than 35 repetitions: {100 * row['extracted']:.2f} % against "
        f"{100 * row['extracted_by_other']:.2f} % by `near`, "
        f"{100 * row['difference']:+.2f} ["
    ) in caption
    assert "compared with `original`" in caption


def test_the_picture_has_a_line_and_a_band_for_each_model(shown):
    (ax,) = FIGURE_4C.draw(shown).axes
    assert [line.get_label() for line in ax.lines] == ["original", "near", "exact"]
    assert len(ax.collections) == 3
    near = shown.fractions.filter(model="near")
    assert list(ax.lines[1].get_ydata()) == near["extracted"].to_list()


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([(3, False), (3, True), (4, False)], []),
        ([(3, False), (4, False), (3, False), (4, False)], [1, 3]),
        ([(4, False), (3, False), (3, False), (4, False), (3, False)], [1, 2, 4]),
        ([(3, True), (3, True)], []),
    ],
)
def test_which_models_are_of_one_size(sizes, expected):
    models = [
        Model(f"{i}", "", size, baseline) for i, (size, baseline) in enumerate(sizes)
    ]
    found = training_set_figure.of_one_size(models)
    assert [int(model.name) for model in found] == expected


def test_models_of_different_sizes_have_no_such_figure(tmp_path):
    sweep = fake_sweeps.write(tmp_path / "sweep", WINDOWS, {"a": 1_000, "b": 2_000})
    assert FIGURE_4C.measure(sweep_runs.load([sweep]), CHOICES) is None
    assert FIGURE_4C in figure_list.FIGURES
