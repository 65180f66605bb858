"""Byte-level byte-pair encoding."""

import hashlib
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import tokenizers

from experiments.errors import RunError, UsageError

_FILE = "tokenizer.json"


def find(tokenizer: str) -> pathlib.Path:
    """The tokenizer.json that `tokenizer` is or holds.

    Raises:
      UsageError: There is none.
    """
    path = pathlib.Path(tokenizer).expanduser()
    path = path / _FILE if path.is_dir() else path
    if not path.is_file():
        raise UsageError(
            f"tokenizer={tokenizer!r}: no such file, expected a {_FILE} or a folder "
            "that holds one: give --tokenizer=FOLDER, or bpe:4096 to train one"
        )
    return path


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
    """One more than the largest id: ids may have gaps."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


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
    """The text of token ids, for display: special tokens shown, no clean-up.

    Text is no identity: encoding it again may give other ids.
    """
    tokenizer = open_file(tokenizer_json)
    return tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)
