import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from experiments.errors import RunError, UsageError
from experiments.extraction import build_dataset, dataset_config, evaluation_set
from experiments.extraction import fingerprints as fingerprints_module
from tests.experiments.extraction.corpora import EOS, occurrences, repeat_start

REPOSITORY = pathlib.Path(__file__).parents[3]


@pytest.fixture(scope="module")
def tokens_N():
    """Documents of up to 40 ids of a Markov chain, some of them several times."""
    rng = np.random.default_rng(0)
    documents = [
        np.cumsum(rng.integers(1, 3, rng.integers(0, 40))) % 9 + 1 for _ in range(30)
    ]
    copies = rng.integers(0, 30, 90)
    return np.concatenate([[*documents[c], EOS] for c in copies]).astype(np.uint16)


@pytest.fixture(scope="module")
def spec(tokens_N, tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "tokens.npy"
    np.save(path, tokens_N)
    return f"tokens:{path}"


@pytest.fixture
def build(spec, tmp_path):
    def call(out="windows", corpus=spec, **flags):
        flags = {"lengths": "3,8", "per_bucket": 20, "eos_id": EOS} | flags
        config = dataset_config.parse(
            {"corpus": corpus, "out": str(tmp_path / out), **flags}
        )
        return build_dataset.build(config)

    return call


def rows_by_window(folder):
    loaded = evaluation_set.load(folder)
    return {tuple(row["tokens"]): row for row in loaded.windows.iter_rows(named=True)}


def assert_exact(rows, tokens_N, length):
    """Counts, first occurrences, clusters and buckets, against the definition."""
    expected = occurrences(tokens_N, EOS, length)
    mine = {window: row for window, row in rows.items() if row["length"] == length}
    assert mine
    for window, row in mine.items():
        places = expected[window]
        assert row["count"] == len(places)
        assert row["position"] == min(places)
        assert row["cluster"] == repeat_start(tokens_N, EOS, places)
        assert 2 ** row["bucket"] <= len(places) ** 4 < 2 ** (row["bucket"] + 1)


@pytest.mark.parametrize("one_per_repeat", [False, True])
def test_windows_are_exact_and_the_manifest_says_how_many(
    build, tokens_N, capsys, one_per_repeat
):
    folder = build(verify=True, one_per_repeat=one_per_repeat)
    rows = rows_by_window(folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    for length in (3, 8):
        assert_exact(rows, tokens_N, length)
        expected = occurrences(tokens_N, EOS, length)
        cells = [cell for cell in manifest["buckets"] if cell["length"] == length]
        assert sum(cell["available"] for cell in cells) == len(expected)
        for cell in cells:
            taken = [
                row
                for row in rows.values()
                if row["length"] == length and row["bucket"] == cell["bucket"]
            ]
            assert all(cell["low"] <= row["count"] < cell["high"] for row in taken)
            assert cell["taken"] == len(taken)
            assert cell["short"] == (len(taken) < 20)
            if one_per_repeat and cell["low"] > 1:
                assert len({row["cluster"] for row in taken}) == len(taken)
            if not one_per_repeat:
                assert cell["taken"] == min(20, cell["available"])
    assert [row["window_id"] for row in rows.values()] == list(range(len(rows)))
    assert manifest["num_windows"] == len(rows)
    assert manifest["num_tokens"] == len(tokens_N)
    assert manifest["eos_id"] == EOS
    assert manifest["edges"] == "2^(n/4)"
    assert "taken/available" in capsys.readouterr().out


def test_uniform_windows_are_exact_and_as_many_as_asked_for(build, tokens_N):
    folder = build(sample="uniform", num_windows=150, per_bucket=None)
    loaded = evaluation_set.load(folder)
    assert (
        loaded.windows["length"].value_counts(sort=True)["count"].to_list() == [150] * 2
    )
    for length in (3, 8):
        assert_exact(rows_by_window(folder), tokens_N, length)
    cells = loaded.manifest["buckets"]
    assert sum(cell["taken"] for cell in cells) == 300
    assert not any(cell["short"] for cell in cells)


def test_edges_that_leave_counts_out(build):
    rows = rows_by_window(build(edges="2,3,6", lengths="8"))
    assert {(row["bucket"], row["count"]) for row in rows.values()} <= {
        (0, 2), (1, 3), (1, 4), (1, 5),
    }  # fmt: skip
    assert {row["bucket"] for row in rows.values()} == {0, 1}


def test_one_document(build, tokens_N, tmp_path):
    np.save(tmp_path / "one.npy", tokens_N)
    folder = build(corpus=f"tokens:{tmp_path / 'one.npy'}", eos_id=None, lengths="8")
    expected = occurrences(tokens_N, None, 8)
    for window, row in rows_by_window(folder).items():
        assert row["count"] == len(expected[window])
        assert row["cluster"] == repeat_start(tokens_N, None, expected[window])


def test_texts_are_tokenised_and_the_tokenizer_is_kept(build, tmp_path):
    (tmp_path / "a.txt").write_text("one two three one two three " * 20)
    (tmp_path / "b.txt").write_text("four five six one two three " * 20)
    folder = build(corpus=f"text:{tmp_path}/*.txt", eos_id=None, tokenizer="bpe:260")
    loaded = evaluation_set.load(folder)
    assert loaded.manifest["tokenizer_fingerprint"]
    assert (folder / "tokenizer.json").read_bytes() == (
        folder / "corpus" / "tokenizer.json"
    ).read_bytes()
    tokens_N = np.load(folder / "corpus" / "tokens.npy")
    expected = occurrences(tokens_N, loaded.manifest["eos_id"], 8)
    for window, row in rows_by_window(folder).items():
        if row["length"] == 8:
            assert row["count"] == len(expected[window])


def test_the_same_command_makes_the_same_bytes_and_then_finds_them(build, capsys):
    one, two = build("one"), build("two")
    before = {p.name: p.read_bytes() for p in one.iterdir()}
    assert before == {p.name: p.read_bytes() for p in two.iterdir()}
    capsys.readouterr()
    assert build("one") == one
    assert capsys.readouterr().out.startswith("Already there: ")
    assert before == {p.name: p.read_bytes() for p in one.iterdir()}


def test_another_set_is_not_overwritten(build, tokens_N, tmp_path):
    folder = build()
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    with pytest.raises(UsageError, match=r"seed=0 \(now 1\): give another --out"):
        build(seed=1)
    with pytest.raises(UsageError, match=r"lengths=\[3, 8\] \(now \[3\]\)"):
        build(lengths="3")
    np.save(tmp_path / "other.npy", tokens_N[1:])
    with pytest.raises(UsageError, match="corpus="):
        build(corpus=f"tokens:{tmp_path / 'other.npy'}")
    assert before == {p.name: p.read_bytes() for p in folder.iterdir()}


def test_a_corpus_that_changed_is_another_set(build, tokens_N, tmp_path):
    path = tmp_path / "tokens.npy"
    np.save(path, tokens_N)
    build(corpus=f"tokens:{path}")
    np.save(path, tokens_N[::-1])
    with pytest.raises(UsageError, match="corpus_sha256="):
        build(corpus=f"tokens:{path}")


def test_a_foreign_folder_is_left_alone(build, tmp_path):
    (tmp_path / "windows").mkdir()
    (tmp_path / "windows" / "thesis.tex").touch()
    with pytest.raises(UsageError, match=r"holds 'thesis.tex' but no manifest"):
        build()
    with pytest.raises(UsageError, match="is a file, expected a folder"):
        build(out="windows/thesis.tex")


def test_windows_longer_than_all_documents_are_refused(build):
    with pytest.raises(UsageError, match=r"no window of 500,600 tokens.* up to 36$"):
        build(lengths="3,500,600")


def test_a_corpus_of_separators_alone_is_refused(build, tmp_path):
    np.save(tmp_path / "empty.npy", np.full(20, EOS, np.uint16))
    with pytest.raises(UsageError, match=f"holds nothing but the separator {EOS}"):
        build(corpus=f"tokens:{tmp_path / 'empty.npy'}")


def test_an_empty_sample_is_refused(build):
    with pytest.raises(UsageError, match=r"edges=1000,2000: .* highest counts are \d+"):
        build(edges="1000,2000")


def test_more_windows_than_positions_are_refused(build):
    with pytest.raises(UsageError, match=r"windows of 8 tokens start at .* only"):
        build(sample="uniform", num_windows=2000, per_bucket=None, lengths="8")


def test_a_count_that_the_second_counter_denies_fails_before_anything_is_written(
    build, monkeypatch, tmp_path
):
    count = fingerprints_module.count

    def miscounted(*args):
        counts_K, positions_K = count(*args)
        return counts_K + (np.arange(len(counts_K)) == 2), positions_K

    monkeypatch.setattr(fingerprints_module, "count", miscounted)
    with pytest.raises(RunError, match="one of the two counters is defective"):
        build(verify=True)
    assert [path.name for path in (tmp_path / "windows").iterdir()] == [".lock"]


def test_a_set_that_is_already_there_is_checked(build, monkeypatch, capsys):
    folder = build()
    capsys.readouterr()
    build(verify=True)
    assert capsys.readouterr().out.startswith("Already there: ")
    with monkeypatch.context() as patch:
        wrong = np.full(10_000, 7)
        patch.setattr(
            fingerprints_module,
            "count",
            lambda tokens_N, windows_KxL: (wrong[: len(windows_KxL)],) * 2,
        )
        build()
        with pytest.raises(RunError, match="one of the two counters is defective"):
            build(verify=True)
    with (folder / "windows.parquet").open("r+b") as file:
        file.truncate(100)
    with pytest.raises(RunError, match=r"windows\.parquet has the sha256 "):
        build()


def test_a_killed_build_starts_over(build, tmp_path):
    whole = build("whole")
    (tmp_path / "windows").mkdir()
    (tmp_path / "windows" / "windows.parquet.partial").write_bytes(b"PAR1")
    folder = build()
    for name in ("windows.parquet", "manifest.json"):
        assert (folder / name).read_bytes() == (whole / name).read_bytes()


def test_the_command_line(spec, tmp_path):
    def command(*flags):
        return subprocess.run(
            [sys.executable, "-m", "experiments.extraction.build_dataset", *flags],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            check=False,
        )

    out = tmp_path / "windows"
    done = command(f"--corpus={spec}", "--eos_id=0", f"--out={out}", "--lengths=5")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"Evaluation set: {out}"
    assert evaluation_set.load(out).manifest["per_bucket"] == 1000
