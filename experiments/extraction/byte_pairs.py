"""Byte-level byte-pair encoding, and any other tokenizer.json.

Training is deterministic: the same texts give the same tokenizer, whatever the number
of threads.
"""

import hashlib
import itertools
import json
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from experiments.errors import RunError, UsageError
from experiments.extraction import token_files

FILE = "tokenizer.json"
DEFAULT = "bpe:4096"
SEPARATOR = "<|endoftext|>"
# Special tokens come first.
TRAINED_EOS_ID = 0
_SEPARATORS = (SEPARATOR, "</s>")
# The bytes and the separator.
MIN_VOCABULARY_SIZE = 257
# More text changes the merges little, and training takes time: 2^27 characters take
# about a minute on two cores.
MAX_TRAINING_CHARACTERS = 1 << 27
_MAX_BLOCK_CHARACTERS = 1 << 22
_MAX_BLOCK_TEXTS = 1 << 12


def trained_size(tokenizer: str) -> int | None:
    """V if `tokenizer` is `bpe:V`, a tokenizer to train; None if it names a file.

    Raises:
      UsageError: V is no number of entries that can be.

    Example:
      >>> trained_size("bpe:4096"), trained_size("gpt2/tokenizer.json")
      (4096, None)
    """
    kind, colon, size = tokenizer.partition(":")
    if kind != "bpe" or not colon:
        return None
    if not size.isdecimal() or int(size) < MIN_VOCABULARY_SIZE:
        raise UsageError(
            f"tokenizer={tokenizer!r}, expected bpe:V with V at least "
            f"{MIN_VOCABULARY_SIZE} (the bytes and a separator): give "
            f"--tokenizer={DEFAULT}"
        )
    token_files.dtype_for(int(size))
    return int(size)


def train(texts: Iterable[str], size: int) -> tokenizers.Tokenizer:
    """Trains a byte-level BPE like GPT-2's.

    Args:
      texts: Of these the first 2^27 characters count.
      size: The number of entries, at least 257; texts with few distinct pairs give
        fewer. Id 0 is `<|endoftext|>`, and the bytes follow.

    Example:
      >>> tokenizer = train(["low lower lowest"] * 2, 260)
      >>> tokenizer.encode(" lowest").tokens
      ['Ġlow', 'e', 's', 't']
    """
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=2,
        special_tokens=[SEPARATOR],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_first(texts, MAX_TRAINING_CHARACTERS), trainer)
    return tokenizer


def find(tokenizer: str) -> pathlib.Path:
    """The tokenizer.json that `tokenizer` is or holds.

    Raises:
      UsageError: There is none.
    """
    if trained_size(tokenizer):
        raise UsageError(
            f"tokenizer={tokenizer!r} is for texts, and the corpus is tokens: leave "
            "--tokenizer out, or name the tokenizer.json that made them"
        )
    path = pathlib.Path(tokenizer).expanduser()
    path = path / FILE if path.is_dir() else path
    if path.is_file():
        return path
    if (path.parent / "merges.txt").is_file():
        raise UsageError(
            f"tokenizer={tokenizer!r} holds a tokenizer of older files, expected "
            f"{FILE}: with transformers installed, "
            f"AutoTokenizer.from_pretrained({str(path.parent)!r})"
            ".save_pretrained(FOLDER) writes one"
        )
    raise UsageError(
        f"tokenizer={tokenizer!r}: no such file, expected a {FILE} or a folder that "
        f"holds one: give --tokenizer=FOLDER, or {DEFAULT} to train one"
    )


def open_file(path: pathlib.Path) -> tokenizers.Tokenizer:
    """Reads a tokenizer.json.

    Raises:
      RunError: It cannot be read as one.
    """
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:
        # The library raises plain Exception, whatever the cause.
        raise RunError(
            f"{path} cannot be read as a tokenizer ({error}): give another --tokenizer"
        ) from error


def vocabulary_size(tokenizer: tokenizers.Tokenizer) -> int:
    """One more than the largest id: ids may have gaps.

    Example:
      >>> vocabulary_size(train(["a"], 300))
      257
    """
    ids = tokenizer.get_vocab(with_added_tokens=True).values()
    return max(ids, default=-1) + 1


def eos_id(path: pathlib.Path) -> int:
    """The separator of a tokenizer.json, by what lies beside it.

    That is `eos_token_id` in config.json, else `eos_token` in tokenizer_config.json,
    else `<|endoftext|>` or `</s>` if the vocabulary has them.

    Raises:
      UsageError: None of these says.
      RunError: What they say is not in the vocabulary.
    """
    tokenizer = open_file(path)
    stated = _stated_separator(path.parent)
    if stated is None:
        known = (tokenizer.token_to_id(separator) for separator in _SEPARATORS)
        found = next((i for i in known if i is not None), None)
    elif isinstance(stated, int):
        found = stated if _has_id(tokenizer, stated) else None
    else:
        found = tokenizer.token_to_id(stated)
    if found is not None:
        return found
    if stated is not None:
        raise RunError(
            f"{path}: the separator {stated!r}, which {path.parent} names, is not in "
            "the vocabulary: give --eos_id"
        )
    raise UsageError(
        f"{path} has no separator that is known (no eos_token_id in config.json, no "
        f"eos_token in tokenizer_config.json, none of {', '.join(_SEPARATORS)} in the "
        "vocabulary): give --eos_id"
    )


def encode(
    tokenizer: tokenizers.Tokenizer, texts: Iterable[str], eos_id: int
) -> Iterator[np.ndarray]:
    """The ids of each text, in order, as uint32 arrays; a block of texts at a time.

    Nothing is added to a text and nothing cut off, and special tokens in it are plain
    text: `<|endoftext|>` in a source file does not end a document.

    Args:
      tokenizer: Is not changed.
      texts: Without lone surrogates.
      eos_id: The separator, which no text may yield.

    Raises:
      RunError: A text yields the separator nevertheless, for the model itself knows it.

    Example:
      >>> tokenizer = train(["a b"], 257)
      >>> [len(ids) for ids in encode(tokenizer, ["", "b", "<|endoftext|>"], 0)]
      [0, 1, 13]
    """
    plain = _plain(tokenizer, eos_id)
    for block in _blocks(texts):
        for encoding in plain.encode_batch_fast(block, add_special_tokens=False):
            ids_T = np.asarray(encoding.ids, np.uint32)
            if (ids_T == eos_id).any():
                raise RunError(
                    f"a text holds {tokenizer.id_to_token(eos_id)!r}, which the "
                    f"tokenizer makes the separator {eos_id}: give another --eos_id or "
                    "--tokenizer"
                )
            yield ids_T


def fingerprint(tokenizer_json: pathlib.Path) -> str:
    """A hash of what decides the ids: vocabulary, merges and added tokens.

    How the file is formatted, or which release of the library wrote it, does not
    matter.

    Raises:
      RunError: The file cannot be read as a tokenizer.
    """
    data: dict[str, Any] = json.loads(open_file(tokenizer_json).to_str())
    model = data["model"]
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        vocabulary = sorted(vocabulary.items(), key=lambda item: (item[1], item[0]))
    added = sorted((token["id"], token["content"]) for token in data["added_tokens"])
    parts = [vocabulary, model.get("merges"), added]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def decode(tokenizer_json: pathlib.Path, ids: Sequence[int] | np.ndarray) -> str:
    """The text of token ids, for display: special tokens are shown, nothing is tidied.

    Ids that the vocabulary lacks (a model may have more rows) show as U+FFFD, as do
    bytes that are no whole character. Encoding the text again may give other ids.

    Raises:
      RunError: The file cannot be read as a tokenizer.
    """
    tokenizer = open_file(tokenizer_json)
    runs = itertools.groupby(map(int, ids), key=lambda i: _has_id(tokenizer, i))
    return "".join(
        tokenizer.decode(list(run), skip_special_tokens=False)
        if known
        else "\ufffd" * len(list(run))
        for known, run in runs
    )


def _has_id(tokenizer: tokenizers.Tokenizer, token_id: int) -> bool:
    # The library takes unsigned 32-bit ids and raises OverflowError for others.
    return 0 <= token_id < 2**32 and tokenizer.id_to_token(token_id) is not None


def _first(texts: Iterable[str], max_characters: int) -> Iterator[str]:
    left = max_characters
    for text in texts:
        yield text[:left]
        left -= len(text)
        if left <= 0:
            return


def _plain(tokenizer: tokenizers.Tokenizer, eos_id: int) -> tokenizers.Tokenizer:
    """A copy that takes special tokens for text, the separator among them."""
    data = json.loads(tokenizer.to_str())
    for token in data["added_tokens"]:
        if token["id"] == eos_id:
            token["special"] = True
    copy = tokenizers.Tokenizer.from_str(json.dumps(data))
    copy.encode_special_tokens = True
    # A file may ask for either, and would cut or lengthen the documents.
    copy.no_truncation()
    copy.no_padding()
    return copy


def _blocks(texts: Iterable[str]) -> Iterator[list[str]]:
    block: list[str] = []
    characters = 0
    for text in texts:
        block.append(text)
        characters += len(text)
        if characters >= _MAX_BLOCK_CHARACTERS or len(block) >= _MAX_BLOCK_TEXTS:
            yield block
            block, characters = [], 0
    if block:
        yield block


def _stated_separator(folder: pathlib.Path) -> int | str | None:
    """The id or the text of the separator that a model's folder names."""
    eos = _read_object(folder / "config.json").get("eos_token_id")
    # Some name several ids, ends of a chat's turns among them.
    if type(eos) is int:
        return eos
    token = _read_object(folder / "tokenizer_config.json").get("eos_token")
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _read_object(path: pathlib.Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RunError(
            f"{path} is not JSON ({error}): mend the file, or give --eos_id"
        ) from error
    return data if isinstance(data, dict) else {}
