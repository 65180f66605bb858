import json

import polars as pl
import pytest

from experiments.errors import RunError, UsageError
from experiments.extraction import sweep_runs
from tests.experiments.extraction import fake_sweeps

WINDOWS = fake_sweeps.make_windows((100, 200), (0, 8), per_bucket=6)
MEMBERS = {"small": 1_000, "large": 10_000}
BASELINES = {"other": 10_000}


@pytest.fixture
def write(tmp_path):
    """Writes a fake sweep: `(name, **options) -> folder`."""

    def make(name="sweep", members=MEMBERS, baselines=BASELINES, **options):
        return fake_sweeps.write(
            tmp_path / name, WINDOWS, members, baselines, **options
        )

    return make


def rewrite(folder, change):
    path = folder / "records.parquet"
    change(pl.read_parquet(path)).write_parquet(path)


def at(name, row, value):
    """A change of one value."""
    return lambda records: records.with_columns(
        pl.when(pl.int_range(pl.len()) == row)
        .then(pl.lit(value, records.schema[name]))
        .otherwise(name)
        .alias(name)
    )


def test_reads_what_a_sweep_wrote(write):
    runs = sweep_runs.load([write()])
    assert [(m.name, m.params, m.baseline) for m in runs.models] == [
        ("small", 1_000, False),
        ("large", 10_000, False),
        ("other", 10_000, True),
    ]
    assert (runs.precision, runs.suffix_length) == ("highest", 50)
    assert (runs.windows, runs.num_windows) == ("data/windows", 24)
    assert len(runs.records) == 3 * 24
    by_window = dict(zip(WINDOWS.window_id, WINDOWS.cluster, strict=True))
    for window_id, cluster in runs.records.select("window_id", "cluster").rows():
        assert cluster == by_window[window_id]


def test_columns_that_no_figure_needs_are_not_read(write):
    folder = write()
    rewrite(folder, lambda r: r.with_columns(generated=pl.lit([1, 2])))
    assert "generated" not in sweep_runs.load([folder]).records.columns


def test_verdicts_only_leaves_the_details_unknown(write):
    records = sweep_runs.load([write(verdicts_only=True)]).records
    assert records["tokens_correct"].is_null().all()
    assert not records["extracted"].has_nulls()


def test_two_sweeps_make_one(write):
    whole = sweep_runs.load([write("whole")])
    members, baselines = write("a", baselines={}), write("b", members={})
    runs = sweep_runs.load([members, baselines])
    assert runs.models == whole.models
    assert runs.records.equals(whole.records)
    assert [sweep.folder for sweep in runs.sweeps] == [members, baselines]


def test_a_record_of_two_sweeps_is_kept_once(write):
    full, short = write("full"), write("short", contexts=(50, 20))
    runs = sweep_runs.load([full, short])
    # Windows of 100 tokens have a context of 50 in both.
    assert len(runs.records) == 3 * (24 + 12 + 24)
    assert (
        not runs.records.select("model", "window_id", "context").is_duplicated().any()
    )


def test_what_one_sweep_does_not_know_is_taken_from_the_other(write):
    verdicts, whole = write("verdicts", verdicts_only=True), write("whole")
    expected = sweep_runs.load([whole]).records
    for folders in ([verdicts, whole], [whole, verdicts]):
        assert sweep_runs.load(folders).records.equals(expected)


EVERYTHING = (
    fake_sweeps.with_plainness,
    fake_sweeps.with_near_misses,
    fake_sweeps.with_anywhere,
    fake_sweeps.with_beams,
    fake_sweeps.with_scheme(samples=20),
)
SETTINGS = {"beams": 10, "temperature": 0.5, "top_k": 40, "samples": 20}
FURTHER = (
    *("whitespace", "entropy", "bleu", "edit_distance", "anywhere"),
    *("beam_extracted", "beam_logprob", "beam_identical"),
    *("scheme_logprob", "samples_extracted"),
)


def test_reads_what_a_sweep_may_measure_besides(write):
    folder = write(further=EVERYTHING, config=SETTINGS, sample="uniform")
    runs = sweep_runs.load([folder])
    written = pl.read_parquet(folder / "records.parquet")
    assert runs.records.select(FURTHER).equals(written.select(FURTHER))
    assert (runs.sample, runs.masking, runs.beams) == ("uniform", "", 10)
    assert runs.scheme == sweep_runs.Scheme(0.5, 40)
    assert f"{runs.scheme}" == "temperature 0.5, the 40 likeliest tokens"
    assert runs.samples == 20


def test_what_an_older_sweep_did_not_measure_is_not_known(write):
    runs = sweep_runs.load([write()])
    assert runs.records.select(FURTHER).null_count().row(0) == (72,) * len(FURTHER)
    assert runs.records["num_targets"].unique().to_list() == [50]
    assert (runs.sample, runs.masking, runs.beams) == (None, "", 0)
    assert (runs.scheme, runs.samples) == (None, 0)


def test_an_older_sweep_goes_with_a_newer_one(write):
    old = write("old", baselines={})
    new = write(
        "new", members={}, further=EVERYTHING, config=SETTINGS, sample="by_count"
    )
    runs = sweep_runs.load([old, new])
    assert (runs.sample, runs.beams, runs.samples) == ("by_count", 10, 20)
    by_model = runs.records.group_by("model").agg(pl.col("bleu").is_null().all())
    assert dict(by_model.rows()) == {"small": True, "large": True, "other": False}


def test_a_blank_filling_sweep_has_targets_of_its_own(write):
    folder = write(
        further=[fake_sweeps.with_masking], masking="iid", suffix_length=None
    )
    runs = sweep_runs.load([folder])
    assert (runs.masking, runs.suffix_length) == ("iid", None)
    assert set(runs.records.select("length", "num_targets").unique().rows()) == {
        (100, 15 * 2 - 3),
        (200, 30 * 2 - 7),
    }
    rewrite(folder, at("num_targets", 0, 1))
    with pytest.raises(RunError, match="contradicts itself"):
        sweep_runs.load([folder])


@pytest.mark.parametrize(
    ("one", "two", "message"),
    [
        (
            {},
            {"masking": "iid", "suffix_length": None},
            "to continue .* to fill blanks",
        ),
        ({"masking": "iid"}, {"masking": "spans"}, "masking 'iid'.*masking 'spans'"),
        (
            {"masking": "iid", "config": {"seed": 0}},
            {"masking": "iid", "config": {"seed": 1}},
            "seed 0.* seed 1",
        ),
        ({"sample": "uniform"}, {"sample": "by_count"}, "in sample: uniform and by_"),
        ({"config": {"beams": 9}}, {"config": {"beams": 10}}, "in beams: 9 and 10"),
        (
            {"config": {"temperature": 0.5}},
            {"config": {"top_k": 4}},
            "in scheme: temperature 0.5 and temperature 1, the 4",
        ),
        (
            {"config": {"samples": 5}},
            {"config": {"samples": 6}},
            "in samples: 5 and 6",
        ),
    ],
)
def test_sweeps_that_asked_other_things_are_not_merged(write, one, two, message):
    with pytest.raises(UsageError, match=message):
        sweep_runs.load([write("one", **one), write("two", **two)])


def test_a_record_made_twice_may_differ_by_rounding(write):
    one, two = write("one"), write("two")
    records = sweep_runs.load([one]).records
    assert records["suffix_logprob"].min() < -30
    nearby = pl.col("suffix_logprob") * (1 + 0.9 * sweep_runs.ROUNDING)
    rewrite(two, lambda r: r.with_columns(nearby, pl.col("min_margin") + 9e-4))
    assert sweep_runs.load([one, two]).records.equals(records)
    rewrite(two, lambda r: r.with_columns(nearby))
    with pytest.raises(UsageError, match=r"differs in suffix_logprob:"):
        sweep_runs.load([one, two])


def test_the_same_infinity_is_no_difference(write):
    one, two = write("one"), write("two")
    for folder in (one, two):
        rewrite(folder, at("suffix_logprob", 0, float("-inf")))
    assert len(sweep_runs.load([one, two]).records) == 72
    rewrite(two, at("suffix_logprob", 0, -1e30))
    with pytest.raises(UsageError, match=r"differs in suffix_logprob:"):
        sweep_runs.load([one, two])


def test_records_that_differ_are_not_merged(write):
    one, two = write("one"), write("two")
    rewrite(two, at("min_margin", 0, -123.0))
    with pytest.raises(UsageError, match=r"1 records .* 'small'.* in min_margin:"):
        sweep_runs.load([one, two])


@pytest.mark.parametrize(
    ("derived", "message"),
    [
        ({"windows_sha256": "77"}, r"differ in windows .*'5e1f' and '77'"),
        ({"precision": "default"}, "differ in precision"),
        ({"suffix_length": 40}, "differ in suffix length"),
    ],
)
def test_sweeps_of_other_things_are_not_merged(write, derived, message):
    with pytest.raises(UsageError, match=message):
        sweep_runs.load([write("one"), write("two", **derived)])


def test_one_name_for_two_models_is_refused(write):
    one, two = write("one"), write("two", members={"small": 2_000})
    with pytest.raises(UsageError, match=r"two models 'small', .* differ in params"):
        sweep_runs.load([one, two])


def test_a_model_may_have_moved_between_sweeps(write):
    one, two = write("one"), write("two")
    path = two / "config.json"
    path.write_text(path.read_text().replace("runs/small", "elsewhere/small"))
    assert sweep_runs.load([one, two]).models[0].folder == "runs/small"


def test_a_sweep_named_twice_is_refused(write):
    folder = write()
    with pytest.raises(UsageError, match="twice"):
        sweep_runs.load([folder, folder / ".." / folder.name])


@pytest.mark.parametrize(
    "config", [None, "[]", "{}", '{"windows": "w", "derived": {"models": []}}']
)
def test_a_folder_that_is_no_sweep_is_refused(write, config):
    folder = write()
    (folder / "config.json").unlink()
    if config:
        (folder / "config.json").write_text(config)
    with pytest.raises(UsageError, match="give folders that"):
        sweep_runs.load([folder])


@pytest.mark.parametrize("model", [7, "small", {"model": "small"}])
def test_a_config_with_models_that_are_none_is_refused(write, model):
    folder = write()
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["derived"]["models"].append(model)
    path.write_text(json.dumps(config))
    with pytest.raises(UsageError, match="is not the config of a sweep"):
        sweep_runs.load([folder])


def cut(folder, name):
    path = folder / name
    path.write_bytes(path.read_bytes()[:-40])


def without(name):
    return lambda folder: rewrite(folder, lambda records: records.drop(name))


def changed(change):
    return lambda folder: rewrite(folder, change)


def fewer_clusters(folder):
    path = folder / "clusters.parquet"
    pl.read_parquet(path).tail(-1).write_parquet(path)


DAMAGE = {
    "half a config": (
        lambda folder: cut(folder, "config.json"),
        r"config\.json is damaged",
    ),
    "an unfinished sweep": (
        lambda folder: (folder / "records.parquet").unlink(),
        "has not ended; run it again",
    ),
    "half the records": (
        lambda folder: cut(folder, "records.parquet"),
        r"records\.parquet cannot be read",
    ),
    "half the clusters": (
        lambda folder: cut(folder, "clusters.parquet"),
        r"clusters\.parquet cannot be read",
    ),
    "no clusters": (
        lambda folder: (folder / "clusters.parquet").unlink(),
        r"clusters\.parquet cannot be read",
    ),
    "a missing cluster": (fewer_clusters, r"clusters\.parquet lacks"),
    "a missing column": (without("extracted"), "cannot be read .*extracted"),
    "missing records": (
        changed(lambda r: r.tail(-1)),
        r"23 records of 'small' and 24 of another model",
    ),
    "a missing model": (
        changed(lambda r: r.filter(pl.col("model") != "other")),
        r"0 records of 'other'",
    ),
    "an unknown model": (
        changed(lambda r: r.with_columns(model=pl.lit("what"))),
        r"records of 'what'",
    ),
    "no records": (changed(lambda r: r.clear()), "holds no record"),
    "a record twice": (
        changed(lambda r: pl.concat([r.slice(1, 1), r.tail(-1)])),
        "holds a record twice",
    ),
    "other parameters": (changed(at("params", 0, 7)), "parameters"),
    "an unknown verdict": (changed(at("extracted", 0, None)), "lacks a value"),
    "no number": (changed(at("min_margin", 0, float("nan"))), "is no number"),
    "too long a prompt": (changed(at("context", 0, 51)), "longer than its window"),
    "a window that never occurs": (changed(at("count", 0, 0)), "count below 1"),
    "a mismatch behind the right tokens": (
        changed(at("tokens_correct", 0, -1)),
        "contradicts itself",
    ),
    "a share above 1": (
        changed(lambda r: r.with_columns(bleu=pl.lit(1.5))),
        "share outside 0 to 1",
    ),
    "too long a distance": (
        changed(lambda r: r.with_columns(edit_distance=51)),
        "distance longer than a suffix",
    ),
    "extracted, yet nowhere": (
        changed(
            lambda r: r.with_columns(anywhere=False, extracted=True).with_columns(
                first_mismatch=50, tokens_correct=50
            )
        ),
        "extracted, and yet not found anywhere",
    ),
    "a probability that is no number": (
        changed(at("suffix_logprob", 0, float("nan"))),
        "value that is no number",
    ),
    "a verdict against its mismatch": (
        changed(lambda r: r.with_columns(extracted=~pl.col("extracted"))),
        "contradicts itself",
    ),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_named(write, what):
    damage, message = DAMAGE[what]
    folder = write()
    damage(folder)
    with pytest.raises(RunError, match=message):
        sweep_runs.load([folder])


def test_windows_of_unknown_counts(write):
    """Sweeping them again would not help."""
    folder = write()
    rewrite(folder, at("count", 0, None))
    with pytest.raises(UsageError, match="not known how often they occur: make the"):
        sweep_runs.load([folder])


def test_the_sweep_is_known_by_its_records(write):
    one, same, other = write("one"), write("same"), write("other", contexts=(50,))
    first, again, third = (sweep_runs.load([f]).sweeps[0] for f in (one, same, other))
    assert first.records_sha256 == again.records_sha256 != third.records_sha256


def test_a_config_may_hold_more_than_is_needed(write):
    folder = write()
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"decode": True}))
    assert len(sweep_runs.load([folder]).models) == 3
