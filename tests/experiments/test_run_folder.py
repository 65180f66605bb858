import json

import pytest

from experiments import run_folder
from experiments.errors import RunError, UsageError


def test_fresh_folders_never_coincide(tmp_path):
    chosen = {run_folder.choose("", "digits-mlp", root=tmp_path) for _ in range(3)}
    assert len(chosen) == 3
    assert all(path.is_dir() and path.parent == tmp_path for path in chosen)


def test_named_folder_is_made_with_its_parents(tmp_path):
    assert run_folder.choose(str(tmp_path / "a" / "b"), "unused").is_dir()


def test_a_file_cannot_be_a_run_folder(tmp_path):
    path = tmp_path / "file"
    path.write_text("mine")
    with pytest.raises(UsageError, match=r"config\.out=.*file"):
        run_folder.choose(str(path), "unused")
    assert path.read_text() == "mine"


def test_same_config_is_accepted_again(tmp_path):
    run_folder.claim(tmp_path, {"a": 1})
    run_folder.claim(tmp_path, {"a": 1})
    assert json.loads((tmp_path / "config.json").read_text()) == {"a": 1}


@pytest.mark.parametrize(
    "config", [{"a": 2, "b": 2}, {"a": 1}, {"a": 1, "b": 2, "c": 3}]
)
def test_other_config_is_refused_and_nothing_changes(tmp_path, config):
    run_folder.claim(tmp_path, {"a": 1, "b": 2})
    before = (tmp_path / "config.json").read_bytes()
    with pytest.raises(UsageError, match=r"holds a run with .*another --config\.out"):
        run_folder.claim(tmp_path, config)
    assert (tmp_path / "config.json").read_bytes() == before


def test_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(UsageError, match=r"holds 'thesis\.tex' but no config\.json"):
        run_folder.claim(tmp_path, {"a": 1})
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("text", ["", "{", "[1]"])
def test_damaged_config(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(RunError, match=r"config\.json is not the config of a run"):
        run_folder.claim(tmp_path, {"a": 1})


def test_killed_while_writing_the_config(tmp_path):
    (tmp_path / "config.json.partial").write_text('{"a"')
    run_folder.claim(tmp_path, {"a": 1})
    assert json.loads((tmp_path / "config.json").read_text()) == {"a": 1}


def test_one_process_at_a_time(tmp_path):
    with (
        run_folder.locked(tmp_path),
        pytest.raises(RunError, match="in use by another"),
        run_folder.locked(tmp_path),
    ):
        pass
    with run_folder.locked(tmp_path):
        pass


def test_metrics_after_a_crash(tmp_path):
    for step in (2, 4, 6):
        run_folder.append_metrics(tmp_path, {"step": step})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "lo')
    assert [row["step"] for row in run_folder.read_metrics(tmp_path)] == [2, 4, 6]
    run_folder.truncate_metrics(tmp_path, last_step=4)
    run_folder.append_metrics(tmp_path, {"step": 6})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [2, 4, 6]


def test_damaged_metrics(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 2}\nrubbish\n')
    with pytest.raises(RunError, match="row 2 is not JSON"):
        run_folder.read_metrics(tmp_path)


def test_no_metrics_yet(tmp_path):
    assert run_folder.read_metrics(tmp_path) == []


@pytest.mark.parametrize("flag", ["--config.out", "--out"])
def test_a_place_that_cannot_be_a_folder(tmp_path, flag):
    path = tmp_path / "file"
    path.touch()
    message = rf"^{flag.lstrip('-')}='.*/file' cannot be .*: give another {flag}$"
    with pytest.raises(UsageError, match=message):
        run_folder.choose(str(path), "run", flag=flag)
