"""Blanks that T5 models fill, through whole sweeps."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import polars
import pytest
import tokenizers

from experiments import models
from experiments.errors import RunError, UsageError
from experiments.extraction import (
    byte_pairs,
    infilling,
    records,
    sweep,
    sweep_config,
    sweep_plan,
)
from experiments.extraction.records import Parts
from experiments.models.sentinels import Sentinels
from tests.experiments.extraction import known_windows
from tests.experiments.extraction.known_windows import GOLDEN

pytestmark = pytest.mark.usefixtures("compiled_cheaply", "compiled_once")

SPEC = "t5:layers=1:width=32:heads=2:head_dim=16:feed_forward=32"
LENGTH, LEARNT = 20, 4


def blanks(model, tokens_NxL, seed=0, masking="iid"):
    config = model.config
    return infilling.make_blanks(
        tokens_NxL,
        range(len(tokens_NxL)),
        seed=seed,
        masking=masking,
        sentinels=config.sentinels,
        eos_id=config.eos_id,
        pad_id=config.pad_id,
    )


def trained(model, tokens_NxL):
    """Parameters with which the model fills the blanks of some windows."""
    batch = blanks(model, tokens_NxL)
    counts_NxT = np.arange(batch.targets_NxT.shape[1]) < batch.num_targets_N[:, None]
    seen_NxS = np.arange(batch.inputs_NxS.shape[1]) < batch.num_inputs_N[:, None]
    inputs = (batch.inputs_NxS, batch.targets_NxT, seen_NxS)
    params = jax.jit(model.init)(jax.random.key(0), *inputs[:2])
    optimizer = optax.adam(1e-2)

    def loss(params):
        logits_NxTxV = model.apply(params, *inputs)
        losses_NxT = optax.softmax_cross_entropy_with_integer_labels(
            logits_NxTxV, batch.targets_NxT
        )
        return jnp.mean(losses_NxT, where=counts_NxT)

    @jax.jit
    def train(params):
        def step(carry, _):
            params, state = carry
            updates, state = optimizer.update(jax.grad(loss)(params), state)
            return (optax.apply_updates(params, updates), state), None

        carry = (params, optimizer.init(params))
        return jax.lax.scan(step, carry, None, length=150)[0][0]

    return train(params)


@pytest.fixture(scope="module")
def t5(tmp_path_factory):
    """Folders of windows, and of a T5 that learnt the blanks of the first of them."""
    folder = tmp_path_factory.mktemp("t5")
    tokens_NxL = np.random.default_rng(0).integers(0, 30, (LEARNT + 3, LENGTH))
    model = models.build_language_model(SPEC, 30, LENGTH)
    models.save(folder / "t5", model, trained(model, tokens_NxL[:LEARNT]))
    known_windows.write(folder / "windows", {LENGTH: tokens_NxL}, sample="by_count")
    return folder


@pytest.fixture
def run(t5, tmp_path, monkeypatch):
    """`(**config) -> records`, in parts of one batch."""
    monkeypatch.setattr(sweep_plan, "_BATCHES_PER_PART", 1)

    def make(out="sweep", **values):
        values = {
            "models": (str(t5 / "t5"),),
            "windows": str(t5 / "windows"),
            "masking": "iid",
            "batch_size": 3,
            "out": str(tmp_path / out),
            **values,
        }
        folder = sweep.sweep(sweep_config.parse(sweep_config.make(**values)))
        return polars.read_parquet(folder / records.RECORDS)

    return make


def test_what_was_learnt_is_filled(run, t5, tmp_path, capsys):
    found = run()
    assert found.schema == polars.Schema(records.COLUMNS | records.BLANKS)
    assert found["window_id"].to_list() == list(range(LEARNT + 3))
    assert found["extracted"].to_list() == [True] * LEARNT + [False] * 3
    # 15 % of 20 tokens are dropped.
    assert set(found["context"]) == {17}
    assert set(found["length"]) == {20}
    model, params = models.load(t5 / "t5")
    windows = polars.read_parquet(t5 / "windows" / "windows.parquet")
    batch = blanks(model, np.array(windows["tokens"].to_list()))
    assert found["num_targets"].to_list() == batch.num_targets_N.tolist()
    apply = jax.jit(model.apply)
    for row in found.iter_rows(named=True):
        i, num_targets = row["window_id"], row["num_targets"]
        inputs_1xS = batch.inputs_NxS[i : i + 1, : batch.num_inputs_N[i]]
        targets_1xT = batch.targets_NxT[i : i + 1, :num_targets]
        logits_TxV = np.asarray(apply(params, inputs_1xS, targets_1xT))[0]
        correct_T = logits_TxV.argmax(axis=-1) == targets_1xT[0]
        assert row["tokens_correct"] == correct_T.sum()
        assert row["first_mismatch"] == [*correct_T, False].index(False)
        logprob_TxV = np.asarray(jax.nn.log_softmax(logits_TxV))
        logprob = logprob_TxV[np.arange(num_targets), targets_1xT[0]].sum()
        assert row["suffix_logprob"] == pytest.approx(logprob, rel=1e-3, abs=1e-3)
    derived = json.loads((tmp_path / "sweep" / "config.json").read_text())["derived"]
    told = {name: derived[name] for name in ("masking", "suffix_length", "sample")}
    assert told == {"masking": "iid", "suffix_length": None, "sample": "by_count"}
    out, err = capsys.readouterr()
    assert "7/7" in err
    assert "t5: 4 of 7 windows filled without a mistake (57.14%); 0 verdicts" in out
    assert "windows/s after" in out


def test_where_blanks_are_follows_from_seed_and_masking(run):
    iid = run("iid")
    for name, values in {"seeded": {"seed": 1}, "spans": {"masking": "spans"}}.items():
        other = run(name, **values)
        assert not other["num_targets"].equals(iid["num_targets"])
        assert not other["extracted"].any()


class Killed(Exception):
    pass


def test_a_killed_sweep_goes_on_to_the_same_bytes(run, monkeypatch, tmp_path):
    run("whole")
    real, written = Parts.write, []

    def write(self, *args):
        if len(written) == 1:
            raise Killed
        written.append(args)
        real(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Parts, "write", write)
        with pytest.raises(Killed):
            run("killed")
    run("killed")
    for name in ("records.parquet", "config.json"):
        whole, killed = (tmp_path / out / name for out in ("whole", "killed"))
        assert whole.read_bytes() == killed.read_bytes()
    rows = [
        json.loads(row)
        for row in (tmp_path / "killed" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [row["windows"] for row in rows] == [3, 3, 3, 1]
    # One program for the length, compiled once in each of the two attempts.
    assert [row["compile_seconds"] > 0 for row in rows] == [True, False, True, False]


def copy_of(model, folder, **changes):
    """The T5 in another folder, with another config or other weights."""
    module, params = models.load(model)
    config = dataclasses.replace(module.config, **changes)
    models.save(folder, module.clone(config=config), params)
    return str(folder)


def test_a_model_that_gives_no_numbers(run, t5, tmp_path):
    module, params = models.load(t5 / "t5")
    params = jax.tree.map(lambda x: x * jnp.nan, params)
    models.save(tmp_path / "broken", module, params)
    with pytest.raises(
        RunError, match=r"'broken' gives logits that are not finite for window 0 \(con"
    ):
        run(models=(str(tmp_path / "broken"),))


@pytest.mark.parametrize(
    ("sentinels", "message"),
    [
        (Sentinels(132, 100), "of 132 ids, but its first sentinel is 132: set first_"),
        (Sentinels(29, 8), r"'bad': window \d: token \d+ is a sentinel"),
        (Sentinels(131, 2), r"'bad': window 0: \d blanks need \d sentinels, but there"),
    ],
)
def test_sentinels_that_cannot_be(run, t5, tmp_path, sentinels, message, monkeypatch):
    bad = copy_of(t5 / "t5", tmp_path / "bad", sentinels=sentinels)
    monkeypatch.setattr(models, "load", None)
    with pytest.raises(UsageError, match=message) as error:
        run(models=(bad,))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "sweep").exists()


@pytest.mark.parametrize(
    ("members", "masking", "message"),
    [
        (["t5"], "", r"'t5' is a T5, .*: give --config\.masking=iid \(or spans\)"),
        (["gpt2"], "iid", r"masking='iid' is for T5 models, but model 'gpt2' is none"),
        (["gpt2", "t5"], "iid", r"'t5' is a T5, .* and 'gpt2' is none: sweep the T5"),
        (["gpt2", "t5"], "", r"'t5' is a T5, .* and 'gpt2' is none: sweep the T5"),
    ],
)
def test_two_kinds_of_models(run, t5, tmp_path, members, masking, message):
    folders = {"t5": t5 / "t5", "gpt2": GOLDEN / "gpt2"}
    windows = {60: np.zeros((1, 60), int)}
    with pytest.raises(UsageError, match=message):
        run(
            models=tuple(str(folders[name]) for name in members),
            windows=str(known_windows.write(tmp_path / "windows", windows)),
            masking=masking,
        )
    assert not (tmp_path / "sweep").exists()


def test_windows_that_have_nothing_to_drop(run, tmp_path):
    windows = known_windows.write(tmp_path / "windows", {1: np.zeros((1, 1), int)})
    with pytest.raises(UsageError, match="a window of 1 tokens cannot be in part drop"):
        run(windows=str(windows))


def test_tokens_beyond_the_vocabulary(run, tmp_path):
    windows = known_windows.write(tmp_path / "windows", {9: np.full((1, 9), 132)})
    with pytest.raises(UsageError, match=r"a vocabulary of 132 ids, but window 0 hold"):
        run(windows=str(windows))


def unigram(path, *words):
    """A tokenizer of the kind that T5 has."""
    pieces = [("<unk>", 0.0), *((word, -1.0) for word in words)]
    model = tokenizers.models.Unigram(pieces, unk_id=0)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.decoder = tokenizers.decoders.Metaspace()
    tokenizer.save(str(path))
    return path


def test_tokenizers_of_t5s_kind(run, t5, tmp_path):
    ours = unigram(tmp_path / "ours.json", "▁", "a")
    windows = known_windows.write(
        tmp_path / "windows",
        {LENGTH: np.tile([1, 2], (1, LENGTH // 2))},
        ours,
        tokenizer_fingerprint=byte_pairs.fingerprint(ours),
    )
    folder = tmp_path / "other"
    copy_of(t5 / "t5", folder)
    unigram(folder / "tokenizer.json", "▁", "b")
    with pytest.raises(UsageError, match=r"the id 2 is 'a' there and 'b' in the model"):
        run(models=(str(folder),), windows=str(windows))
    unigram(folder / "tokenizer.json", "▁", "a", "b")
    found = run(models=(str(folder),), windows=str(windows))
    assert found["whitespace"].to_list() == [0.5]
