import json
import re

import numpy as np
import polars as pl
import pytest

from experiments.errors import RunError
from experiments.extraction import gallery, sweep_runs
from tests.experiments.extraction import fake_sweeps

WINDOWS = fake_sweeps.make_windows(lengths=(100, 200), per_bucket=10)
MEMBERS = {"small": 100_000, "large": 5_000_000}
BASELINES = {"other": 100_000}
TEXT = "".join(f"def f{i}(x):\n\treturn x + {i}\n" for i in range(200))


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweeps") / "sweep"
    return fake_sweeps.write(
        folder,
        WINDOWS,
        MEMBERS,
        BASELINES,
        (50, 150),
        text=TEXT,
        further=[fake_sweeps.with_anywhere, fake_sweeps.with_plainness],
    )


@pytest.fixture(scope="module")
def runs(sweep):
    return sweep_runs.load([sweep])


def changed(sweep, tmp_path, **columns):
    """The sweep with other columns in its records."""
    folder = tmp_path / "changed"
    folder.mkdir()
    for name in ("config.json", "clusters.parquet"):
        (folder / name).write_bytes((sweep / name).read_bytes())
    records = pl.read_parquet(sweep / "records.parquet").with_columns(**columns)
    records.drop([name for name, v in columns.items() if v is None]).write_parquet(
        folder / "records.parquet"
    )
    return sweep_runs.load([folder])


def test_every_answer_is_that_of_the_records(sweep, runs):
    found = gallery.collect(runs, 1_000, 0)
    # 80 windows are prompted by 50 tokens, the longer half by 150 too.
    rows = found.data["rows"]
    assert len(rows) == 120
    assert found.notes == (
        "All 120 prompts are here; a prompt is a window at one context.",
    )
    assert [model["name"] for model in found.data["models"]] == [*MEMBERS, *BASELINES]
    records = {
        (r["model"], r["window_id"], r["context"]): r
        for r in pl.read_parquet(sweep / "records.parquet").iter_rows(named=True)
    }
    windows = pl.read_parquet(sweep / "windows/windows.parquet")["tokens"].to_list()
    assert found.data["windows"] == dict(enumerate(windows))
    for row in rows:
        truth = windows[row["window_id"]][row["context"] :][:50]
        for model, answer in zip(found.data["models"], row["answers"], strict=True):
            record = records[model["name"], row["window_id"], row["context"]]
            assert (row["count"], row["bucket"]) == (record["count"], record["bucket"])
            assert row["whitespace"] == pytest.approx(record["whitespace"], abs=1e-4)
            assert row["entropy"] == pytest.approx(record["entropy"], abs=1e-4)
            assert answer["extracted"] == record["extracted"]
            assert answer["right"] == record["tokens_correct"]
            assert answer["mismatch"] == record["first_mismatch"]
            assert np.float32(answer["margin"]) == np.float32(record["min_margin"])
            shown = truth[: answer["matching"]] + answer["rest"]
            assert shown == record["generated"]
            if answer["rest"]:
                assert answer["rest"][0] != truth[answer["matching"]]


def test_what_tokens_say_is_there_for_all_of_them(runs):
    found = gallery.collect(runs, 1_000, 0)
    vocabulary = found.data["vocabulary"]
    used = {i for ids in found.data["windows"].values() for i in ids}
    used |= {i for row in found.data["rows"] for a in row["answers"] for i in a["rest"]}
    assert vocabulary.keys() == used
    text = "".join(vocabulary[i] for i in found.data["windows"][0])
    assert text in TEXT.replace("\n", "\u21b5\n").replace("\t", "\u21e5\t")


def test_a_choice_is_seeded_and_stated(runs):
    few = gallery.collect(runs, 30, 0)
    assert len(few.data["rows"]) == 30
    assert "30 of 120 prompts are here" in few.notes[0]
    assert "seed 0" in few.notes[0]
    assert few == gallery.collect(runs, 30, 0)
    assert few.data["rows"] != gallery.collect(runs, 30, 1).data["rows"]
    buckets = [row["bucket"] for row in few.data["rows"]]
    assert len(set(buckets)) == 4
    everything = gallery.collect(runs, 1_000, 0).data
    pairs = zip(few.data["selections"], everything["selections"], strict=True)
    for part, whole in pairs:
        assert part["all"] == whole["all"] == len(whole["rows"])
        shown = [few.data["rows"][place] for place in part["rows"]]
        assert all(
            row in [everything["rows"][place] for place in whole["rows"]]
            for row in shown
        )
    assert gallery.collect(runs, 0, 0).data["rows"] == []


def test_only_by_the_largest_is_so(runs):
    data = gallery.collect(runs, 1_000, 0).data
    (selection,) = (
        s
        for s in data["selections"]
        if s["title"].startswith("Only by th") and "largest" in s["title"]
    )
    assert selection["rows"]
    for place in selection["rows"]:
        small, large, _ = data["rows"][place]["answers"]
        assert large["extracted"]
        assert not small["extracted"]


def test_without_a_search_of_the_corpus_the_plain_rule_is_said(sweep, runs, tmp_path):
    plain = changed(sweep, tmp_path, anywhere=None)
    notes = gallery.collect(plain, 1_000, 0).notes
    assert "so this is the plain rule" in notes[1]
    sizes = [
        next(s["all"] for s in found.data["selections"] if "largest" in s["title"])
        for found in (gallery.collect(runs, 10, 0), gallery.collect(plain, 10, 0))
    ]
    assert 0 < sizes[0] < sizes[1]


def test_blanks_have_no_continuation_and_are_not_searched_for(tmp_path):
    folder = fake_sweeps.write(
        tmp_path / "sweep",
        WINDOWS,
        MEMBERS,
        further=[fake_sweeps.with_masking],
        masking="iid",
        suffix_length=None,
    )
    found = gallery.collect(sweep_runs.load([folder]), 1_000, 0)
    assert not any("plain rule" in note for note in found.notes)
    assert found.data["suffix_length"] is None
    assert all(row["whitespace"] is None for row in found.data["rows"])
    for row in found.data["rows"]:
        for answer in filter(None, row["answers"]):
            assert answer["rest"] == ([] if answer["extracted"] else None)


def test_without_decoding_a_continuation_ends_at_the_first_mismatch(sweep, tmp_path):
    runs = changed(sweep, tmp_path, generated=None)
    for row in gallery.collect(runs, 1_000, 0).data["rows"]:
        for answer in row["answers"]:
            assert answer["matching"] == answer["mismatch"]
            assert answer["rest"] == ([] if answer["extracted"] else None)


def test_a_model_that_was_not_asked_has_no_answer(sweep, tmp_path):
    other = fake_sweeps.write(
        tmp_path / "other", WINDOWS, {"extra": 10}, {}, (50,), text=TEXT
    )
    runs = sweep_runs.load([sweep, other])
    data = gallery.collect(runs, 1_000, 0).data
    for row in data["rows"]:
        asked = [answer is not None for answer in row["answers"]]
        assert asked == [True, True, True, row["context"] == 50]


def test_margins_without_bounds_are_numbers(sweep, tmp_path):
    runs = changed(sweep, tmp_path, min_margin=pl.lit(-np.inf, pl.Float32))
    data = gallery.collect(runs, 10, 0).data
    assert data["rows"][0]["answers"][0]["margin"] < -3e38
    json.dumps(data, allow_nan=False)


def test_a_continuation_of_another_length_is_refused(sweep, tmp_path):
    runs = changed(sweep, tmp_path, generated=pl.col("generated").list.head(49))
    with pytest.raises(RunError, match="continuation of other than 50 tokens"):
        gallery.collect(runs, 10, 0)


@pytest.mark.parametrize(
    ("missing", "note"),
    [
        ("windows.parquet", "Prompts and continuations are not known: .* holds no"),
        ("tokenizer.json", "so that tokens are shown by their ids"),
    ],
)
def test_what_is_missing_is_said(tmp_path, missing, note):
    folder = fake_sweeps.write(tmp_path / "sweep", WINDOWS, MEMBERS, text=TEXT)
    (folder / "windows" / missing).unlink()
    found = gallery.collect(sweep_runs.load([folder]), 1_000, 0)
    assert found.data["vocabulary"] is None
    assert (found.data["windows"] is None) == (missing == "windows.parquet")
    assert any(re.search(note, found_note) for found_note in found.notes)
