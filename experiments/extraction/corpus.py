"""Corpora by SPEC, as token ids.

`stdlib`, `text:GLOB`, `jsonl:GLOB`, `tfds:NAME`: texts, tokenised into a corpus folder;
`tokens:FILE.npy`, `tokens:DIR`: token ids as they are.
"""

import pathlib

from experiments.errors import UsageError
from experiments.extraction import byte_pairs, corpus_folder
from experiments.extraction.corpus_folder import Corpus

__all__ = ["Corpus", "load"]

_TOKENS = "tokens:"


def load(
    spec: str, build_in: pathlib.Path, *, eos_id: int | None = None, tokenizer: str = ""
) -> Corpus:
    """Opens the corpus `spec`; texts are tokenised first."""
    if spec.startswith(_TOKENS):
        return open_tokens(
            pathlib.Path(spec.removeprefix(_TOKENS)).expanduser(), eos_id, tokenizer
        )
    raise UsageError(f"corpus={spec!r}: not yet")


def open_tokens(path: pathlib.Path, eos_id: int | None, tokenizer: str) -> Corpus:
    """Opens a token file, or a corpus folder."""
    folder = _folder_of(path)
    if folder is None:
        named = byte_pairs.find(tokenizer) if tokenizer else None
        return corpus_folder.open_file(path, eos_id, named)
    corpus = corpus_folder.open_folder(folder)
    if eos_id not in (None, corpus.eos_id):
        raise UsageError(
            f"eos_id={eos_id}, but the separator of {folder} is {corpus.eos_id}: leave "
            "--eos_id out"
        )
    if tokenizer:
        fingerprint = byte_pairs.fingerprint(byte_pairs.find(tokenizer))
        if fingerprint != corpus.tokenizer_fingerprint:
            raise UsageError(
                f"tokenizer={tokenizer!r} is not the one that made {folder}: leave "
                "--tokenizer out"
            )
    return corpus


def _folder_of(path: pathlib.Path) -> pathlib.Path | None:
    """The corpus folder that `path` is or belongs to."""
    if path.is_dir():
        return path
    if path.name == corpus_folder.TOKENS and (path.parent / "manifest.json").exists():
        return path.parent
    return None
