import hashlib
import json
import pathlib

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, processors

from experiments.errors import RunError, UsageError
from experiments.extraction import byte_pairs

SEPARATOR = "<|endoftext|>"
TEXTS = [
    "def f(x):\n    return x + 1\n" * 30,
    "class A:\n    def f(self):\n        return self.x\n" * 20,
    "if x == '<|endoftext|>':\n    <|endoftext|>\n" * 20,
    "naïve café \U0001f600\r\n\t" * 10,
]


@pytest.fixture(scope="module")
def trained():
    return byte_pairs.train(TEXTS, 400)


@pytest.fixture
def path(tmp_path, trained):
    trained.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def encode(tokenizer, texts, eos_id=0):
    return [ids.tolist() for ids in byte_pairs.encode(tokenizer, texts, eos_id)]


def write(folder, **files):
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def test_training_is_deterministic_whatever_the_threads(monkeypatch):
    texts = [
        path.read_text("utf-8") for path in pathlib.Path(__file__).parent.glob("*.py")
    ]
    hashes = set()
    for parallel in ("true", "true", "false"):
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", parallel)
        text = byte_pairs.train(texts, 600).to_str()
        hashes.add(hashlib.sha256(text.encode()).hexdigest())
    assert len(hashes) == 1


def test_a_trained_vocabulary(trained):
    assert trained.token_to_id(SEPARATOR) == byte_pairs.TRAINED_EOS_ID
    assert byte_pairs.vocabulary_size(trained) <= 400
    assert byte_pairs.vocabulary_size(byte_pairs.train([], 400)) == 257
    assert byte_pairs.vocabulary_size(byte_pairs.train(TEXTS, 300)) == 300


def test_training_stops_at_its_limit(monkeypatch, trained):
    def texts():
        yield from TEXTS
        raise AssertionError("read on")

    limit = sum(map(len, TEXTS))
    monkeypatch.setattr(byte_pairs, "MAX_TRAINING_CHARACTERS", limit)
    assert byte_pairs.train(texts(), 400).to_str() == trained.to_str()
    # A text that crosses the limit counts up to it.
    assert byte_pairs.train([*TEXTS[:-1], TEXTS[-1] + "zqzqzqzq"], 400).to_str() == (
        trained.to_str()
    )


@settings(max_examples=50)
@given(st.lists(st.text() | st.sampled_from(TEXTS), max_size=4))
def test_every_text_comes_back(trained, texts):
    ids = encode(trained, texts)
    assert len(ids) == len(texts)
    decoder = tokenizers.Tokenizer.from_str(trained.to_str())
    assert [decoder.decode(i, skip_special_tokens=False) for i in ids] == texts


@settings(max_examples=50)
@given(st.lists(st.sampled_from([SEPARATOR, "<|", "|>", "a", " ", "\n"])))
def test_no_text_yields_the_separator(trained, parts):
    (ids,) = encode(trained, ["".join(parts)])
    assert 0 not in ids


def test_the_tokenizer_is_left_as_it_was(trained):
    encode(trained, [SEPARATOR])
    assert trained.encode(SEPARATOR).ids == [0]


@pytest.mark.parametrize(
    "limit", [("_MAX_BLOCK_CHARACTERS", 5), ("_MAX_BLOCK_TEXTS", 2)]
)
def test_blocks_change_nothing(monkeypatch, trained, limit):
    texts = ["", "ab", TEXTS[0], "", "", "c", TEXTS[1], "d"]
    expected = encode(trained, texts)
    monkeypatch.setattr(byte_pairs, *limit)
    assert encode(trained, texts) == expected
    assert expected == [encode(trained, [text])[0] for text in texts]


def test_texts_are_read_a_block_at_a_time(monkeypatch, trained):
    monkeypatch.setattr(byte_pairs, "_MAX_BLOCK_TEXTS", 2)
    read = []

    def texts():
        for text in "abcdef":
            read.append(text)
            yield text

    encoded = byte_pairs.encode(trained, texts(), 0)
    next(encoded)
    assert read == ["a", "b"]
    assert len(list(encoded)) == 5


def test_what_a_file_adds_or_cuts_does_not_reach_the_documents(trained):
    tokenizer = tokenizers.Tokenizer.from_str(trained.to_str())
    tokenizer.enable_truncation(max_length=4)
    tokenizer.enable_padding(length=64, pad_id=7)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{SEPARATOR} $A {SEPARATOR}", special_tokens=[(SEPARATOR, 0)]
    )
    assert encode(tokenizer, TEXTS) == encode(trained, TEXTS)


def test_a_separator_that_is_not_marked_special_is_text_too(trained):
    data = json.loads(trained.to_str())
    (added,) = data["added_tokens"]
    added["special"] = False
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(data))
    assert tokenizer.encode(SEPARATOR).ids == [0]
    assert encode(tokenizer, [SEPARATOR]) == encode(trained, [SEPARATOR])


def test_other_added_tokens_stay(trained):
    tokenizer = tokenizers.Tokenizer.from_str(trained.to_str())
    tokenizer.add_tokens(["        "])
    new = tokenizer.token_to_id("        ")
    assert encode(tokenizer, ["a" + " " * 8 + "b"])[0].count(new) == 1


def words(**vocabulary):
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="unk"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def test_a_model_that_yields_the_separator_itself():
    tokenizer = words(unk=0, end=1, a=2)
    assert encode(tokenizer, ["a b"], eos_id=1) == [[2, 0]]
    with pytest.raises(
        RunError, match="'end', which the tokenizer makes the separator"
    ):
        encode(tokenizer, ["a", "a end a"], eos_id=1)


@pytest.mark.parametrize(
    ("config", "tokenizer_config", "expected"),
    [
        ({"eos_token_id": 5}, {"eos_token": SEPARATOR}, 5),
        ({"eos_token_id": None}, {"eos_token": SEPARATOR}, 0),
        ({"eos_token_id": [5, 6]}, {"eos_token": "!"}, "!"),
        ({}, {"eos_token": {"content": "!", "lstrip": False}}, "!"),
        ({}, {"eos_token": None}, 0),
        ({}, {}, 0),
        ([], [], 0),
    ],
)
def test_the_separator_of_a_folder(path, trained, config, tokenizer_config, expected):
    write(path.parent, config=config, tokenizer_config=tokenizer_config)
    if isinstance(expected, str):
        expected = trained.token_to_id(expected)
    assert byte_pairs.eos_id(path) == expected


def test_the_separator_of_a_file_alone(tmp_path, path):
    assert byte_pairs.eos_id(path) == 0
    words(**{"unk": 0, "</s>": 1}).save(str(path))
    assert byte_pairs.eos_id(path) == 1
    words(unk=0, end=1).save(str(path))
    with pytest.raises(
        UsageError, match=r"no separator that is known .* give --eos_id"
    ):
        byte_pairs.eos_id(path)


@pytest.mark.parametrize("stated", [400_000, -1, 2**40])
def test_a_separator_by_id_that_the_vocabulary_lacks(path, stated):
    write(path.parent, config={"eos_token_id": stated})
    with pytest.raises(
        RunError, match=f"the separator {stated}, which .* give --eos_id"
    ):
        byte_pairs.eos_id(path)


def test_a_separator_by_name_that_the_vocabulary_lacks(path):
    write(path.parent, tokenizer_config={"eos_token": "</end>"})
    with pytest.raises(RunError, match=r"the separator '</end>', which .* --eos_id"):
        byte_pairs.eos_id(path)
    (path.parent / "config.json").write_text("{")
    with pytest.raises(RunError, match=r"config\.json is not JSON .* give --eos_id"):
        byte_pairs.eos_id(path)


def test_a_fingerprint_is_not_of_the_format(tmp_path, path, trained):
    expected = byte_pairs.fingerprint(path)
    other = tmp_path / "other.json"
    other.write_text(trained.to_str(pretty=True))
    assert byte_pairs.fingerprint(other) == expected
    # Older releases wrote "a b" for ["a", "b"].
    data = json.loads(trained.to_str())
    data["model"]["merges"] = [" ".join(pair) for pair in data["model"]["merges"]]
    data["model"]["vocab"] = dict(reversed(data["model"]["vocab"].items()))
    data["truncation"] = None
    other.write_text(json.dumps(data))
    assert byte_pairs.fingerprint(other) == expected


def test_a_fingerprint_is_of_all_that_decides_the_ids(tmp_path, path, trained):
    def drop_merge(data):
        data["model"]["merges"].pop()

    def swap_ids(data):
        vocabulary = data["model"]["vocab"]
        vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]

    def add_token(data):
        data["added_tokens"].append(
            {**data["added_tokens"][0], "id": 9, "content": "z"}
        )

    fingerprints = {byte_pairs.fingerprint(path)}
    for change in (drop_merge, swap_ids, add_token):
        data = json.loads(trained.to_str())
        change(data)
        other = tmp_path / "other.json"
        other.write_text(json.dumps(data))
        fingerprints.add(byte_pairs.fingerprint(other))
    assert len(fingerprints) == 4


def test_a_fingerprint_of_a_unigram_model(tmp_path):
    hashes = []
    for score in (-1.0, -2.0):
        model = models.Unigram([("<unk>", 0.0), ("a", score)], unk_id=0)
        tokenizers.Tokenizer(model).save(str(tmp_path / "a.json"))
        hashes.append(byte_pairs.fingerprint(tmp_path / "a.json"))
    assert len(set(hashes)) == 2


def test_decode_shows_everything(path, trained):
    text = "a , b  .\n\tdon 't \U0001f600" + SEPARATOR
    ids = [*encode(trained, [text])[0], 0]
    assert byte_pairs.decode(path, ids) == text + SEPARATOR
    assert byte_pairs.decode(path, np.array(ids, np.uint16)) == text + SEPARATOR
    assert byte_pairs.decode(path, []) == ""


def test_decode_of_ids_that_the_vocabulary_lacks(path, trained):
    a, b = trained.token_to_id("a"), trained.token_to_id("b")
    ids = np.array([50_399, a, 2**32 - 1, 2**31, b], np.uint32)
    assert byte_pairs.decode(path, ids) == "\ufffda\ufffd\ufffdb"


@pytest.mark.parametrize("size", ["", "x", "256", "-5", "4e3", "4096.0"])
def test_vocabularies_that_cannot_be(size):
    with pytest.raises(UsageError, match=r"expected bpe:V with V at least 257"):
        byte_pairs.trained_size(f"bpe:{size}")


def test_find(tmp_path, path):
    assert byte_pairs.find(str(path)) == path
    assert byte_pairs.find(str(tmp_path)) == path
    with pytest.raises(UsageError, match="no such file, expected a tokenizer"):
        byte_pairs.find(str(tmp_path / "none"))
    with pytest.raises(UsageError, match="'bpe:300' is for texts"):
        byte_pairs.find("bpe:300")
    (tmp_path / "merges.txt").write_text("")
    path.unlink()
    with pytest.raises(UsageError, match=r"AutoTokenizer.from_pretrained\("):
        byte_pairs.find(str(tmp_path))


def test_files_that_are_no_tokenizer(tmp_path):
    path = tmp_path / "tokenizer.json"
    for text in ("", "{}", '{"model": {"type": "BPE"', "\x00"):
        path.write_text(text)
        with pytest.raises(RunError, match=r"cannot be read as a tokenizer"):
            byte_pairs.open_file(path)
