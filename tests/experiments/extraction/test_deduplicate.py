import json
import pathlib
import re
import subprocess
import sys
import types

import numpy as np
import pytest

from experiments.errors import RunError, UsageError
from experiments.extraction import byte_pairs, corpus, deduplicate
from tests.experiments.extraction.corpora import EOS

REPOSITORY = pathlib.Path(__file__).parents[3]
DEFAULTS = dict.fromkeys(("corpus", "method", "eos_id", "length", "threshold"))


def parse(**values):
    return deduplicate.parse({**DEFAULTS, **values})


@pytest.fixture
def spec(tmp_path):
    """Two documents, a copy of the first, and the second with a word more."""
    rng = np.random.default_rng(0)
    one, two = rng.integers(1, 900, (2, 100))
    documents = [one, [], two, one, np.insert(two, 50, 901)]
    tokens = np.concatenate([[*ids, EOS] for ids in documents]).astype(np.uint16)
    np.save(tmp_path / "ids.npy", tokens)
    return f"tokens:{tmp_path}/ids.npy"


def tokens_of(spec):
    return np.load(spec.removeprefix("tokens:"))


def built(spec, folder, **values):
    options = parse(**{"corpus": spec, "eos_id": EOS, **values})
    return deduplicate.deduplicate(options, folder)


def manifest(folder):
    return json.loads((folder / "manifest.json").read_text())


def test_exact(spec, tmp_path):
    found = built(spec, tmp_path / "out", method="exact", length=40)
    tokens = tokens_of(spec)
    # The insertion parts the copy in two, and only it is left.
    expected = [*tokens[:101], *tokens[102:202], EOS, 901]
    assert found.tokens_N.tolist() == expected
    told = manifest(tmp_path / "out")
    assert told["deduplication"] == {
        "method": "exact",
        "length": 40,
        "num_tokens_removed": 200,
        "num_documents_removed": 1,
        "num_ranges_removed": 3,
    }
    assert (told["num_tokens"], told["num_documents"]) == (len(expected), 3)
    assert told["spec"] == spec
    assert (found.eos_id, found.vocabulary_size) == (EOS, 902)


def test_near(spec, tmp_path):
    found = built(spec, tmp_path / "out", method="near")
    tokens = tokens_of(spec)
    assert found.tokens_N.tolist() == [*tokens[:101], *tokens[102:202]]
    told = manifest(tmp_path / "out")
    assert told["deduplication"] == {
        "method": "near",
        "threshold": 0.8,
        "num_tokens_removed": 201,
        "num_documents_removed": 2,
    }
    # 96 5-grams of two are there still, and 5 are new.
    options = {"method": "near", "threshold": 0.97}
    kept = built(spec, tmp_path / "strict", **options)
    assert kept.tokens_N.tolist() == [
        *tokens[:101],
        *tokens[102:202],
        EOS,
        *tokens[304:-1],
    ]


def test_a_second_time_it_is_there_and_another_is_not_written_over(
    spec, tmp_path, capsys
):
    first = built(spec, tmp_path / "out", method="exact")
    before = (tmp_path / "out" / "tokens.npy").stat().st_mtime_ns
    again = built(spec, tmp_path / "out", method="exact")
    assert again.sha256 == first.sha256
    assert "is in" in capsys.readouterr().out
    for other in ({"method": "near"}, {"method": "exact", "length": 49}):
        with pytest.raises(UsageError, match=r"holds another corpus, with"):
            built(spec, tmp_path / "out", **other)
    np.save(tmp_path / "ids.npy", tokens_of(spec)[::-1])
    with pytest.raises(UsageError, match="holds another corpus, with sha256="):
        built(spec, tmp_path / "out", method="exact")
    assert (tmp_path / "out" / "tokens.npy").stat().st_mtime_ns == before


def test_the_tokenizer_goes_along(tmp_path):
    for n in range(3):
        (tmp_path / f"{n}.txt").write_text("the same words in every file " * 9)
    source = corpus.load(f"text:{tmp_path}/*.txt", tmp_path / "in", tokenizer="bpe:270")
    spec = f"tokens:{tmp_path}/in"
    for method in ("exact", "near"):
        found = built(spec, tmp_path / method, method=method, eos_id=None)
        assert found.tokenizer_fingerprint == source.tokenizer_fingerprint
        assert found.vocabulary_size == source.vocabulary_size
        assert found.eos_id == source.eos_id
    # Three copies of one document; that one repeats itself, too.
    whole = "the same words in every file " * 9
    assert byte_pairs.decode(found.tokenizer, found.tokens_N) == whole
    exact = corpus.load(f"tokens:{tmp_path}/exact", tmp_path / "unused")
    text = byte_pairs.decode(exact.tokenizer, exact.tokens_N)
    assert len(text) < len(whole)
    assert whole.startswith(text)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"corpus": "stdlib"}, "corpus='stdlib', expected tokens:DIR or tokens:FILE"),
        ({"corpus": None}, "corpus='', expected tokens:DIR"),
        ({"method": None}, "--method is missing: give --method=exact|near"),
        ({"method": "near", "length": 9}, "--length has no meaning with method=near"),
        ({"threshold": 0.5}, "--threshold has no meaning with method=exact"),
        ({"length": 0}, "length=0, expected an integer >= 1"),
        ({"method": "near", "threshold": 0.0}, "threshold=0.0, expected a number"),
        ({"method": "near", "threshold": 1.1}, "threshold=1.1, expected a number"),
        ({"method": "near", "threshold": float("nan")}, "threshold=nan, expected"),
    ],
)
def test_flags_that_cannot_be(values, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        parse(**{"corpus": "tokens:x.npy", "method": "exact", **values})


def test_a_corpus_that_is_not_there(tmp_path):
    with pytest.raises(UsageError, match=r"no such file"):
        built(f"tokens:{tmp_path}/x.npy", tmp_path / "out", method="near")
    assert not (tmp_path / "out").exists()
    np.save(tmp_path / "empty.npy", np.zeros(0, np.uint16))
    with pytest.raises(RunError, match="holds no tokens"):
        built(f"tokens:{tmp_path}/empty.npy", tmp_path / "out", method="near")


def test_without_a_folder(monkeypatch):
    values = {**DEFAULTS, "corpus": "tokens:x.npy", "method": "near", "out": None}
    fake = {k: types.SimpleNamespace(value=value) for k, value in values.items()}
    monkeypatch.setattr(deduplicate.flags, "FLAGS", fake)
    with pytest.raises(UsageError, match="--out is missing: give --out=FOLDER"):
        deduplicate.main()


def test_the_program(spec, tmp_path):
    done = subprocess.run(
        [
            *(sys.executable, "-m", "experiments.extraction.deduplicate"),
            *(f"--corpus={spec}", "--eos_id=0", "--method=exact", "--length=40"),
            "--out=out",
        ],
        cwd=tmp_path,
        env={"PYTHONPATH": str(REPOSITORY), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == (
        f"Corpus: {tmp_path}/out (203 tokens in 3 documents; removed 200 tokens in 3 "
        "ranges, and 1 of 4 documents whole)"
    )
