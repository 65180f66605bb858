"""A corpus as it lies on disk: a token file, and the manifest that goes with it.

tokens.npy      1-D, uint16 or uint32; one separator between two documents
tokenizer.json  what the ids mean; absent if nobody said
manifest.json   what the corpus was made from, its size, its hash, its separator
"""

import dataclasses
import json
import pathlib
import sys
from typing import Any

import numpy as np

from experiments.errors import RunError, UsageError
from experiments.extraction import byte_pairs, token_files

FORMAT = "dpjax corpus 1"
TOKENS = "tokens.npy"
TOKENIZER = "tokenizer.json"
MANIFEST = "manifest.json"


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A corpus of token ids, opened and checked.

    Attributes:
      tokens_N: uint16[N] or uint32[N], a read-only memory map. Documents have one
        `eos_id` between them; a foreign file may also start or end with one, or have
        several in a row.
      eos_id: The separator; None if the corpus is one document.
      vocabulary_size: All ids are below it.
      sha256: Of the array's bytes (not of the file, whose header numpy may vary).
      tokenizer: A tokenizer.json, to show the tokens as text; or None.
      tokenizer_fingerprint: `byte_pairs.fingerprint(tokenizer)`, or None.
    """

    tokens_N: np.ndarray
    eos_id: int | None
    vocabulary_size: int
    sha256: str
    tokenizer: pathlib.Path | None
    tokenizer_fingerprint: str | None


def open_tokens(path: pathlib.Path, eos_id: int | None, tokenizer: str) -> Corpus:
    """Opens a token file, or a corpus folder, or the token file of a corpus folder.

    Args:
      path: A file or folder.
      eos_id: The separator, for a file that no manifest describes; None is none.
      tokenizer: A tokenizer.json or a folder that holds one, for such a file; or "".

    Raises:
      UsageError: No such file or folder, or it has another separator or tokenizer.
      RunError: What is there is damaged or does not fit together.
    """
    folder = _folder_of(path)
    given = byte_pairs.find(tokenizer) if tokenizer else None
    if folder is None:
        return open_file(path, eos_id, given)
    corpus = open_folder(folder)
    if eos_id not in (None, corpus.eos_id):
        raise UsageError(
            f"eos_id={eos_id}, but {folder} was built with the separator "
            f"{corpus.eos_id}: leave --eos_id out, or build it again with this one"
        )
    if given and byte_pairs.fingerprint(given) != corpus.tokenizer_fingerprint:
        raise UsageError(
            f"tokenizer={tokenizer!r} is not the one that made {folder}: leave "
            "--tokenizer out"
        )
    return corpus


def open_folder(folder: pathlib.Path) -> Corpus:
    """Opens a folder of `build_corpus` and verifies hash, size and ids.

    Raises:
      UsageError: There is no such folder, or no corpus in it.
      RunError: Its files are not what the manifest says.
    """
    manifest = read_manifest(folder)
    path = folder / TOKENS
    tokens_N = token_files.open_array(path)
    eos_id, vocabulary_size = manifest["eos_id"], manifest["vocabulary_size"]
    summary = token_files.summarize(tokens_N, eos_id)
    if summary.sha256 != manifest["tokens_sha256"]:
        raise RunError(
            f"{path} is not the file that {folder / MANIFEST} describes (sha256 "
            f"{summary.sha256[:12]}..., expected {manifest['tokens_sha256'][:12]}...): "
            "build the corpus again, into another folder"
        )
    token_files.check_ids(tokens_N, summary.max_id, vocabulary_size, path)
    return Corpus(
        tokens_N,
        eos_id,
        vocabulary_size,
        summary.sha256,
        *_tokenizer(folder, manifest["tokenizer_fingerprint"]),
    )


def open_file(
    path: pathlib.Path, eos_id: int | None, tokenizer: pathlib.Path | None
) -> Corpus:
    """Opens a token file that no manifest describes.

    Args:
      path: A `.npy`.
      eos_id: The separator. None makes the corpus one document, with a note on stderr.
      tokenizer: A tokenizer.json or None. With one, all ids must be of its vocabulary;
        without, the vocabulary ends at the largest id.

    Raises:
      UsageError: No such file, or a separator that is no id.
      RunError: The file is damaged or holds ids outside the vocabulary.
    """
    tokens_N = token_files.open_array(path)
    summary = token_files.summarize(tokens_N, eos_id)
    fingerprint = None
    if tokenizer is None:
        vocabulary_size = max(summary.max_id, -1 if eos_id is None else eos_id) + 1
    else:
        fingerprint = byte_pairs.fingerprint(tokenizer)
        vocabulary_size = byte_pairs.vocabulary_size(byte_pairs.open_file(tokenizer))
        token_files.check_ids(tokens_N, summary.max_id, vocabulary_size, path)
    _check_eos_id(path, eos_id, vocabulary_size, summary.num_separators)
    return Corpus(
        tokens_N, eos_id, vocabulary_size, summary.sha256, tokenizer, fingerprint
    )


def read_manifest(folder: pathlib.Path) -> dict[str, Any]:
    """The manifest of a corpus folder.

    Raises:
      UsageError: The folder or its manifest is not there.
      RunError: The manifest is not one of a corpus.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise UsageError(
            f"{folder} is not a corpus folder (it has no {MANIFEST}): give a folder of "
            f"build_corpus, or a file as tokens:{folder}/FILE.npy"
        )
    try:
        manifest = json.loads(path.read_text())
        if manifest["format"] != FORMAT:
            raise ValueError(f"its format is {manifest['format']!r}")
        missing = [key for key in _NEEDED if key not in manifest]
        if missing:
            raise ValueError(f"it lacks {', '.join(missing)}")
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"{path} is not the manifest of a corpus ({error}; expected the format "
            f"{FORMAT!r}): build the corpus again, into another folder"
        ) from error
    return manifest


_NEEDED = ("eos_id", "vocabulary_size", "tokens_sha256", "tokenizer_fingerprint")


def _folder_of(path: pathlib.Path) -> pathlib.Path | None:
    if path.is_dir():
        return path
    if path.name == TOKENS and (path.parent / MANIFEST).is_file():
        return path.parent
    return None


def _tokenizer(
    folder: pathlib.Path, expected: str | None
) -> tuple[pathlib.Path | None, str | None]:
    if expected is None:
        return None, None
    path = folder / TOKENIZER
    if byte_pairs.fingerprint(path) != expected:
        raise RunError(
            f"{path} is not the tokenizer that {folder / MANIFEST} describes: build "
            "the corpus again, into another folder"
        )
    return path, expected


def _check_eos_id(
    path: pathlib.Path, eos_id: int | None, vocabulary_size: int, num_separators: int
) -> None:
    if eos_id is None:
        print(
            f"note: no separator is known for {path}, so it counts as one document: "
            "give --eos_id if documents are separated",
            file=sys.stderr,
        )
        return
    # Without a tokenizer the vocabulary reaches as far as this very id.
    largest = min(vocabulary_size, token_files.MAX_VOCABULARY_SIZE) - 1
    if not 0 <= eos_id <= largest:
        raise UsageError(
            f"eos_id={eos_id}, expected an id from 0 to {largest}: give "
            "the id that separates documents in the corpus"
        )
    if not num_separators:
        print(
            f"note: the separator {eos_id} does not occur in {path}, so it counts as "
            "one document: check --eos_id",
            file=sys.stderr,
        )
