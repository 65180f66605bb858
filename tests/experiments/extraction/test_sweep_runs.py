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
