"""Whole runs of a tiny model, in this process but for one."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from experiments import models, run_folder
from experiments.checkpoints import Checkpoints
from experiments.errors import RunError, UsageError
from experiments.extraction import lm_loop, lm_plan, train_lm
from experiments.extraction.corpus import Corpus
from experiments.extraction.lm_config import LmConfig
from experiments.models import language_models

REPOSITORY = pathlib.Path(__file__).parents[3]
VOCABULARY_SIZE = 64

CONFIG = LmConfig(
    eos_id=0,
    model="gpt_neox:layers=1:width=16:heads=2",
    max_positions=12,
    sequence_length=8,
    batch_size=4,
    microbatch_size=2,
    num_steps=8,
    learning_rate=0.01,
    seed=5,
    log_interval=3,
    checkpoint_interval=2,
)


@pytest.fixture(scope="module", autouse=True)
def _compiled_once_and_cheaply(compiled_once, compiled_cheaply):
    """Most tests start the same run, of few steps."""


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "tokens.npy"
    tokens_N = np.random.default_rng(0).integers(1, VOCABULARY_SIZE, 100, np.uint16)
    tokens_N[::10], tokens_N[1] = 0, VOCABULARY_SIZE - 1
    np.save(path, tokens_N)
    return path


@pytest.fixture(scope="module")
def config_in(tokens):
    def config_in(folder, **changes):
        values = {"corpus": f"tokens:{tokens}", "out": str(folder), **changes}
        return dataclasses.replace(CONFIG, **values)

    return config_in


@pytest.fixture(scope="module")
def finished(config_in, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "whole"
    assert train_lm.train(config_in(folder)) == folder
    return folder


def rows_without_speed(folder):
    rows = run_folder.read_metrics(folder)
    return [{k: v for k, v in row.items() if k != "tokens_per_second"} for row in rows]


def contents(folder):
    return {
        path.relative_to(folder): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def assert_same_run(folder, finished):
    for part in ("model/model.safetensors", "model/config.json", "config.json"):
        assert (folder / part).read_bytes() == (finished / part).read_bytes(), part
    assert rows_without_speed(folder) == rows_without_speed(finished)


def test_run_folder_holds_the_whole_record(finished, tokens):
    assert {path.name for path in finished.iterdir()} >= {
        "checkpoints",
        "config.json",
        "loss.png",
        "metrics.jsonl",
        "model",
    }
    rows = run_folder.read_metrics(finished)
    assert [row["step"] for row in rows] == [3, 6, 8]
    # 100 tokens are 12 crops of 8, of which a step takes 4.
    assert [row["epoch"] for row in rows] == [1.0, 2.0, 8 / 3]
    assert all(row["tokens_per_second"] > 0 for row in rows)
    # An untrained model has log(64) = 4.16 nats to lose.
    assert 4.3 > rows[0]["loss"] > rows[1]["loss"] > rows[2]["loss"] > 0
    record = json.loads((finished / "config.json").read_text())
    assert record["seed"] == 5
    assert "out" not in record
    derived = record["derived"]
    assert derived["num_tokens"] == 100
    assert derived["vocabulary_size"] == VOCABULARY_SIZE
    assert derived["epochs"] == 8 / 3
    assert len(derived["corpus_sha256"]) == 64


def test_the_model_is_the_last_state(finished, config_in):
    model, params = models.load(finished)
    config = model.config
    assert config.vocabulary_size == VOCABULARY_SIZE
    assert config.max_positions == 12
    assert config.bos_id == config.eos_id == 0
    plan = made_plan(config_in(finished))
    loop = lm_loop.LmLoop(finished, plan, Checkpoints(finished / "checkpoints"))
    assert loop.num_steps == CONFIG.num_steps
    jax.tree.map(np.testing.assert_array_equal, params, loop.params)


def made_plan(config):
    tokens_N = np.load(config.corpus.removeprefix("tokens:"), mmap_mode="r")
    return lm_plan.make_plan(
        config, Corpus(tokens_N, 0, VOCABULARY_SIZE, "", None, None)
    )


def test_rows_hold_mean_losses_and_the_rate_of_their_step(finished, config_in):
    rows = run_folder.read_metrics(finished)
    plan = made_plan(config_in(finished))
    rates = plan.learning_rates()
    for row in rows:
        assert row["learning_rate"] == pytest.approx(float(rates(row["step"] - 1)))
    assert plan.warmup_steps == 0
    assert rows[0]["learning_rate"] < CONFIG.learning_rate


def test_losses_are_averaged_over_the_steps_of_the_row(finished, config_in, tmp_path):
    each = tmp_path / "each"
    train_lm.train(config_in(each, log_interval=1))
    losses = [row["loss"] for row in run_folder.read_metrics(each)]
    rows = run_folder.read_metrics(finished)
    expected = [np.mean(losses[:3]), np.mean(losses[3:6]), np.mean(losses[6:])]
    np.testing.assert_allclose([r["loss"] for r in rows], expected, rtol=1e-6)


def test_finishing_again_changes_nothing(finished, config_in, capsys):
    before = contents(finished)
    train_lm.train(config_in(finished))
    assert "Already finished: 8 steps" in capsys.readouterr().out
    after = contents(finished)
    assert after.keys() == before.keys()
    changed = {str(path) for path in after if after[path] != before[path]}
    assert changed <= {"loss.png"}


@pytest.mark.parametrize(
    "change",
    [
        {"num_steps": 9},
        {"learning_rate": 0.1},
        {"seed": 6},
        {"model": "gpt2:layers=1:width=16:heads=2"},
        {"corpus": "tokens:/nowhere.npy"},
    ],
)
def test_another_config_is_refused(finished, config_in, change):
    before = contents(finished)
    with pytest.raises(UsageError, match=r"holds a run with .*--config\.out"):
        train_lm.train(config_in(finished, **change))
    assert contents(finished) == before


def test_a_changed_corpus_is_refused(tokens, config_in, tmp_path):
    path = tmp_path / "tokens.npy"
    tokens_N = np.load(tokens)
    np.save(path, tokens_N)
    config = config_in(tmp_path / "run", corpus=f"tokens:{path}")
    folder = train_lm.train(config)
    before = contents(folder)
    tokens_N[50] += 1
    np.save(path, tokens_N)
    with pytest.raises(UsageError, match=r"corpus_sha256=.*the same corpus") as error:
        train_lm.train(config)
    assert "\n" not in str(error.value)
    assert contents(folder) == before


def stopped_after(config, num_saves):
    """The folder of a run that ended, without a chance to tidy up, at a save."""
    save = Checkpoints.save
    saves = []

    def stop(self, progress, state):
        if len(saves) == num_saves:
            raise KeyboardInterrupt
        saves.append(progress.step)
        save(self, progress, state)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoints, "save", stop)
        with pytest.raises(KeyboardInterrupt):
            train_lm.train(config)
    return pathlib.Path(config.out)


# The checkpoints are of steps 0, 2, 4, 6 and 8, the rows of steps 3, 6 and 8: stopped
# before the fourth save, the run has written a row that its checkpoint is too old for.
@pytest.mark.parametrize("num_saves", [0, 1, 2, 3, 4])
def test_stopped_run_ends_like_the_whole_one(finished, config_in, tmp_path, num_saves):
    config = config_in(tmp_path / "run")
    folder = stopped_after(config, num_saves)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "loss"')
    partial = folder / "checkpoints" / "step_4.partial"
    partial.mkdir(parents=True)
    (partial / "progress.json").write_text("{")
    train_lm.train(config)
    assert_same_run(folder, finished)


def test_stopped_before_the_model_was_saved(finished, config_in, tmp_path, monkeypatch):
    config = config_in(tmp_path / "run")

    def stop(folder, *args, **kwargs):
        partial = folder.with_name("model.partial")
        partial.mkdir()
        (partial / "config.json").write_text("{")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(models, "save", stop)
        with pytest.raises(KeyboardInterrupt):
            train_lm.train(config)
    train_lm.train(config)
    assert_same_run(tmp_path / "run", finished)
    assert not (tmp_path / "run" / "model.partial").exists()


T5 = {
    "model": "t5:layers=1:width=8:heads=2:head_dim=6:feed_forward=12",
    "max_positions": None,
    "learning_rate": 0.03,
}


@pytest.fixture(scope="module")
def finished_t5(config_in, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "t5"
    return train_lm.train(config_in(folder, **T5))


def test_a_t5_is_trained_by_the_same_loop(finished_t5):
    model, _ = models.load(finished_t5)
    assert model.config.family == "t5"
    assert model.config.vocabulary_size == VOCABULARY_SIZE + 102
    assert language_models.architecture(finished_t5) == model
    assert model.config.sentinels.first == model.config.vocabulary_size - 1
    record = json.loads((finished_t5 / "config.json").read_text())
    assert record["masking"] is None
    assert record["derived"]["masking"] == "spans"
    assert record["derived"]["vocabulary_size"] == VOCABULARY_SIZE
    rows = run_folder.read_metrics(finished_t5)
    assert [row["step"] for row in rows] == [3, 6, 8]
    # An untrained model has log(166) = 5.1 nats to lose.
    assert 6 > rows[0]["loss"] > max(row["loss"] for row in rows[1:])


@pytest.mark.parametrize("num_saves", [1, 3])
def test_a_stopped_t5_ends_like_the_whole_one(
    finished_t5, config_in, tmp_path, num_saves
):
    config = config_in(tmp_path / "run", **T5)
    stopped_after(config, num_saves)
    train_lm.train(config)
    assert_same_run(tmp_path / "run", finished_t5)


def test_lost_checkpoints_are_not_trained_over(config_in, tmp_path):
    config = config_in(tmp_path / "run", checkpoint_interval=4)
    folder = stopped_after(config, 1)
    (folder / "checkpoints").rename(tmp_path / "elsewhere")
    with pytest.raises(RunError, match="metrics but no checkpoint"):
        train_lm.train(config)
    assert [row["step"] for row in run_folder.read_metrics(folder)] == [3]


def test_a_loss_that_is_not_finite_ends_the_run(config_in, tmp_path):
    # The first update makes weights so large that the logits overflow.
    config = config_in(tmp_path / "run", learning_rate=1e30, warmup_steps=0)
    with pytest.raises(
        RunError, match=r"no finite number .* at step 2: lower"
    ) as error:
        train_lm.train(config)
    assert "the state of step 0 is kept" in str(error.value)
    assert Checkpoints(tmp_path / "run" / "checkpoints").latest_step() == 0
    assert run_folder.read_metrics(tmp_path / "run") == []
    assert not (tmp_path / "run" / "model").exists()


def test_a_model_learns_a_corpus_by_heart(config_in, tmp_path):
    path = tmp_path / "tokens.npy"
    np.save(path, np.arange(VOCABULARY_SIZE, dtype=np.uint16))
    changes = {"num_steps": 60, "learning_rate": 0.03, "checkpoint_interval": 60}
    train_lm.train(config_in(tmp_path / "run", corpus=f"tokens:{path}", **changes))
    assert run_folder.read_metrics(tmp_path / "run")[-1]["loss"] < 0.1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "gpt_nex"}, "model='gpt_nex' is unknown.*did you mean 'gpt_neox'"),
        ({"model": "gpt2:width=10:heads=3"}, "heads=3 does not divide width=10"),
        ({"corpus": "tokens:/nowhere.npy"}, "/nowhere.npy: no such file"),
        (
            {"masking": "spans"},
            r"config\.masking='spans', expected None for a gpt_neox",
        ),
        (T5 | {"max_positions": 9}, r"config\.max_positions=9, expected None for a t5"),
        ({"model": "t5:heads=0"}, "heads='0', expected an integer >= 1"),
        (
            {"sequence_length": 100, "max_positions": None},
            r"has 100 tokens, expected at least config\.sequence_length \+ 1 = 101",
        ),
    ],
)
def test_bad_input_claims_no_folder(config_in, tmp_path, changes, message):
    with pytest.raises(UsageError, match=message) as error:
        train_lm.train(config_in(tmp_path / "run", **changes))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run" / "config.json").exists()


def test_a_folder_serves_once_the_mistake_is_corrected(
    finished, config_in, tmp_path, tokens
):
    folder = tmp_path / "run"
    with pytest.raises(UsageError, match="no such file"):
        train_lm.train(config_in(folder, corpus="tokens:/nowhere.npy"))
    train_lm.train(config_in(folder, corpus=f"tokens:{tokens}"))
    assert_same_run(folder, finished)


def test_the_longest_sequence_is_the_corpus_but_one(config_in, tmp_path):
    config = config_in(tmp_path, sequence_length=99, max_positions=None)
    assert made_plan(config).crops_per_epoch == 1


@pytest.fixture
def texts(tmp_path):
    for n in range(3):
        (tmp_path / f"{n}.txt").write_text(f"text number {n} of three\n" * 9)
    return f"text:{tmp_path}/*.txt"


def test_texts_are_tokenised_into_the_run_folder(config_in, tmp_path, texts, capsys):
    changes = {"corpus": texts, "tokenizer": "bpe:270", "eos_id": None}
    config = config_in(tmp_path / "run", **changes)
    # Killed while it wrote the tokens, the run has left this.
    leftover = tmp_path / "run" / "corpus.partial" / "tokens.npy"
    leftover.parent.mkdir(parents=True)
    leftover.write_bytes(b"half a file")
    folder = train_lm.train(config)
    assert not leftover.parent.exists()
    tokenizer = (folder / "corpus" / "tokenizer.json").read_bytes()
    assert (folder / "model" / "tokenizer.json").read_bytes() == tokenizer
    model, _ = models.load(folder)
    record = json.loads((folder / "config.json").read_text())["derived"]
    assert model.config.vocabulary_size == record["vocabulary_size"] == 270
    assert model.config.eos_id == record["eos_id"] == 0
    manifest = json.loads((folder / "corpus" / "manifest.json").read_text())
    assert record["tokenizer_fingerprint"] == manifest["tokenizer_fingerprint"]
    train_lm.train(config)
    assert "Already finished" in capsys.readouterr().out


def test_changed_texts_are_refused(config_in, tmp_path, texts):
    changes = {"corpus": texts, "tokenizer": "bpe:270", "eos_id": None}
    config = config_in(tmp_path / "run", **changes, sequence_length=100_000)
    config = dataclasses.replace(config, max_positions=None)
    with pytest.raises(UsageError, match=r"expected at least .* = 100001"):
        train_lm.train(config)
    before = contents(tmp_path / "run")
    (tmp_path / "1.txt").write_text("another text")
    with pytest.raises(UsageError, match="another corpus"):
        train_lm.train(config)
    assert contents(tmp_path / "run") == before


def test_foreign_folder_is_refused(config_in, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"holds 'notes\.txt' but no config\.json"):
        train_lm.train(config_in(tmp_path))
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_damaged_config_is_refused(config_in, tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(RunError, match="is not the config of a run"):
        train_lm.train(config_in(tmp_path))
    assert (tmp_path / "config.json").read_text() == "{"


@pytest.mark.parametrize(
    ("corpus", "model", "expected"),
    [
        ("stdlib", "gpt_neox:layers=2", "stdlib-gpt_neox"),
        ("tokens:/data/pile", "gpt2", "tokens-pile-gpt2"),
    ],
)
def test_new_folders_have_plain_names(corpus, model, expected):
    assert train_lm._slug(LmConfig(corpus=corpus, model=model)) == expected


def test_the_command_says_where_the_run_is(finished, config_in, tmp_path):
    values = dataclasses.asdict(config_in(""))
    config_file = tmp_path / "config.py"
    config_file.write_text(
        "from experiments.extraction import lm_config\n"
        f"def get_config():\n    return lm_config.make(**{values})\n"
    )
    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "experiments.extraction.train_lm",
            f"--config={config_file}",
            f"--config.out={tmp_path / 'run'}",
        ],
        cwd=REPOSITORY,
        env={
            **os.environ,
            "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == f"Run folder: {tmp_path / 'run'}"
    assert_same_run(tmp_path / "run", finished)
