"""Whole runs, in this process but for the one that is killed."""

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from dpjax import accounting
from experiments import run_folder
from experiments.checkpoints import Checkpoints
from experiments.dp import loop, plan, train
from experiments.dp.train_config import TrainConfig
from experiments.errors import RunError, UsageError

REPOSITORY = pathlib.Path(__file__).parents[3]

pytestmark = pytest.mark.usefixtures("compiled_once")

# Batches of 24 on average in parts of 20: most steps need two parts.
CONFIG = TrainConfig(
    noise_multiplier=1.0,
    batch_size=24,
    physical_batch_size=20,
    num_steps=8,
    learning_rate=0.5,
    momentum=0.9,
    seed=12345,
    log_interval=2,
    checkpoint_interval=3,
)


def config_in(folder, **changes):
    return dataclasses.replace(CONFIG, out=str(folder), **changes)


def final_params(folder):
    """Every leaf of the newest checkpoint, by its place in the tree."""
    config = config_in(folder)
    made = plan.make_plan(config)
    like = made.private_step(config.seed).init(made.init_params(config.seed))
    checkpoints = Checkpoints(folder / "checkpoints")
    progress, state = checkpoints.progress(), checkpoints.restore(like)
    assert progress.step == config.num_steps
    params = {
        jax.tree_util.keystr(path): np.asarray(leaf)
        for path, leaf in jax.tree.leaves_with_path(state.params)
    }
    return progress.ledger, params


def rows_without_speed(folder):
    rows = run_folder.read_metrics(folder)
    return [
        {k: v for k, v in row.items() if k != "examples_per_second"} for row in rows
    ]


def contents(folder):
    return {
        path.relative_to(folder): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "whole"
    assert train.train(config_in(folder)) == folder
    return folder


def assert_same_run(folder, finished):
    ledger, params = final_params(folder)
    expected_ledger, expected_params = final_params(finished)
    assert ledger == expected_ledger
    assert params.keys() == expected_params.keys()
    for name, expected in expected_params.items():
        np.testing.assert_array_equal(params[name], expected, err_msg=name)
    assert rows_without_speed(folder) == rows_without_speed(finished)


def test_run_folder_holds_the_whole_record(finished):
    assert {path.name for path in finished.iterdir()} >= {
        "accuracy.png",
        "checkpoints",
        "config.json",
        "metrics.jsonl",
    }
    rows = run_folder.read_metrics(finished)
    assert [row["step"] for row in rows] == [2, 4, 6, 8]
    for row in rows:
        expected = accounting.epsilon(1.0, 24 / 1437, row["step"], CONFIG.delta)
        assert row["epsilon"] == pytest.approx(expected, rel=1e-9)
        assert 0 <= row["test_accuracy"] <= 1
        assert 0 <= row["train_accuracy"] <= 1
        assert row["examples_per_second"] > 0
    record = json.loads((finished / "config.json").read_text())
    assert record["num_steps"] == 8
    assert record["derived"]["sampling_probability"] == 24 / 1437
    assert record["derived"]["num_train"] == 1437
    assert "loss" in record["derived"]["not_covered_by_epsilon"]


def test_seed_stays_in_the_checkpoints(finished):
    public = [path for path in finished.iterdir() if path.is_file()]
    assert not any(b"12345" in path.read_bytes() for path in public)


def test_finishing_again_changes_nothing(finished, capsys):
    before = contents(finished)
    train.train(config_in(finished))
    assert "Already finished: 8 steps" in capsys.readouterr().out
    after = contents(finished)
    assert after.keys() == before.keys()
    changed = {str(path) for path in after if after[path] != before[path]}
    assert changed <= {"accuracy.png"}


@pytest.mark.parametrize(
    "change", [{"num_steps": 9}, {"l2_clip_norm": 2.0}, {"seed": 6}, {"model": "cnn"}]
)
def test_another_config_is_refused(finished, change):
    before = contents(finished)
    with pytest.raises(UsageError, match=r"holds a run with .*--config\.out"):
        train.train(config_in(finished, **change))
    assert contents(finished) == before


def test_without_a_seed_the_run_goes_on_with_its_own(finished, tmp_path):
    # The seed in the checkpoint is enough: no seed in the config continues the run.
    folder = stopped_at(tmp_path / "run", 5)
    train.train(config_in(folder, seed=None))
    assert_same_run(folder, finished)


def stopped_at(folder, step):
    """A run that an exception ended before its step number `step`."""
    take_step = loop.Loop._take_step

    def stop(self):
        if self._step == step:
            raise KeyboardInterrupt
        return take_step(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.Loop, "_take_step", stop)
        with pytest.raises(KeyboardInterrupt):
            train.train(config_in(folder))
    return folder


# After 2 steps only the checkpoint of step 0 is there; after 5 the row of step 4 has no
# checkpoint yet; after 7 there is a checkpoint of step 6.
@pytest.mark.parametrize("step", [0, 2, 5, 7])
def test_stopped_run_ends_like_the_whole_one(finished, tmp_path, step):
    folder = stopped_at(tmp_path / "run", step)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "loss"')
    train.train(config_in(folder))
    assert_same_run(folder, finished)


def test_killed_run_ends_like_the_whole_one(finished, tmp_path):
    folder = tmp_path / "killed"
    config_file = tmp_path / "config.py"
    config_file.write_text(
        "from experiments.dp import train_config\n"
        "def get_config():\n"
        f"    return train_config.make(**{dataclasses.asdict(config_in(folder))})\n"
    )
    # Steps are slowed down so that the signal comes in the middle of the run.
    program = (
        "import runpy, time\n"
        "from experiments.dp import loop\n"
        "take_step = loop.Loop._take_step\n"
        "loop.Loop._take_step = lambda self: (time.sleep(0.2), take_step(self))[1]\n"
        "runpy.run_module('experiments.dp.train', run_name='__main__')\n"
    )
    command = [sys.executable, "-c", program, f"--config={config_file}"]
    with (tmp_path / "output").open("w") as output:
        process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env={
                **os.environ,
                "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
            },
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        deadline = time.monotonic() + 120
        while not (folder / "checkpoints" / "step_3").exists():
            assert process.poll() is None, (tmp_path / "output").read_text()
            assert time.monotonic() < deadline, (tmp_path / "output").read_text()
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    assert not (folder / "checkpoints" / "step_8").exists()
    train.train(config_in(folder))
    assert_same_run(folder, finished)


def test_damaged_checkpoint_is_refused(tmp_path):
    folder = stopped_at(tmp_path / "run", 7)
    (folder / "checkpoints" / "step_6" / "progress.json").write_text("{")
    before = contents(folder)
    with pytest.raises(RunError, match=r"step_6 is damaged .* continue from step 3"):
        train.train(config_in(folder))
    assert contents(folder) == before


def test_lost_checkpoints_are_not_trained_over(tmp_path):
    folder = stopped_at(tmp_path / "run", 3)
    for path in sorted((folder / "checkpoints").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    with pytest.raises(RunError, match="metrics but no checkpoint"):
        train.train(config_in(folder))
    assert [row["step"] for row in run_folder.read_metrics(folder)] == [2]


def test_noise_is_calibrated_to_the_target(tmp_path):
    made = plan.make_plan(
        config_in(tmp_path, noise_multiplier=None, epsilon=2.0, num_steps=50)
    )
    spent = accounting.epsilon(made.noise_multiplier, 24 / 1437, 50, CONFIG.delta)
    assert 1.99 < spent <= 2.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dataset": "digit"}, "dataset='digit' is unknown.*did you mean 'digits'"),
        ({"dataset": "idx:/nowhere"}, "'idx:/nowhere': there is no such folder"),
        ({"model": "mlpp"}, "model='mlpp' is unknown.*did you mean 'mlp'"),
        ({"model": "tempered_cnn"}, r"does not fit image inputs of shape \(8, 8, 1\)"),
        ({"optimizer": "sdg"}, "config.optimizer='sdg' is unknown.*sgd"),
        ({"batch_size": 1438}, "config.batch_size=1438, expected at most the 1437"),
        (
            {"noise_multiplier": None, "epsilon": 1e-300, "delta": 1e-300},
            "config.epsilon=1e-300 cannot be reached.*raise --config.epsilon",
        ),
    ],
)
def test_bad_input_touches_no_folder(tmp_path, changes, message):
    folder = tmp_path / "run"
    with pytest.raises(UsageError, match=message) as error:
        train.train(config_in(folder, **changes))
    assert "\n" not in str(error.value)
    assert not folder.exists()


@pytest.mark.parametrize(
    ("dataset", "model", "expected"),
    [
        ("digits", "mlp", "digits-mlp"),
        ("idx:/data/fashion", "cnn:channels=4-8", "idx-fashion-cnn"),
        ("stdlib", "transformer:layers=2:width=64", "stdlib-transformer"),
    ],
)
def test_new_folders_have_plain_names(dataset, model, expected):
    config = dataclasses.replace(CONFIG, dataset=dataset, model=model)
    assert train._slug(config) == expected


def test_foreign_folder_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"holds 'notes\.txt' but no config\.json"):
        train.train(config_in(tmp_path))
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_no_noise_is_an_infinite_epsilon(tmp_path, capsys):
    train.train(config_in(tmp_path, noise_multiplier=0.0, num_steps=1))
    assert run_folder.read_metrics(tmp_path)[0]["epsilon"] is None
    assert "epsilon inf" in capsys.readouterr().out


def test_wrong_usage_is_one_line_and_code_2():
    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "experiments.dp.train",
            "--config=experiments/dp/configs/digits_mlp.py",
            "--config.bach_size=3",
        ],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert result.stderr.startswith(
        "error: config key 'bach_size' is unknown: did you mean batch_size"
    )
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""
