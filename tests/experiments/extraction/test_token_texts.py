import pytest
from tokenizers import Tokenizer, decoders, models

from experiments.errors import RunError
from experiments.extraction import byte_pairs, token_texts


@pytest.fixture
def bytes_only(tmp_path):
    """A tokenizer whose tokens are bytes, and its file."""
    tokenizer = byte_pairs.train(["a"], 257)
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return tokenizer, path


def test_each_token_has_a_text_of_its_own(bytes_only):
    tokenizer, path = bytes_only
    (ids,) = byte_pairs.encode(tokenizer, ["a \n<\u00e9\x00"], 0)
    texts = token_texts.of_ids(path, ids.tolist())
    # The two halves of a character are no text, and stay two tokens.
    assert "".join(texts[i] for i in ids) == (
        "a \u21b5\n<\ufffd\ufffd\u27e8U+0000\u27e9"
    )


def test_special_and_unknown_ids_are_shown(bytes_only):
    _, path = bytes_only
    texts = token_texts.of_ids(path, [0, 256, 257, 2**32 - 1])
    assert texts[0] == "<|endoftext|>"
    assert texts[257] == texts[2**32 - 1] == "\ufffd"


def test_no_token_is_invisible(bytes_only):
    tokenizer, path = bytes_only
    texts = token_texts.of_ids(path, range(tokenizer.get_vocab_size()))
    assert len(texts) == 257
    assert all(texts.values())
    assert {c for text in texts.values() for c in text if ord(c) < 32} == {"\n", "\t"}


def test_a_decoder_that_drops_the_first_space_loses_none(tmp_path):
    vocabulary = {"\u2581the": 0, "s": 1, "\u2581": 2}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="s"))
    tokenizer.decoder = decoders.Metaspace()
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    assert tokenizer.decode([0, 1]) == "thes"
    assert token_texts.of_ids(path, [0, 1]) == {0: " the", 1: "s"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain \u4e2d <b>&", "plain \u4e2d <b>&"),
        ("\u202e\u2028\x7f", "\u27e8U+202E\u27e9\u27e8U+2028\u27e9\u27e8U+007F\u27e9"),
        ("\r\n", "\u27e8U+000D\u27e9\u21b5\n"),
    ],
)
def test_what_would_not_be_seen_has_a_sign(text, expected):
    assert token_texts.visible(text) == expected


def test_a_tokenizer_that_cannot_be_read_is_refused(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(RunError, match="cannot be read as a tokenizer"):
        token_texts.of_ids(tmp_path / "tokenizer.json", [0])
