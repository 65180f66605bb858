import csv
import json
import pathlib
import re
import subprocess
import sys

import numpy as np
import polars
import pytest

from experiments.errors import RunError, UsageError
from experiments.extraction import (
    byte_pairs,
    convert,
    evaluation_set,
    records,
)
from experiments.extraction.sweep_config import SweepConfig

REPOSITORY = pathlib.Path(__file__).parents[3]
PREFIX = np.array([[1, 2, 3], [4, 5, 6], [7, 8, 50_256]], np.uint16)
SUFFIX = np.array([[9, 9], [1, 2], [3, 4]], np.uint16)
COUNTS = (1, 7, 130)


@pytest.fixture
def source(tmp_path):
    """The benchmark, with the lines of the CSV file in another order."""
    folder = tmp_path / "datasets"
    folder.mkdir()
    np.save(folder / "train_prefix.npy", PREFIX)
    np.save(folder / "train_suffix.npy", SUFFIX)
    write_csv(folder, [(20, COUNTS[2]), (3, COUNTS[0]), (10, COUNTS[1])])
    return folder


def write_csv(folder, examples):
    lines = [f"{n},0,99,5,9,0,0,0,200,-1,-1,{count}\n" for n, count in examples]
    (folder / "train_dataset.csv").write_text("".join(lines))


@pytest.fixture
def run(tmp_path):
    def call(to, source, out="out", **values):
        given = {"to": to, "source": str(source), "out": str(tmp_path / out), **values}
        return convert.convert({**dict.fromkeys(convert._NAMES), **given})

    return call


@pytest.fixture
def sweep(tmp_path):
    """Two models, two contexts, three windows."""
    folder = tmp_path / "sweep"
    folder.mkdir()
    rows = [
        {
            **dict.fromkeys(records.COLUMNS, None),
            "window_id": window,
            "model": model,
            "context": context,
            "extracted": True,
            "suffix_logprob": float("-inf") if window else -0.5,
            "generated": [context, window, number],
            "sure": [0.1, None, 0.7][window],
        }
        for number, model in enumerate(("small", "large"))
        for context in (50, 100)
        for window in range(3)
    ]
    schema = records.COLUMNS | records.GENERATED | {"sure": polars.Float32()}
    polars.DataFrame(rows, schema=schema).write_parquet(folder / "records.parquet")
    return folder


def test_windows_of_the_benchmark(run, source, tmp_path):
    line = run("windows", source)
    assert line == f"Evaluation set: {tmp_path}/out (3 windows)"
    found = evaluation_set.load(tmp_path / "out")
    assert found.windows.to_dicts() == [
        {
            "window_id": n,
            "length": 5,
            "bucket": bucket,
            "count": COUNTS[n],
            "position": None,
            "tokens": [*PREFIX[n].tolist(), *SUFFIX[n].tolist()],
            "cluster": n,
        }
        for n, bucket in enumerate((0, 11, 28))
    ]
    assert found.manifest["vocabulary_size"] == 50_257
    assert found.manifest["lengths"] == [5]
    # The same again finds it; another one does not go there.
    assert run("windows", source) == line
    with pytest.raises(UsageError, match=r"holds an evaluation set with sample="):
        run("windows", source, last=2)


def test_only_the_last_windows(run, source, tmp_path):
    run("windows", source, last=1)
    (row,) = evaluation_set.load(tmp_path / "out").windows.to_dicts()
    assert (row["window_id"], row["count"]) == (0, 130)
    assert row["tokens"] == [7, 8, 50_256, 3, 4]
    for last in (4, 0, -1):
        with pytest.raises(UsageError, match=f"last={last}, but there are 3 examples"):
            run("windows", source, last=last)


@pytest.mark.parametrize("is_there", [True, False])
def test_counts_that_nobody_knows_are_null(run, source, tmp_path, is_there):
    if is_there:
        write_csv(source, [(1, -1), (2, 5), (3, -1)])
    else:
        (source / "train_dataset.csv").unlink()
    line = run("windows", source)
    assert line.endswith(f"(3 windows; of {2 if is_there else 3} the count is unknown)")
    windows = evaluation_set.load(tmp_path / "out").windows
    known = 5 if is_there else None
    assert windows["count"].to_list() == [None, known, None]
    assert windows["bucket"].to_list() == [None, 9 if is_there else None, None]


def test_windows_counted_in_a_corpus(run, source, tmp_path):
    whole = np.concatenate([PREFIX, SUFFIX], axis=1)
    tokens = np.concatenate([whole[0], whole[1], [0], whole[2], whole[0]])
    np.save(tmp_path / "ids.npy", tokens.astype(np.uint16))
    spec = f"tokens:{tmp_path}/ids.npy"
    run("windows", source, corpus=spec, eos_id=0)
    found = evaluation_set.load(tmp_path / "out")
    assert found.windows["count"].to_list() == [2, 1, 1]
    assert found.manifest["corpus"] == spec
    assert found.manifest["num_tokens"] == 21
    np.save(tmp_path / "other.npy", tokens[6:].astype(np.uint16))
    with pytest.raises(
        RunError, match=r"window 1 \(and 0 others of 3\) does not occur"
    ):
        run("windows", source, "new", corpus=f"tokens:{tmp_path}/other.npy", eos_id=0)
    assert not (tmp_path / "new").exists()
    with pytest.raises(UsageError, match="corpus='stdlib', expected tokens:"):
        run("windows", source, "new", corpus="stdlib")


def test_the_tokenizer_goes_along(run, source, tmp_path):
    byte_pairs.train(["a text"] * 3, 260).save(str(tmp_path / "tokenizer.json"))
    run("windows", source, tokenizer=str(tmp_path))
    fingerprint = byte_pairs.fingerprint(tmp_path / "out" / "tokenizer.json")
    manifest = evaluation_set.load(tmp_path / "out").manifest
    assert manifest["tokenizer_fingerprint"] == fingerprint


@pytest.mark.parametrize(
    ("what", "array", "message"),
    [
        ("prefix", PREFIX[:2], "has 2 prefixes and 3 suffixes of 'train'"),
        ("suffix", SUFFIX[0], r"holds uint16[2], expected integers"),
        ("suffix", SUFFIX[:, :0], r"holds uint16[3, 0], expected integers"),
        ("prefix", PREFIX.astype(float), r"holds float64[3, 3], expected integers"),
        ("prefix", PREFIX.astype(int) - 2, "holds ids from -1 to 50254, expected 0"),
        ("prefix", PREFIX + 1, "holds ids from 2 to 50257, expected 0 to 50256"),
    ],
)
def test_arrays_that_are_not_the_benchmark(run, source, tmp_path, what, array, message):
    np.save(source / f"train_{what}.npy", array)
    with pytest.raises(RunError, match=re.escape(message)):
        run("windows", source)
    assert not (tmp_path / "out").exists()


def test_files_that_are_not_there_or_cut_short(run, source):
    with pytest.raises(UsageError, match=r"val_prefix.npy: no such file"):
        run("windows", source, split="val")
    path = source / "train_suffix.npy"
    for size in (0, 9, 130):
        path.write_bytes(path.read_bytes()[:size])
        with pytest.raises(RunError, match="is not a whole"):
            run("windows", source)
        np.save(path, SUFFIX)
    whole = path.read_bytes()
    for shape in (b"(999999999999, 2)", b"(%d, 2)" % 10**25, b"(3 # 2)"):
        rest = b"), }" + b" " * (len(shape) - 6)
        assert b"(3, 2" + rest in whole
        path.write_bytes(whole.replace(b"(3, 2" + rest, shape + b", }"))
        with pytest.raises(RunError, match="is not a whole"):
            run("windows", source)
    with path.open("wb") as file:
        np.savez(file, SUFFIX)
    with pytest.raises(RunError, match="is not a whole"):
        run("windows", source)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1,2,3\n", "the line of example 1 is not 12 numbers"),
        ("1,0,9,5,9,0,0,0,200,-1,-1,0\n", "the line of example 1 is not 12 numbers"),
        ("x,0\n", "invalid literal"),
        (f"1,0,9,5,9,0,0,0,200,-1,-1,{2**63}\n", "the line of example 1 is not 12"),
        ("1" * 200_000, "field larger than"),
        ("1,0,9,5,9,0,0,0,200,-1,-1,4\n" * 3, "has two lines of example 1, so"),
        ("1,0,9,5,9,0,0,0,200,-1,-1,4\n", "has 1 lines, but there are 3 prefixes"),
    ],
)
def test_a_csv_file_that_is_another(run, source, text, message):
    (source / "train_dataset.csv").write_text(text)
    with pytest.raises(RunError, match=message):
        run("windows", source)


def test_guesses_are_as_the_benchmark_scores_them(run, sweep, tmp_path):
    line = run("guesses", sweep, "g.csv", model="large", context=50)
    assert line == f"Guesses: {tmp_path}/g.csv (3 of 'large')"
    with (tmp_path / "g.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["Example ID"] for row in rows] == ["0", "1", "2"]
    # Its scorer drops the first and last character and splits at commas.
    guesses = [list(map(int, row["Suffix Guess"][1:-1].split(","))) for row in rows]
    assert guesses == [[50, 0, 1], [50, 1, 1], [50, 2, 1]]
    text = (tmp_path / "g.csv").read_text().splitlines()
    assert text[:2] == ["Example ID,Suffix Guess", '0,"[50,0,1]"']
    with pytest.raises(UsageError, match=r"g.csv exists already"):
        run("guesses", sweep, "g.csv", model="large", context=50)


def test_the_surest_guesses_first(run, sweep, tmp_path):
    run("guesses", sweep, "g.csv", model="small", context=100, order_by="sure")
    lines = (tmp_path / "g.csv").read_text().splitlines()[1:]
    assert [line[0] for line in lines] == ["2", "0", "1"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {},
            "has several values of model: give --model=X with X one of small, large",
        ),
        ({"model": "huge"}, "no record with model='huge': give --model=X with X one"),
        ({"model": "small"}, "has several values of context: give --context=X"),
        (
            {"model": "small", "context": 50, "order_by": "suffix_logprob"},
            "order_by='suffix_logprob' depends on the true suffix",
        ),
        (
            {"model": "small", "context": 50, "order_by": "generated"},
            "order_by='generated' is no column of numbers in",
        ),
    ],
)
def test_guesses_that_cannot_be(run, sweep, tmp_path, values, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        run("guesses", sweep, **values)
    assert not (tmp_path / "out").exists()


def test_guesses_of_a_sweep_without_any(run, sweep):
    path = sweep / "records.parquet"
    polars.read_parquet(path).drop("generated").write_parquet(path)
    with pytest.raises(UsageError, match=r"sweep with --config.decode=True"):
        run("guesses", sweep)


def read_lines(path):
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_records_as_json_lines(run, sweep, tmp_path):
    line = run("jsonl", sweep, "r.jsonl")
    assert line == f"Records: {tmp_path}/r.jsonl (12 lines)"
    rows = read_lines(tmp_path / "r.jsonl")
    expected = polars.read_parquet(sweep / "records.parquet").to_dicts()
    for row in expected:
        if row["suffix_logprob"] == float("-inf"):
            row["suffix_logprob"] = None
    for row, wanted in zip(rows, expected, strict=True):
        assert row.pop("sure") == pytest.approx(wanted.pop("sure"))
        assert row == wanted


def test_windows_as_json_lines(run, source, tmp_path):
    run("windows", source)
    run("jsonl", tmp_path / "out", "w.jsonl")
    rows = read_lines(tmp_path / "w.jsonl")
    assert [row["tokens"][:3] for row in rows] == PREFIX.tolist()


def test_records_that_are_not_there_or_damaged(run, tmp_path):
    with pytest.raises(UsageError, match=r"holds neither records.parquet nor windows"):
        run("jsonl", tmp_path)
    with pytest.raises(UsageError, match=r"records.parquet: no such file"):
        run("guesses", tmp_path)
    (tmp_path / "records.parquet").write_bytes(b"PAR1 and so on")
    with pytest.raises(RunError, match=r"records.parquet is damaged"):
        run("jsonl", tmp_path)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"to": None}, "--to is missing"),
        ({"source": ""}, "--source is missing"),
        ({"out": None}, "--out is missing"),
        ({"last": 3}, "--last has no meaning with to=jsonl"),
    ],
)
def test_flags_that_cannot_be(values, message):
    given = {"to": "jsonl", "source": "x", "out": "y", **values}
    with pytest.raises(UsageError, match=message):
        convert.convert({**dict.fromkeys(convert._NAMES), **given})


def test_the_program(source, tmp_path):
    done = subprocess.run(
        [
            *(sys.executable, "-m", "experiments.extraction.convert"),
            *("--to=windows", f"--source={source}", "--out=out"),
        ],
        cwd=tmp_path,
        env={"PYTHONPATH": str(REPOSITORY), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"Evaluation set: {tmp_path}/out (3 windows)\n"


def test_a_guess_can_be_ordered_by_no_column_that_follows_from_the_truth():
    config = SweepConfig(decode=True, beams=2, samples=1)
    columns = records.columns(config)
    known = {"window_id", "params", "length", "context", "count", "bucket"}
    known |= {"beam_logprob", "beam_identical"}
    numbers = {
        name
        for name, dtype in columns.items()
        if dtype.is_numeric() or dtype == polars.Boolean()
    }
    assert numbers - known == set(convert._KNOW_THE_TRUTH)
