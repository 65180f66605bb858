import hashlib
import json

import numpy as np
import pytest

from experiments.errors import RunError, UsageError
from experiments.extraction import byte_pairs, corpus, corpus_folder

IDS = [5, 6, 0, 7, 7, 0, 3]


@pytest.fixture
def path(tmp_path):
    np.save(tmp_path / "ids.npy", np.array(IDS, np.uint16))
    return tmp_path / "ids.npy"


@pytest.fixture
def folder(tmp_path):
    """A corpus folder, built from texts."""
    for n, text in enumerate(["one two", "two one one", "three"]):
        (tmp_path / f"{n}.txt").write_text(text * 9)
    corpus.load(f"text:{tmp_path}/*.txt", tmp_path / "built", tokenizer="bpe:270")
    return tmp_path / "built"


@pytest.fixture
def tokenizer(tmp_path):
    path = tmp_path / "other" / "tokenizer.json"
    path.parent.mkdir()
    byte_pairs.train(["other words"] * 9, 265).save(str(path))
    return path


def load(path, tmp_path, **options):
    return corpus.load(f"tokens:{path}", tmp_path / "not-built", **options)


def test_a_token_file(path, tmp_path, capsys):
    found = load(path, tmp_path, eos_id=0)
    assert found.tokens_N.tolist() == IDS
    assert isinstance(found.tokens_N, np.memmap)
    assert (found.eos_id, found.vocabulary_size) == (0, 8)
    data = np.array(IDS, "<u2").tobytes()
    assert found.sha256 == hashlib.sha256(data).hexdigest()
    assert (found.tokenizer, found.tokenizer_fingerprint) == (None, None)
    assert capsys.readouterr().err == ""
    assert not (tmp_path / "not-built").exists()


def test_a_token_file_in_the_home_folder(path, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load("~/ids.npy", tmp_path, eos_id=0).tokens_N.tolist() == IDS


def test_without_a_separator_it_is_one_document_and_says_so(path, tmp_path, capsys):
    found = load(path, tmp_path)
    assert (found.eos_id, found.vocabulary_size) == (None, 8)
    assert "note: no separator is known for" in capsys.readouterr().err


@pytest.mark.parametrize(("eos_id", "vocabulary_size"), [(1, 8), (99, 100)])
def test_a_separator_that_never_occurs_is_noted(
    path, tmp_path, capsys, eos_id, vocabulary_size
):
    found = load(path, tmp_path, eos_id=eos_id)
    assert (found.eos_id, found.vocabulary_size) == (eos_id, vocabulary_size)
    assert f"note: the separator {eos_id} does not occur" in capsys.readouterr().err


@pytest.mark.parametrize("eos_id", [-1, 2**32])
def test_a_separator_that_is_no_id(path, tmp_path, eos_id):
    largest = {-1: 7, 2**32: 2**32 - 1}[eos_id]
    message = f"eos_id={eos_id}, expected an id from 0 to {largest}:"
    with pytest.raises(UsageError, match=message):
        load(path, tmp_path, eos_id=eos_id)


def test_a_token_file_with_its_tokenizer(tmp_path, path, tokenizer):
    found = load(path, tmp_path, eos_id=0, tokenizer=str(tokenizer.parent))
    assert found.tokenizer == tokenizer
    assert found.tokenizer_fingerprint == byte_pairs.fingerprint(tokenizer)
    assert found.vocabulary_size == 265
    np.save(path, np.array([3, 0, 265, 266], np.uint16))
    with pytest.raises(RunError, match=r"position 2 is 265, expected .* size 265"):
        load(path, tmp_path, eos_id=0, tokenizer=str(tokenizer))
    np.save(path, np.array([3, 0], np.uint16))
    with pytest.raises(UsageError, match="eos_id=265, expected an id from 0 to 264"):
        load(path, tmp_path, eos_id=265, tokenizer=str(tokenizer))


def test_wide_ids(tmp_path):
    np.save(tmp_path / "ids.npy", np.array([70_000, 0, 2**32 - 1], np.uint32))
    found = load(tmp_path / "ids.npy", tmp_path, eos_id=0)
    assert found.vocabulary_size == 2**32
    assert found.tokens_N.tolist() == [70_000, 0, 2**32 - 1]


def test_a_folder_by_either_name(folder, tmp_path):
    manifest = json.loads((folder / "manifest.json").read_text())
    for name in (folder, folder / "tokens.npy"):
        found = load(name, tmp_path)
        assert found.tokenizer == folder / "tokenizer.json"
        assert found.tokenizer_fingerprint == manifest["tokenizer_fingerprint"]
        assert found.sha256 == manifest["tokens_sha256"]
        assert (found.eos_id, found.vocabulary_size) == (
            manifest["eos_id"],
            manifest["vocabulary_size"],
        )


def test_a_folder_takes_no_other_separator_or_tokenizer(folder, tmp_path, tokenizer):
    same = load(folder, tmp_path, eos_id=0, tokenizer=str(folder))
    assert same.eos_id == 0
    with pytest.raises(UsageError, match=r"eos_id=3, but .* with the separator 0"):
        load(folder, tmp_path, eos_id=3)
    with pytest.raises(UsageError, match=r"is not the one that made .*: leave"):
        load(folder, tmp_path, tokenizer=str(tokenizer))
    with pytest.raises(UsageError, match="'bpe:300' is for texts"):
        load(folder, tmp_path, tokenizer="bpe:300")


def test_a_copy_of_the_tokens_alone_is_a_foreign_file(folder, tmp_path):
    copy = tmp_path / "tokens.npy"
    copy.write_bytes((folder / "tokens.npy").read_bytes())
    assert load(copy, tmp_path).eos_id is None


def test_tokens_that_are_not_those_of_the_manifest(folder, tmp_path):
    tokens_N = np.load(folder / "tokens.npy")
    tokens_N[-1] += 1
    np.save(folder / "tokens.npy", tokens_N)
    with pytest.raises(RunError, match=r"tokens\.npy is not the file that .*sha256"):
        load(folder, tmp_path)
    np.save(folder / "tokens.npy", tokens_N[:-1])
    with pytest.raises(RunError, match=r"tokens\.npy is not the file that .*sha256"):
        load(folder, tmp_path)


def test_a_tokenizer_that_is_not_that_of_the_manifest(folder, tmp_path, tokenizer):
    (folder / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    with pytest.raises(RunError, match=r"tokenizer\.json is not the tokenizer that"):
        load(folder, tmp_path)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(RunError, match=r"tokenizer\.json cannot be read"):
        load(folder, tmp_path)


def test_a_vocabulary_that_is_smaller_than_the_ids(folder, tmp_path):
    manifest = json.loads((folder / "manifest.json").read_text())
    largest = int(np.load(folder / "tokens.npy").max())
    manifest["vocabulary_size"] = largest
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(RunError, match=rf"is {largest}, expected an id below"):
        load(folder, tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"format": "another"}'])
def test_a_manifest_of_something_else(folder, tmp_path, text):
    (folder / "manifest.json").write_text(text)
    with pytest.raises(RunError, match=r"manifest\.json is not the manifest of a corp"):
        load(folder, tmp_path)


@pytest.mark.parametrize("key", corpus_folder._NEEDED)
def test_a_manifest_without_a_key(folder, tmp_path, key):
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest[key]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(RunError, match=f"not the manifest of a corpus .it lacks {key}"):
        load(folder, tmp_path)


def test_a_folder_without_a_corpus(tmp_path):
    with pytest.raises(
        UsageError, match=r"not a corpus folder .* or a file as tokens:"
    ):
        load(tmp_path, tmp_path)


def test_texts_are_tokenised_once(tmp_path, folder, monkeypatch):
    spec = f"text:{tmp_path}/*.txt"
    monkeypatch.setattr(byte_pairs, "train", None)
    again = corpus.load(spec, folder, tokenizer="bpe:270")
    assert byte_pairs.decode(again.tokenizer, again.tokens_N).split(
        "<|endoftext|>"
    ) == [
        "one two" * 9,
        "two one one" * 9,
        "three" * 9,
    ]
    with pytest.raises(UsageError, match=r"another corpus, with tokenizer='bpe:270'"):
        corpus.load(spec, folder)


def test_texts_with_a_trained_tokenizer_take_no_separator(tmp_path):
    with pytest.raises(UsageError, match=r"eos_id=3 with tokenizer='bpe:4096'"):
        corpus.load("stdlib", tmp_path / "new", eos_id=3)
    assert not list(tmp_path.iterdir())


def test_an_unknown_spec(tmp_path):
    with pytest.raises(UsageError, match=r"did you mean 'tokens'.*tokens:FILE\.npy"):
        corpus.load("token:ids.npy", tmp_path / "new")
    assert not list(tmp_path.iterdir())
