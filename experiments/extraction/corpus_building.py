"""Builds corpus folders: whole or not at all, and never over anything else."""

import contextlib
import dataclasses
import importlib.metadata
import json
import os
import pathlib
import platform
import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np

from experiments import run_folder
from experiments.errors import RunError, UsageError
from experiments.extraction import byte_pairs, corpus_folder, planting, token_files
from experiments.extraction.corpus_folder import MANIFEST, TOKENIZER, TOKENS, Corpus
from experiments.extraction.documents import ALL, Part
from experiments.extraction.planting import Planting
from experiments.extraction.token_sources import IdDocuments, TokenSource, open_source

# Passages are drawn from so many tokens, so that a part of any size will do.
_MAX_CANDIDATE_TOKENS = 1 << 24
_KEPT = "kept.npy"


@dataclasses.dataclass(frozen=True)
class Request:
    """Which corpus.

    Attributes:
      spec: Where its documents come from; see `token_sources.open_source`.
      tokenizer: See there.
      eos_id: See there.
      part: Which documents are kept.
      max_tokens: The corpus ends after so many tokens; copies of passages are beyond
        them. None keeps all.
      planting: What is planted, or None.
    """

    spec: str
    tokenizer: str = ""
    eos_id: int | None = None
    part: Part = ALL
    max_tokens: int | None = None
    planting: Planting | None = None

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise UsageError(
                f"max_tokens={self.max_tokens}, expected at least 1: raise "
                "--max_tokens, or leave it out"
            )
        if self.planting and not self.planting.source.is_disjoint(self.part):
            raise UsageError(
                f"plant_from={self.planting.source} shares documents with part="
                f"{self.part}, expected none: give --part=0/2 --plant_from=1/2"
            )


def build(request: Request, folder: pathlib.Path) -> Corpus:
    """Builds the corpus in `folder`, or opens it if it is there already.

    Raises:
      UsageError: The request is impossible, or the folder holds something else; nothing
        was changed in it.
      RunError: Data cannot be read, or there is none.
    """
    source = open_source(request.spec, request.tokenizer, request.eos_id)
    return build_from(source, request, folder)


def build_from(source: TokenSource, request: Request, folder: pathlib.Path) -> Corpus:
    """Builds like `build`, from documents that are derived from those of `request`.

    What was derived how must be part of `source.identity`.

    Raises:
      UsageError: The folder holds something else; nothing was changed in it.
      RunError: Data cannot be read, or there is none.
    """
    folder = folder.expanduser().resolve()
    record = _record(request, source)
    if _is_free(folder):
        with _scratch(folder) as scratch:
            _write(request, source, record, scratch)
    else:
        _check_same(folder, record)
        print(f"The corpus {request.spec} is in {folder} already", flush=True)
    return corpus_folder.open_folder(folder)


def _record(request: Request, source: TokenSource) -> dict[str, Any]:
    """All that decides the corpus, as JSON reads it back."""
    plan = request.planting
    record = {
        "spec": request.spec,
        **source.identity,
        "part": str(request.part),
        "max_tokens": request.max_tokens,
        "plant_from": plan and str(plan.source),
        "plant_counts": plan and plan.counts,
        "plant_passages": plan and plan.passages_per_count,
        "plant_tokens": plan and plan.num_tokens,
        "seed": plan and plan.seed,
    }
    return json.loads(json.dumps(record))


def _is_free(folder: pathlib.Path) -> bool:
    if not folder.exists():
        return True
    if not folder.is_dir():
        raise UsageError(f"{folder} is a file, expected a folder: name another")
    return next(folder.iterdir(), None) is None


def _check_same(folder: pathlib.Path, record: dict[str, Any]) -> None:
    if not (folder / MANIFEST).exists():
        found = min(path.name for path in folder.iterdir())
        raise UsageError(
            f"{folder} holds {found!r} and no corpus, so nothing was written: name "
            "another folder"
        )
    before = corpus_folder.read_manifest(folder).get("request", {})
    differing = [
        f"{key}={before.get(key)!r} (now {record.get(key)!r})"
        for key in (*record, *(before.keys() - record.keys()))
        if before.get(key) != record.get(key)
    ]
    if differing:
        raise UsageError(
            f"{folder} holds another corpus, with {', '.join(differing[:4])}: name "
            "another folder"
        )


@contextlib.contextmanager
def _scratch(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """A folder beside `folder` that takes its place in the end, or else vanishes."""
    scratch = folder.with_name(folder.name + ".partial")
    scratch.mkdir(parents=True, exist_ok=True)
    with run_folder.locked(scratch, "wait for it or name another folder"):
        _empty(scratch)
        try:
            yield scratch
            os.rename(scratch, folder)
            (folder / run_folder.LOCK).unlink()
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise


def _empty(scratch: pathlib.Path) -> None:
    """Removes what a build that was killed has left."""
    ours = {TOKENS, TOKENIZER, MANIFEST, MANIFEST + ".partial", _KEPT, run_folder.LOCK}
    names = {path.name for path in scratch.iterdir()}
    if names - ours:
        raise UsageError(
            f"{scratch} holds {min(names - ours)!r}, which no build has written: move "
            "it away, or name another folder"
        )
    for name in names - {run_folder.LOCK}:
        (scratch / name).unlink()


def _write(
    request: Request, source: TokenSource, record: dict[str, Any], scratch: pathlib.Path
) -> None:
    documents = source.prepare()
    if documents.tokenizer_json is not None:
        text = documents.tokenizer_json
        (scratch / TOKENIZER).write_text(text, encoding="utf-8")
    planted = None
    if request.planting is None:
        _write_kept(request, documents, scratch / TOKENS)
    else:
        _write_kept(request, documents, scratch / _KEPT)
        planted = _plant(request.planting, documents, scratch)
        (scratch / _KEPT).unlink()
    manifest = _manifest(request, documents, planted, scratch)
    text = json.dumps({**manifest, "request": record}, indent=2) + "\n"
    run_folder.write_atomically(scratch / MANIFEST, text)


def _write_kept(request: Request, documents: IdDocuments, path: pathlib.Path) -> None:
    kept = (ids for _, ids in documents.read(request.part))
    pieces: Iterator[np.ndarray]
    if documents.eos_id is None:
        # Without a separator there is one document at most.
        pieces = (ids[: request.max_tokens] for ids in kept)
    else:
        pieces = token_files.join(kept, documents.eos_id, request.max_tokens)
    if not token_files.write_array(path, pieces, documents.vocabulary_size):
        raise RunError(
            f"corpus={request.spec!r} has no tokens in part {request.part}: give "
            "another --corpus or --part"
        )


def _plant(
    plan: Planting, documents: IdDocuments, scratch: pathlib.Path
) -> list[dict[str, int]]:
    """Writes the corpus with its copies; returns the passages for the manifest."""
    if documents.eos_id is None:
        raise UsageError(
            "planting puts passages between documents, and the corpus has no "
            "separator: give --eos_id"
        )
    kept_N = token_files.open_array(scratch / _KEPT)
    rng = np.random.default_rng(plan.seed)
    passages = planting.choose(
        _candidates(plan, documents), kept_N, plan.num_passages, plan.num_tokens, rng
    )
    tokens = [passage.tokens_L for passage in passages]
    pieces = planting.insert(kept_N, documents.eos_id, tokens, plan.copies, rng)
    token_files.write_array(scratch / TOKENS, pieces, documents.vocabulary_size)
    return [
        {
            "document": passage.document,
            "start": passage.start,
            "length": plan.num_tokens,
            "copies": int(copies),
        }
        for passage, copies in zip(passages, plan.copies, strict=True)
    ]


def _candidates(plan: Planting, documents: IdDocuments) -> list[tuple[int, np.ndarray]]:
    """The documents that passages may come from, the first 16.8 M tokens of them."""
    left = max(_MAX_CANDIDATE_TOKENS, 4 * plan.num_passages * plan.num_tokens)
    candidates = []
    for index, ids_T in documents.read(plan.source):
        candidates.append((index, ids_T))
        left -= len(ids_T)
        if left <= 0:
            break
    return candidates


def _manifest(
    request: Request,
    documents: IdDocuments,
    planted: list[dict[str, int]] | None,
    scratch: pathlib.Path,
) -> dict[str, Any]:
    tokens_N = token_files.open_array(scratch / TOKENS)
    summary = token_files.summarize(tokens_N, documents.eos_id)
    has_tokenizer = documents.tokenizer_json is not None
    return {
        "format": corpus_folder.FORMAT,
        "spec": request.spec,
        "num_tokens": len(tokens_N),
        "num_documents": summary.num_separators + 1,
        "vocabulary_size": documents.vocabulary_size,
        "eos_id": documents.eos_id,
        "dtype": str(tokens_N.dtype),
        "tokens_sha256": summary.sha256,
        "tokenizer_fingerprint": (
            byte_pairs.fingerprint(scratch / TOKENIZER) if has_tokenizer else None
        ),
        "planting": planted,
        **documents.derivation,
        "versions": {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "tokenizers": importlib.metadata.version("tokenizers"),
        },
    }
