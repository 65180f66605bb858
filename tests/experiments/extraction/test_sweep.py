import json
import re
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import polars
import pytest
import tokenizers

from experiments import models
from experiments.errors import RunError, UsageError
from experiments.extraction import (
    asking,
    decoding,
    near_misses,
    records,
    sweep,
    sweep_config,
    sweep_plan,
    sweep_runs,
)
from experiments.extraction.configs import figure_1, pile_figure_1, pile_figure_5
from experiments.extraction.records import Parts
from tests.experiments.extraction import known_windows
from tests.experiments.extraction.known_windows import GOLDEN

pytestmark = pytest.mark.usefixtures("compiled_cheaply", "compiled_once")

CONTEXT = 12
FIRST_WRONG = [50, 0, 5, 6, 50, 49, 30, 50, 1, 50]
EXTRACTABLE = [wrong == 50 for wrong in FIRST_WRONG]
# The only white space among the tokens.
NEWLINE = 7
MODELS = (str(GOLDEN / "gpt2"), str(GOLDEN / "gpt_j"))


@pytest.fixture(scope="module")
def windows(tmp_path_factory):
    """Windows that the golden GPT-2 generates, some with a wrong token."""
    random = np.random.default_rng(3)
    shape = (len(FIRST_WRONG), CONTEXT)
    prompts_NxC = random.integers(0, known_windows.VOCABULARY_SIZE, shape)
    generated_NxT = known_windows.continued(GOLDEN / "gpt2", prompts_NxC)
    tokens_NxT = known_windows.spoiled(generated_NxT, FIRST_WRONG)
    folder = tmp_path_factory.mktemp("set")
    vocabulary = {"\n" if i == NEWLINE else f"t{i}": i for i in range(96)}
    tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [])).save(f"{folder}/t.json")
    return known_windows.write(
        folder / "windows",
        {CONTEXT + 50: tokens_NxT},
        folder / "t.json",
        sample="by_count",
    )


@pytest.fixture(scope="module")
def whole_sweep(windows, tmp_path_factory):
    """A sweep of both models that nothing stopped, each model in one part."""
    config = sweep_config.make(
        models=MODELS,
        windows=str(windows),
        batch_size=2,
        out=str(tmp_path_factory.mktemp("whole")),
    )
    return sweep.sweep(sweep_config.parse(config))


@pytest.fixture
def run(windows, tmp_path, monkeypatch):
    """`(**config) -> folder`, in parts of two batches of two windows."""
    monkeypatch.setattr(sweep_plan, "_BATCHES_PER_PART", 2)

    def make(out="sweep", **values):
        values = {
            "models": MODELS[:1],
            "windows": str(windows),
            "batch_size": 2,
            "out": str(tmp_path / out),
            **values,
        }
        return sweep.sweep(sweep_config.parse(sweep_config.make(**values)))

    return make


def read(folder):
    return polars.read_parquet(folder / records.RECORDS)


def test_known_verdicts(run, windows, capsys):
    folder = run(baselines=MODELS[1:], models=MODELS[:1])
    found = read(folder)
    assert found.schema == polars.Schema(records.COLUMNS)
    keys = found.select("model", "length", "context", "window_id").rows()
    expected = [
        (model, CONTEXT + 50, CONTEXT, window_id)
        for model in ("gpt2", "gpt_j")
        for window_id in range(10)
    ]
    assert keys == expected
    known = found.head(len(FIRST_WRONG))
    assert known["first_mismatch"].to_list() == FIRST_WRONG
    assert known["extracted"].to_list() == EXTRACTABLE
    assert known["count"].to_list() == list(range(1, 11))
    assert known["bucket"].to_list() == [0, 1, 2, 0, 1, 2, 0, 1, 2, 0]
    assert found["extracted"].sum() == sum(EXTRACTABLE)
    margins = known["min_margin"].to_numpy()
    np.testing.assert_array_equal(margins > 0, EXTRACTABLE)
    assert found.null_count().sum_horizontal().item() == 0
    original = polars.read_parquet(windows / "windows.parquet")
    tokens_NxT = np.array(original["tokens"].to_list())
    white_N = np.float32((tokens_NxT == NEWLINE).mean(axis=1))
    assert white_N.any()
    np.testing.assert_array_equal(found["whitespace"], [*white_N, *white_N])
    entropy_N = near_misses.token_entropy(tokens_NxT)
    np.testing.assert_array_equal(found["entropy"], [*entropy_N, *entropy_N])
    clusters = polars.read_parquet(folder / sweep.CLUSTERS)
    assert clusters.equals(original.select("window_id", "cluster"))
    assert sorted(path.name for path in folder.iterdir()) == [
        ".lock",
        "clusters.parquet",
        "config.json",
        "metrics.jsonl",
        "records.parquet",
    ]
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        r"gpt2: 4 of 10 windows extractable \(40\.00%\); 0 verdicts within 0\.001, 0 "
        r"exact ties; [\d,.]+ windows/s after [\d.]+ s of compiling",
        lines[0],
    )


def test_the_record_of_the_config(run, windows):
    folder = run(baselines=MODELS[1:])
    config = json.loads((folder / "config.json").read_text())
    derived = config.pop("derived")
    assert config["models"] == list(MODELS[:1])
    assert "out" not in config
    manifest = json.loads((windows / "manifest.json").read_text())
    assert derived["windows_sha256"] == manifest["windows_sha256"]
    assert derived["precision"] == "highest"
    assert derived["suffix_length"] == 50
    assert derived["sample"] == "by_count"
    assert [(m["model"], m["baseline"]) for m in derived["models"]] == [
        ("gpt2", False),
        ("gpt_j", True),
    ]
    assert set(read(folder)["params"]) == {m["params"] for m in derived["models"]}
    # What reads sweeps accepts it.
    assert len(sweep_runs.load([folder]).records) == 20


def test_verdicts_alone_are_the_same(run):
    full, early = read(run("full")), read(run("early", verdicts_only=True))
    assert early.schema == full.schema
    assert early.drop_nulls("extracted").height == full.height
    known = list(records.COLUMNS)[: list(records.COLUMNS).index("extracted")]
    assert early.select(*known, "extracted").equals(full.select(*known, "extracted"))
    assert early.drop(*known, "extracted").null_count().row(0) == (10,) * 5


def test_several_contexts_in_one_pass(run):
    together = read(run("together", contexts=(12, 5)))
    assert together["context"].to_list() == [5] * 10 + [12] * 10
    alone, same = read(run("alone")), together.filter(context=12)
    assert same["extracted"].to_list() == EXTRACTABLE
    floats = ("min_margin", "suffix_logprob")
    assert alone.drop(floats).equals(same.drop(floats))
    for name in floats:
        np.testing.assert_allclose(alone[name], same[name], rtol=1e-4, atol=1e-4)
    only = read(run("only", contexts=(5, 12), verdicts_only=True))
    assert only["extracted"].equals(together["extracted"])
    assert only["tie"].null_count() == len(only)


def test_decoding_is_recorded(run, windows, capsys):
    found = read(run(decode=True))
    assert found.schema == polars.Schema(records.COLUMNS | records.GENERATED)
    tokens = polars.read_parquet(windows / "windows.parquet")["tokens"].to_list()
    for row in found.iter_rows(named=True):
        generated, context = row["generated"], row["context"]
        suffix = tokens[row["window_id"]][context : context + 50]
        assert len(generated) == 50
        assert (generated == suffix) == row["extracted"]
        wrong = row["first_mismatch"]
        assert generated[:wrong] == suffix[:wrong]
        assert generated[wrong : wrong + 1] != suffix[wrong : wrong + 1] or wrong == 50
    assert "teacher forcing: 10 of 10 windows agree" in capsys.readouterr().out


def wrong_at(place):
    """Decoding that takes the wrong token at one place in every first row."""

    def generate(model, params, prompts_BxT):
        generated_Bx50 = real(model, params, prompts_BxT)
        token = generated_Bx50[0, place]
        return generated_Bx50.at[0, place].set((token + 1) % 96)

    real = decoding.generate
    return generate


def test_decoding_must_agree_but_for_rounding(run, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(asking.decoding, "generate", wrong_at(40))
    with pytest.raises(
        RunError,
        match=r"'gpt2', window 0, context 12: decoding leaves the suffix at token 40, "
        r"teacher forcing at 50 \(50: never\), where the margin is .*defect",
    ):
        run("defect", decode=True)
    assert not (tmp_path / "defect" / "records.parquet").exists()
    found = read(run("rounding", decode=True, near_tie=1e9))
    printed = capsys.readouterr()
    # First rows are 0, 2, 4, 6 and 8; 2, 6 and 8 have left the suffix before.
    assert "8 of 10 windows agree, the others within 1e+09" in printed.out
    assert (printed.err + printed.out).count("near-tie: ") == 2
    assert found["extracted"].to_list() == EXTRACTABLE


def test_an_empty_prompt(run, tmp_path, capsys):
    random = np.random.default_rng(3)
    one = known_windows.continued(GOLDEN / "gpt2", np.array([[1]]))
    tokens = {50: np.concatenate([one[:, 1:], random.integers(0, 96, (1, 50))])}
    folder = str(known_windows.write(tmp_path / "short", tokens, eos_id=1))
    with pytest.raises(UsageError, match=r"=bos"):
        run(windows=folder)
    found = read(run(windows=folder, empty_prompt="bos", decode=True))
    assert found["context"].to_list() == [0, 0]
    assert found["length"].to_list() == [50, 50]
    assert found["extracted"].to_list() == [True, False]
    assert found["generated"][0].to_list() == one[0, 1:].tolist()


class Killed(Exception):
    pass


def killed_before(monkeypatch, owner, name, nth):
    """Makes the nth call of `owner.name` end the sweep."""
    real, calls = getattr(owner, name), []

    def call(*args, **kwargs):
        calls.append(args)
        if len(calls) == nth:
            raise Killed
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)


@pytest.mark.parametrize(
    ("owner", "name", "nth"),
    [
        (records, "write_parquet", 1),
        (Parts, "write", 5),
        (records.os, "replace", 3),
        (records, "merge", 1),
        (Parts, "remove", 1),
    ],
)
def test_a_killed_sweep_goes_on_to_the_same_bytes(
    run, whole_sweep, monkeypatch, owner, name, nth
):
    with monkeypatch.context() as patch:
        killed_before(patch, owner, name, nth)
        with pytest.raises(Killed):
            run("killed", models=MODELS)
    asked = []
    scores = asking.Asker.scores
    monkeypatch.setattr(
        asking.Asker,
        "scores",
        lambda self, *args, **kwargs: (
            asked.append(len(args[0])) or scores(self, *args, **kwargs)
        ),
    )
    killed = run("killed", models=MODELS)
    for file in ("records.parquet", "clusters.parquet", "config.json"):
        assert (killed / file).read_bytes() == (whole_sweep / file).read_bytes()
    assert not (killed / "parts").exists()
    # Finished parts, of six, are not asked again.
    if owner is Parts and name == "write":
        assert len(asked) == 6 - (nth - 1)


def test_a_row_of_metrics_cut_short(run, monkeypatch, tmp_path, capsys):
    with monkeypatch.context() as patch:
        killed_before(patch, Parts, "write", 2)
        with pytest.raises(Killed):
            run()
    path = tmp_path / "sweep" / "metrics.jsonl"
    path.write_text(path.read_text()[:-10])
    run()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["windows"] for row in rows] == [4, 4, 2]
    assert "windows/s" in capsys.readouterr().out


def test_too_little_memory(run, monkeypatch):
    def fail(*args, **kwargs):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr(asking.Asker, "scores", fail)
    with pytest.raises(RunError, match=r"'gpt2' and 2 windows of 61 tokens .*lower --"):
        run()


def test_a_finished_sweep_is_left_alone(run, capsys):
    folder = run()
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    run()
    assert "Already finished" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, r"holds a run with seed=0 \(now 1\): give another --config.out"),
        ({"models": MODELS}, r"holds a run with models="),
        ({"matmul_precision": "high"}, r"holds a run with matmul_precision='highest'"),
    ],
)
def test_the_folder_of_another_sweep(run, change, message):
    folder = run()
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(UsageError, match=message):
        run(**change)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_the_same_config_with_other_inputs(run, windows, tmp_path):
    model, copy = tmp_path / "model", tmp_path / "windows"
    shutil.copytree(GOLDEN / "gpt2", model)
    shutil.copytree(windows, copy)
    run(models=(str(model),), windows=str(copy))
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + np.float32(0.5).tobytes())
    with pytest.raises(UsageError, match=r"of the same config with other models: give"):
        run(models=(str(model),), windows=str(copy))
    shutil.copytree(GOLDEN / "gpt2", model, dirs_exist_ok=True)
    shutil.rmtree(copy)
    known_windows.write(copy, {62: np.zeros((1, 62), int)}, sample="by_count")
    with pytest.raises(UsageError, match=r"with other windows_sha256: give another"):
        run(models=(str(model),), windows=str(copy))


@pytest.mark.parametrize("verdicts_only", [False, True])
def test_a_model_that_gives_no_numbers(run, tmp_path, verdicts_only):
    model, params = models.load(GOLDEN / "gpt2")
    params = jax.tree.map(lambda x: x.at[0].set(jnp.nan), params)
    models.save(tmp_path / "broken", model, params)
    with pytest.raises(
        RunError, match=r"'broken' gives logits that are not finite for window 0"
    ):
        run(models=(str(tmp_path / "broken"),), verdicts_only=verdicts_only)


def test_windows_of_each_bucket(run):
    found = read(run(windows_per_bucket=1))
    assert sorted(found["bucket"]) == [0, 1, 2]


def tiny(folder, family):
    """A random model of 512 positions."""
    spec = f"{family}:layers=1:width=16:heads=2"
    model = models.build_language_model(spec, 100, 512)
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    random = np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: jnp.asarray(random.normal(size=x.shape), jnp.float32), shapes
    )
    models.save(folder, model, params)
    return str(folder)


@pytest.mark.parametrize("config_file", [figure_1, pile_figure_1, pile_figure_5])
def test_configs_run_on_tiny_models_of_their_families(
    config_file, tmp_path, monkeypatch
):
    config = config_file.get_config()

    def stand_ins(folders):
        names = [folder.rpartition("/")[2] for folder in folders]
        families = [
            next(f for p, f in PREFIXES.items() if name.startswith(p)) for name in names
        ]
        return tuple(
            tiny(tmp_path / name, family)
            for name, family in zip(names, families, strict=True)
        )

    PREFIXES = {"gpt-neo-": "gpt_neo", "gpt-j-": "gpt_j", "gpt2": "gpt2"}
    config.models = stand_ins(config.models or ("gpt2",))
    config.baselines = stand_ins(config.baselines)
    random = np.random.default_rng(0)
    lengths = (50, 100, 500) if config.contexts else (50, 60)
    config.windows = str(
        known_windows.write(
            tmp_path / "windows",
            {length: random.integers(0, 100, (2, length)) for length in lengths},
        )
    )
    config.batch_size = 2
    config.out = str(tmp_path / "sweep")
    found = read(sweep.sweep(sweep_config.parse(config)))
    num_models = len(config.models) + len(config.baselines)
    # 50 tokens leave no prompt. Of 500, there are nine contexts.
    per_model = 2 * (1 + 9) if config.contexts else 2
    assert len(found) == num_models * per_model
    assert set(found["context"]) == set(config.contexts or (10,))


def test_the_binary(tmp_path):
    members = [tiny(tmp_path / name, "gpt2") for name in ("one", "two")]
    tokens = {60: np.random.default_rng(0).integers(0, 100, (3, 60))}
    command = [
        sys.executable,
        "-m",
        "experiments.extraction.sweep",
        "--config=experiments/extraction/configs/figure_1.py",
        f"--config.models={','.join(members)}",
        f"--config.windows={known_windows.write(tmp_path / 'windows', tokens)}",
        f"--config.out={tmp_path / 'sweep'}",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    assert last == f"Sweep folder: {(tmp_path / 'sweep').resolve()}"
    assert "Traceback" not in done.stderr
    assert read(tmp_path / "sweep")["model"].to_list() == ["one"] * 3 + ["two"] * 3
