"""Bad command lines, given to the smallest program that has a config."""

import pathlib
import subprocess
import sys

import pytest

REPOSITORY = pathlib.Path(__file__).parents[2]

PROGRAM = """
import sys
from ml_collections import config_flags
from experiments import command_line
from experiments.errors import RunError, UsageError

def main():
    config = command_line.load_config()
    if config.mode == "fails":
        raise RunError("the disk\\nis full")
    if config.mode == "no_file":
        open("nowhere/file", "w")
    if config.mode == "interrupted":
        raise KeyboardInterrupt
    if config.mode == "defect":
        raise ZeroDivisionError("a bug")
    print(config.steps, config.models, sorted(command_line.overridden_keys()))

config_flags.DEFINE_config_file("config")
command_line.run(main, config_keys=["steps", "rate", "mode"])
"""

CONFIG = """
import ml_collections
def get_config():
    return ml_collections.ConfigDict(
        {"steps": 3, "rate": 0.5, "mode": "works", "models": ("a",)}
    )
"""


@pytest.fixture
def run(tmp_path):
    (tmp_path / "config.py").write_text(CONFIG)
    (tmp_path / "broken.py").write_text("def get_config(:")
    (tmp_path / "number.py").write_text("def get_config():\n    return 3\n")

    def run(*arguments):
        return subprocess.run(
            [sys.executable, "-c", PROGRAM, *arguments],
            cwd=tmp_path,
            env={"PYTHONPATH": str(REPOSITORY), "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            check=False,
        )

    return run


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "error: --config is missing: give --config=FILE.py"),
        (["--config=nowhere.py"], "error: --config=nowhere.py: expected a Python file"),
        (["--config=number.py"], "error: --config=number.py: expected a Python file"),
        (["--config=broken.py"], "error: the config file failed: SyntaxError"),
        (
            ["--config=config.py", "--config.step=4"],
            "error: config key 'step' is unknown: did you mean steps? the keys are "
            "steps, rate, mode",
        ),
        (
            ["--config=config.py", "--config.zzz=4"],
            "error: config key 'zzz' is unknown: the keys are steps, rate, mode",
        ),
        (
            ["--config=config.py", "--config.steps=few"],
            "error: flag --config.steps=few: expected an integer",
        ),
        (
            ["--config=config.py", "--config.rate=slow"],
            "error: flag --config.rate=slow: expected a number",
        ),
        (
            ["--config=config.py", "--confg=x"],
            "error: Unknown command line flag 'confg'",
        ),
        (["--config=config.py", "more"], "error: unexpected argument 'more'"),
    ],
)
def test_wrong_usage_is_one_line_and_code_2(run, arguments, message):
    result = run(*arguments)
    assert result.stderr.startswith(message)
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""
    assert result.returncode == 2


def test_a_good_command_line(run):
    result = run("--config=config.py", "--config.steps=5", "--config.models=/b/c,/d")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == "5 ('/b/c', '/d') ['models', 'steps']\n"


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("fails", "error: the disk is full\n"),
        ("no_file", "error: [Errno 2] No such file or directory: 'nowhere/file'\n"),
        ("interrupted", "error: interrupted\n"),
    ],
)
def test_failure_is_one_line_and_code_1(run, mode, message):
    result = run("--config=config.py", f"--config.mode={mode}")
    assert (result.returncode, result.stderr) == (1, message)


def test_a_defect_keeps_its_traceback(run):
    result = run("--config=config.py", "--config.mode=defect")
    assert result.returncode == 1
    assert "Traceback" in result.stderr


@pytest.mark.parametrize("flag", ["--help", "--helpfull"])
def test_help_is_no_failure(run, flag):
    result = run(flag)
    assert result.returncode == 0
    assert "--config" in result.stdout
