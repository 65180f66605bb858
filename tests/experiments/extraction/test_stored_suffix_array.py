import re

import numpy as np
import pytest

from experiments import run_folder
from experiments.errors import RunError, UsageError
from experiments.extraction import corpus, stored_suffix_array, suffix_array

IDS = np.array([7, 3, 0, 7, 3], np.uint16)


def opened(folder, ids=IDS):
    folder.mkdir(exist_ok=True)
    np.save(folder / "tokens.npy", ids)
    return corpus.load(f"tokens:{folder}/tokens.npy", folder / "unused", eos_id=0)


def load(found):
    return stored_suffix_array.load(found, stored_suffix_array.folder_of(found))


def test_it_is_built_once_and_stays_on_the_disk(tmp_path, monkeypatch, capsys):
    found = opened(tmp_path)
    first = load(found)
    assert first.tolist() == [2, 4, 1, 3, 0]
    assert isinstance(first, np.memmap)
    assert capsys.readouterr().out == "Sorting 5 suffixes ...\n"
    monkeypatch.setattr(suffix_array, "build", None)
    assert load(opened(tmp_path)).tolist() == first.tolist()
    assert {path.name for path in tmp_path.iterdir()} == {
        *("tokens.npy", "suffix_array.npy", "suffix_array.json", ".lock"),
    }


def test_that_of_another_corpus(tmp_path):
    load(opened(tmp_path))
    before = (tmp_path / "suffix_array.npy").read_bytes()
    other = opened(tmp_path, IDS[::-1])
    with pytest.raises(UsageError, match="does not belong to the corpus") as caught:
        load(other)
    assert "suffix_array.npy" in str(caught.value)
    assert (tmp_path / "suffix_array.npy").read_bytes() == before


@pytest.mark.parametrize(
    "damage", ["other", "shorter", "cut", "empty", "archive", "missing", "floats"]
)
def test_a_damaged_array(tmp_path, damage):
    found = opened(tmp_path)
    path = tmp_path / "suffix_array.npy"
    rows = np.array(load(found))
    if damage == "other":
        np.save(path, rows[[1, 0, 2, 3, 4]])
    elif damage == "shorter":
        np.save(path, rows[:-1])
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-3])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "archive":
        with path.open("wb") as file:
            np.savez(file, rows)
    elif damage == "missing":
        path.unlink()
    else:
        np.save(path, rows.astype(np.float32))
    with pytest.raises(RunError, match="is not the array that suffix_array"):
        load(found)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"format": "x"}'])
def test_a_record_that_is_none(tmp_path, text):
    found = opened(tmp_path)
    load(found)
    (tmp_path / "suffix_array.json").write_text(text)
    with pytest.raises(RunError, match="does not describe a suffix array"):
        load(found)


def test_what_a_killed_build_left_is_built_again(tmp_path):
    found = opened(tmp_path)
    (tmp_path / "suffix_array.npy.partial").write_bytes(b"half")
    (tmp_path / "suffix_array.npy").write_bytes(b"without its record")
    assert load(found).tolist() == [2, 4, 1, 3, 0]


def test_two_builds_at_once(tmp_path):
    found = opened(tmp_path)
    message = re.escape(f"{str(tmp_path)!r} is in use by another process: wait for")
    with run_folder.locked(tmp_path), pytest.raises(RunError, match=message):
        load(found)


def test_tokens_that_lie_in_no_file():
    found = corpus.Corpus(IDS, 0, 8, "0", None, None)
    with pytest.raises(ValueError, match="not the memory map of a file"):
        stored_suffix_array.folder_of(found)


def test_each_token_file_of_a_folder_has_its_own(tmp_path):
    opened(tmp_path)
    for name, ids in (("one", IDS), ("two", IDS[::-1])):
        np.save(tmp_path / f"{name}.npy", ids)
        found = corpus.load(f"tokens:{tmp_path}/{name}.npy", tmp_path / "_", eos_id=0)
        folder = stored_suffix_array.folder_of(found)
        assert folder == tmp_path / f"{name}.suffix_array"
        assert load(found).tolist() == suffix_array.build(ids)[0].tolist()
