"""Documents as token ids: texts that are tokenised, or ids that are there already."""

import dataclasses
import itertools
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tokenizers
import tqdm

from experiments.errors import UsageError
from experiments.extraction import byte_pairs, corpus_folder, token_files
from experiments.extraction import documents as texts
from experiments.extraction.documents import Documents, Part

TOKENS = "tokens:"


@dataclasses.dataclass(frozen=True)
class IdDocuments:
    """Documents as ids.

    Attributes:
      vocabulary_size: All ids are below it.
      eos_id: The separator of documents, or None.
      tokenizer_json: The text of a tokenizer.json, or None.
      read: The documents of a part, as pairs of index and ids, in order.
      derivation: How they were derived from others; further keys of the manifest.
    """

    vocabulary_size: int
    eos_id: int | None
    tokenizer_json: str | None
    read: Callable[[Part], Iterator[tuple[int, np.ndarray]]]
    derivation: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class TokenSource:
    """Where ids come from.

    Attributes:
      identity: All that the ids depend on, as JSON: two sources with equal identities
        give the same corpus (files are told apart by their number and total size).
      prepare: Makes the documents readable; for texts this may train a tokenizer.
    """

    identity: dict[str, Any]
    prepare: Callable[[], IdDocuments]


def open_source(spec: str, tokenizer: str, eos_id: int | None) -> TokenSource:
    """The documents of `spec`.

    Args:
      spec: A SPEC of `documents.find`, or `tokens:FILE.npy` or `tokens:DIR`.
      tokenizer: For texts `bpe:V`, or a tokenizer.json, or a folder that holds one, or
        "" for `bpe:4096`; for tokens the one that made them, or "".
      eos_id: The separator; None finds it by the tokenizer or the corpus's manifest.

    Raises:
      UsageError: Something named does not exist or does not go together.
      RunError: Something cannot be read.
    """
    if spec.startswith(TOKENS):
        return _given_ids(spec, tokenizer, eos_id)
    tokenizer = tokenizer or byte_pairs.DEFAULT
    documents = texts.find(spec)
    size = byte_pairs.trained_size(tokenizer)
    if size is None:
        return _given_tokenizer(documents, byte_pairs.find(tokenizer), eos_id)
    if eos_id is not None:
        raise UsageError(
            f"eos_id={eos_id} with tokenizer={tokenizer!r}, whose separator is its "
            "own: leave --eos_id out"
        )
    return _trained_tokenizer(documents, size)


def _given_ids(spec: str, tokenizer: str, eos_id: int | None) -> TokenSource:
    path = pathlib.Path(spec.removeprefix(TOKENS)).expanduser()
    corpus = corpus_folder.open_tokens(path, eos_id, tokenizer)

    def read(part: Part) -> Iterator[tuple[int, np.ndarray]]:
        documents = enumerate(token_files.split(corpus.tokens_N, corpus.eos_id))
        return itertools.islice(documents, part.index, None, part.of)

    def prepare() -> IdDocuments:
        path = corpus.tokenizer
        text = None if path is None else path.read_text(encoding="utf-8")
        return IdDocuments(corpus.vocabulary_size, corpus.eos_id, text, read)

    identity = {
        "sha256": corpus.sha256,
        "tokenizer": corpus.tokenizer_fingerprint,
        "eos_id": corpus.eos_id,
    }
    return TokenSource(identity, prepare)


def _given_tokenizer(
    documents: Documents, path: pathlib.Path, eos_id: int | None
) -> TokenSource:
    separator = byte_pairs.eos_id(path) if eos_id is None else eos_id
    tokenizer = byte_pairs.open_file(path)
    size = byte_pairs.vocabulary_size(tokenizer)
    if not 0 <= separator < size:
        raise UsageError(
            f"eos_id={separator}, expected an id of {path}, from 0 to {size - 1}: give "
            "another --eos_id"
        )

    def prepare() -> IdDocuments:
        return _tokenised(documents, tokenizer, separator, path.read_text("utf-8"))

    identity = {
        "files": documents.size,
        "tokenizer": byte_pairs.fingerprint(path),
        "eos_id": separator,
    }
    return TokenSource(identity, prepare)


def _trained_tokenizer(documents: Documents, size: int) -> TokenSource:
    """Texts, tokenised by what is learnt from all of them, so that parts share ids."""

    def prepare() -> IdDocuments:
        progress_bar = tqdm.tqdm(
            documents, "Training the tokenizer", documents.count, unit="document"
        )
        tokenizer = byte_pairs.train(progress_bar, size)
        text = tokenizer.to_str(pretty=True)
        return _tokenised(documents, tokenizer, byte_pairs.TRAINED_EOS_ID, text)

    identity = {"files": documents.size, "tokenizer": f"bpe:{size}"}
    return TokenSource(identity, prepare)


def _tokenised(
    documents: Documents,
    tokenizer: tokenizers.Tokenizer,
    eos_id: int,
    tokenizer_json: str,
) -> IdDocuments:
    def read(part: Part) -> Iterator[tuple[int, np.ndarray]]:
        progress_bar = tqdm.tqdm(
            documents, f"Tokenising part {part}", documents.count, unit="document"
        )
        kept = itertools.islice(progress_bar, part.index, None, part.of)
        indices = itertools.count(part.index, part.of)
        return zip(indices, byte_pairs.encode(tokenizer, kept, eos_id), strict=False)

    size = byte_pairs.vocabulary_size(tokenizer)
    return IdDocuments(size, eos_id, tokenizer_json, read)
