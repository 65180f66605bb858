"""Removes from a corpus of token ids what occurs in it more than once.

    python -m experiments.extraction.deduplicate --corpus=tokens:DIR --method=exact \\
        --out=OTHER

--method=exact removes repeated substrings of --length tokens (50), within documents:
every token that a copy of an earlier window covers goes (Lee et al. 2022, arXiv
2107.06499). The first copy stays, save where it is itself a copy of something earlier.
What is left of a document stays one document; it may have new neighbours inside, where
something was removed.

--method=near removes documents that nearly repeat an earlier one: with a Jaccard index
of the sets of 5-grams of tokens of at least --threshold (0.8), found by MinHash and
then computed exactly. The first document of its kind stays, and is what later ones are
compared with: a chain of documents, each similar to the next, does not vanish whole.

The folder --out is a corpus folder like those of build_corpus, and any of the programs
takes it as tokens:OTHER. Its manifest.json says what was removed. It is written whole
or not at all; the same command again finds the corpus and does nothing; if --out holds
anything else, nothing is overwritten.

To see what a model has memorised of text that its corpus repeated, train it on the new
corpus and ask about windows of the old one (build_dataset --corpus=tokens:DIR).
"""

import dataclasses
import itertools
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from absl import flags

from experiments import command_line
from experiments.errors import UsageError
from experiments.extraction import (
    corpus_building,
    corpus_folder,
    exact_deduplication,
    near_deduplication,
    token_files,
)
from experiments.extraction.corpus_building import Request
from experiments.extraction.corpus_folder import Corpus
from experiments.extraction.token_sources import TOKENS, IdDocuments, TokenSource

EXACT, NEAR = METHODS = ("exact", "near")
_LENGTH = 50


@dataclasses.dataclass(frozen=True)
class Options:
    """What to remove from which corpus.

    Attributes:
      corpus: `tokens:DIR` or `tokens:FILE.npy`.
      method: `exact`, repeated substrings; or `near`, similar documents.
      eos_id: The separator, if the corpus does not name it.
      length: Tokens of a repeated substring, exact only.
      threshold: The least Jaccard index of similar documents, near only.
    """

    corpus: str
    method: str
    eos_id: int | None = None
    length: int = _LENGTH
    threshold: float = near_deduplication.THRESHOLD


def main() -> None:
    """Removes as the flags say; the last line names the folder and what is left."""
    names = [field.name for field in dataclasses.fields(Options)]
    options = parse({name: flags.FLAGS[name].value for name in names})
    if not flags.FLAGS["out"].value:
        raise UsageError("--out is missing: give --out=FOLDER")
    folder = pathlib.Path(flags.FLAGS["out"].value).expanduser().resolve()
    deduplicate(options, folder)
    print(_described(folder))


def parse(values: dict[str, Any]) -> Options:
    """What the flags ask for.

    Args:
      values: The fields of `Options`, None for what was not given.

    Raises:
      UsageError: Names a flag that cannot be, and the remedy.

    Example:
      >>> parse({"corpus": "tokens:ids.npy", "method": "exact", "length": None}).length
      50
    """
    given = {name: value for name, value in values.items() if value is not None}
    if not given.get("corpus", "").startswith(TOKENS):
        raise UsageError(
            f"corpus={given.get('corpus', '')!r}, expected tokens:DIR or "
            "tokens:FILE.npy: make a corpus of texts with build_corpus first"
        )
    if "method" not in given:
        raise UsageError(f"--method is missing: give --method={'|'.join(METHODS)}")
    for name, method in (("length", EXACT), ("threshold", NEAR)):
        if name in given and given["method"] != method:
            raise UsageError(
                f"--{name} has no meaning with method={given['method']}: leave it "
                f"out, or give --method={method}"
            )
    options = Options(**given)
    if options.length < 1:
        raise UsageError(
            f"length={options.length}, expected an integer >= 1: give --length=50"
        )
    if not 0 < options.threshold <= 1:
        raise UsageError(
            f"threshold={options.threshold}, expected a number above 0 and at most 1: "
            "give --threshold=0.8"
        )
    return options


def deduplicate(options: Options, folder: pathlib.Path) -> Corpus:
    """Writes the corpus without its repeats into `folder`, or finds it there.

    Raises:
      UsageError: There is no such corpus, or the folder holds something else.
      RunError: The corpus is damaged.
    """
    path = pathlib.Path(options.corpus.removeprefix(TOKENS)).expanduser()
    corpus = corpus_folder.open_tokens(path, options.eos_id, tokenizer="")
    decides: dict[str, Any] = {"method": options.method}
    if options.method == EXACT:
        prepare, decides["length"] = _without_substrings, options.length
    else:
        prepare, decides["threshold"] = _without_documents, options.threshold
    identity = {
        "sha256": corpus.sha256,
        "tokenizer": corpus.tokenizer_fingerprint,
        "eos_id": corpus.eos_id,
        **decides,
    }

    def prepared() -> IdDocuments:
        kept, removed = prepare(corpus, options)
        return _as_documents(corpus, kept, {"deduplication": {**decides, **removed}})

    request = Request(options.corpus, eos_id=options.eos_id)
    return corpus_building.build_from(TokenSource(identity, prepared), request, folder)


def _without_substrings(
    corpus: Corpus, options: Options
) -> tuple[Iterator[np.ndarray], dict[str, int]]:
    """What is left of each document, and how much was removed."""
    tokens_N = np.asarray(corpus.tokens_N)
    print(f"Sorting {len(tokens_N):,} suffixes ...", flush=True)
    ranges_Sx2 = exact_deduplication.removed_ranges(
        tokens_N, corpus.eos_id, options.length
    )
    removed = {
        "num_tokens_removed": int((ranges_Sx2[:, 1] - ranges_Sx2[:, 0]).sum()),
        "num_documents_removed": exact_deduplication.num_whole_documents(
            ranges_Sx2, tokens_N, corpus.eos_id
        ),
        "num_ranges_removed": len(ranges_Sx2),
    }
    return exact_deduplication.remainders(ranges_Sx2, tokens_N, corpus.eos_id), removed


def _without_documents(
    corpus: Corpus, options: Options
) -> tuple[Iterator[np.ndarray], dict[str, int]]:
    """The documents that are kept, and how much was removed."""
    split = token_files.split(np.asarray(corpus.tokens_N), corpus.eos_id)
    documents = [ids for ids in split if len(ids)]
    originals = near_deduplication.near_duplicates(documents, options.threshold)
    is_removed = originals != near_deduplication.NONE
    removed = {
        "num_tokens_removed": sum(map(len, itertools.compress(documents, is_removed))),
        "num_documents_removed": int(is_removed.sum()),
    }
    return itertools.compress(documents, ~is_removed), removed


def _as_documents(
    corpus: Corpus, kept: Iterator[np.ndarray], derivation: dict[str, Any]
) -> IdDocuments:
    path = corpus.tokenizer
    return IdDocuments(
        corpus.vocabulary_size,
        corpus.eos_id,
        None if path is None else path.read_text(encoding="utf-8"),
        lambda _: enumerate(kept),
        derivation,
    )


def _described(folder: pathlib.Path) -> str:
    manifest = corpus_folder.read_manifest(folder)
    removed = manifest["deduplication"]
    left, gone = manifest["num_documents"], removed["num_documents_removed"]
    ranges = ""
    if "num_ranges_removed" in removed:
        ranges = f" in {removed['num_ranges_removed']:,} ranges, and"
    return (
        f"Corpus: {folder} ({manifest['num_tokens']:,} tokens in {left:,} documents; "
        f"removed {removed['num_tokens_removed']:,} tokens{ranges or ','} {gone:,} of "
        f"{left + gone:,} documents whole)"
    )


def _define_flags() -> None:
    flags.DEFINE_string("corpus", None, "tokens:DIR or tokens:FILE.npy.")
    flags.DEFINE_string("out", None, "The folder to write; it must be new or empty.")
    flags.DEFINE_enum(
        "method",
        None,
        METHODS,
        "exact: substrings that were there before; near: documents that are similar "
        "to an earlier one.",
    )
    flags.DEFINE_integer(
        "eos_id", None, "The id between documents, if the corpus does not name it."
    )
    flags.DEFINE_integer(
        "length", None, f"exact: tokens of a substring; {_LENGTH} by default."
    )
    flags.DEFINE_float(
        "threshold",
        None,
        "near: the least Jaccard index of similar documents; "
        f"{near_deduplication.THRESHOLD} by default.",
    )


if __name__ == "__main__":
    _define_flags()
    command_line.run(main, config_keys=())
