import json
import os

import numpy as np
import polars
import pytest

from experiments.errors import RunError, UsageError
from experiments.extraction import evaluation_set


def part(length, num_windows):
    numbers = np.arange(num_windows)
    return evaluation_set.rows(
        np.full((num_windows, length), 65_535, np.uint16)
        - numbers[:, None].astype("u2"),
        bucket_K=numbers,
        count_K=numbers + 2**40,
        position_K=numbers + 2**41,
        cluster_K=numbers + 2**42,
    )


def written(folder, **manifest):
    folder.mkdir(exist_ok=True)
    parts = [part(2, 3), part(4, 0), part(3, 1)]
    evaluation_set.write(folder, parts, manifest, tokenizer=None)
    return folder


def test_rows_come_back_with_their_columns_and_types(tmp_path):
    loaded = evaluation_set.load(written(tmp_path / "windows", seed=3))
    expected = {
        "window_id": (polars.Int64, [0, 1, 2, 3]),
        "length": (polars.Int32, [2, 2, 2, 3]),
        "bucket": (polars.Int32, [0, 1, 2, 0]),
        "count": (polars.Int64, [2**40, 2**40 + 1, 2**40 + 2, 2**40]),
        "position": (polars.Int64, [2**41, 2**41 + 1, 2**41 + 2, 2**41]),
        "tokens": (
            polars.List(polars.UInt32),
            [[65_535] * 2, [65_534] * 2, [65_533] * 2, [65_535] * 3],
        ),
        "cluster": (polars.Int64, [2**42, 2**42 + 1, 2**42 + 2, 2**42]),
    }
    assert loaded.windows.columns == list(expected)
    for name, (dtype, values) in expected.items():
        assert loaded.windows[name].dtype == dtype
        assert loaded.windows[name].to_list() == values
    assert loaded.manifest["seed"] == 3
    assert loaded.manifest["num_windows"] == 4
    assert loaded.sha256 == loaded.manifest["windows_sha256"]


def test_the_same_rows_make_the_same_bytes(tmp_path):
    one, two = written(tmp_path / "one"), written(tmp_path / "two")
    for name in (evaluation_set.WINDOWS, evaluation_set.MANIFEST):
        assert (one / name).read_bytes() == (two / name).read_bytes()


def test_the_tokenizer_is_copied(tmp_path):
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text("{}")
    folder = tmp_path / "windows"
    folder.mkdir()
    evaluation_set.write(folder, [part(2, 1)], {}, tokenizer)
    assert (folder / "tokenizer.json").read_text() == "{}"
    assert not list(folder.glob("*.partial"))


def test_a_folder_without_a_set_is_wrong_usage(tmp_path):
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(UsageError, match=r"not an evaluation set.*build_dataset"):
            evaluation_set.load(folder)


def test_damage_is_found(tmp_path):
    folder = written(tmp_path / "windows")
    windows, manifest = folder / "windows.parquet", folder / "manifest.json"
    whole, text = windows.read_bytes(), manifest.read_text()
    windows.write_bytes(whole[:-1])
    with pytest.raises(RunError, match=r"has the sha256 .* manifest.json says"):
        evaluation_set.load(folder)
    windows.unlink()
    with pytest.raises(RunError, match=r"windows.parquet is missing"):
        evaluation_set.load(folder)
    windows.write_bytes(whole)
    for broken in ("{", "[]", "{}", text.replace("set 1", "set 9")):
        manifest.write_text(broken)
        with pytest.raises(RunError, match="not the manifest of an evaluation set"):
            evaluation_set.load(folder)


def test_other_columns_are_refused(tmp_path):
    folder = written(tmp_path / "windows")
    path = folder / "windows.parquet"
    polars.read_parquet(path).drop("cluster").write_parquet(path)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["windows_sha256"] = evaluation_set._sha256(path)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(RunError, match="has the columns"):
        evaluation_set.load(folder)


def test_a_folder_is_free_same_or_foreign(tmp_path):
    folder = tmp_path / "windows"
    folder.mkdir()
    (folder / ".lock").touch()
    (folder / "windows.parquet.partial").touch()
    (folder / "corpus").mkdir()
    assert evaluation_set.finished(folder, {"seed": 1}) is None
    written(folder, seed=1, lengths=[2])
    assert evaluation_set.finished(folder, {"seed": 1})["lengths"] == [2]
    with pytest.raises(UsageError, match=r"with seed=1 \(now 2\): give another --out"):
        evaluation_set.finished(folder, {"seed": 2, "lengths": [2]})
    (folder / "manifest.json").unlink()
    with pytest.raises(UsageError, match=r"holds 'windows.parquet' but no manifest"):
        evaluation_set.finished(folder, {"seed": 1})


def test_a_set_that_was_stopped_while_it_took_its_place_is_written_again(
    tmp_path, monkeypatch
):
    replace = os.replace

    def stopped(source, target):
        if target.name == evaluation_set.MANIFEST:
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", stopped)
    with pytest.raises(KeyboardInterrupt):
        written(tmp_path / "set", seed=1)
    monkeypatch.undo()
    folder = tmp_path / "set"
    assert (folder / evaluation_set.WINDOWS).exists()
    assert evaluation_set.finished(folder, {"seed": 1}) is None
    assert evaluation_set.load(written(folder, seed=1)).manifest["seed"] == 1
