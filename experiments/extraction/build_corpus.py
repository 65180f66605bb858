"""Turns texts into a corpus of token ids.

    python -m experiments.extraction.build_corpus --corpus=stdlib --out=/tmp/corpus

What --corpus may be:

  stdlib           the source files of Python's standard library, which need no download
  text:GLOB        every file that matches is a document: "text:notes/**/*.txt"
  jsonl:GLOB       every line of the files (also .gz) is a JSON object, and its key
                   "text" a document
  tfds:NAME        every example of the split `train` of a TensorFlow data set of texts
  tokens:FILE.npy  token ids that are there already, with --eos_id between documents
  tokens:DIR       a corpus that this program wrote, to take a part of or to plant in

The folder --out holds tokens.npy (ids as uint16, or as uint32 for a vocabulary of more
than 65,536 entries, with one separator between two documents and none at the end),
tokenizer.json and manifest.json (what the corpus was made from, its size and hash). It
is written whole or not at all. The same command again finds the corpus and does
nothing; if --out holds anything else, nothing is overwritten. Files are recognised by
their number and total size, not read again.

Texts are tokenised by a byte-level BPE that is trained on all documents (on the first
134 million characters), or by --tokenizer. A separator that a text spells out is text.
Documents without a token are left out.

--part=K/N keeps the documents whose index, from 0, is K modulo N. All parts of a corpus
have the same trained tokenizer: a model may be trained on one part and compared with
a model of another. Texts that occur in several documents may lie in several parts.

--plant_from=K/N plants repeats: for each number of --plant_counts it takes
--plant_passages passages of --plant_tokens tokens from documents of that part, which
must share none with --part, and puts each in so many times, as documents of their own
at random places between documents. Passages have no window of 50 tokens in common with
the rest of the corpus or with each other, so that a window of a passage occurs exactly
as often as the passage was planted. The manifest lists the passages.
"""

import pathlib
from typing import Any

from absl import flags

from experiments import command_line
from experiments.errors import UsageError
from experiments.extraction import byte_pairs, corpus_folder
from experiments.extraction.corpus_building import Request, build
from experiments.extraction.documents import ALL, Part
from experiments.extraction.planting import Planting

# The flag of each field of a planting, of which each has a default.
_PLANTING = {
    "plant_counts": "counts",
    "plant_passages": "passages_per_count",
    "plant_tokens": "num_tokens",
}
_NAMES = (
    "corpus",
    "tokenizer",
    "eos_id",
    "part",
    "max_tokens",
    "plant_from",
    *_PLANTING,
    "seed",
)


def main() -> None:
    """Builds as the flags say; the last line names the folder and its size."""
    request = parse({name: flags.FLAGS[name].value for name in _NAMES})
    if not flags.FLAGS["out"].value:
        raise UsageError("--out is missing: give --out=FOLDER")
    folder = pathlib.Path(flags.FLAGS["out"].value).expanduser().resolve()
    build(request, folder)
    print(_described(folder))


def parse(values: dict[str, Any]) -> Request:
    """What the flags ask for.

    Args:
      values: By name; None for what is not given and has a default elsewhere.

    Raises:
      UsageError: Names a flag that cannot be, and the remedy.

    Example:
      >>> flags = {"corpus": "stdlib", "tokenizer": "", "eos_id": None, "part": "0/2"}
      >>> planting = {"plant_from": "1/2", "plant_counts": "1,4", "plant_passages": 3}
      >>> others = {"max_tokens": None, "plant_tokens": None, "seed": 0}
      >>> parse(flags | planting | others).planting.num_passages
      6
    """
    return Request(
        values["corpus"],
        values["tokenizer"],
        values["eos_id"],
        Part.parse(values["part"]) if values["part"] else ALL,
        values["max_tokens"],
        _planting(values),
    )


def _planting(values: dict[str, Any]) -> Planting | None:
    given = {name: values[name] for name in _PLANTING if values[name] is not None}
    if values["plant_from"]:
        if "plant_counts" in given:
            given["plant_counts"] = _counts(given["plant_counts"])
        return Planting(
            Part.parse(values["plant_from"], "plant_from"),
            **{_PLANTING[name]: value for name, value in given.items()},
            seed=values["seed"],
        )
    for name in given:
        raise UsageError(
            f"--{name} is given without --plant_from, which says where passages come "
            "from: give both or neither"
        )
    return None


def _counts(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(count) for count in text.split(","))
    except ValueError as error:
        raise UsageError(
            f"plant_counts={text!r}, expected integers: give --plant_counts=1,2,4,8"
        ) from error


def _described(folder: pathlib.Path) -> str:
    manifest = corpus_folder.read_manifest(folder)
    planted = manifest["planting"] or []
    copies = sum(passage["copies"] for passage in planted)
    return (
        f"Corpus: {folder} ({manifest['num_tokens']:,} tokens in "
        f"{manifest['num_documents']:,} documents, "
        f"{manifest['vocabulary_size']:,} entries in the vocabulary"
        + (f", {copies:,} copies of {len(planted):,} planted passages" * bool(planted))
        + ")"
    )


def _define_flags() -> None:
    counts = ",".join(map(str, Planting.counts))
    flags.DEFINE_string(
        "corpus", "stdlib", "stdlib, text:GLOB, jsonl:GLOB, tfds:NAME or tokens:PATH."
    )
    flags.DEFINE_string("out", None, "The folder to write; it must be new or empty.")
    flags.DEFINE_string(
        "tokenizer",
        "",
        "A tokenizer.json, or a folder that holds one (of a Hugging Face model, or of "
        f"a corpus), or bpe:V to train V entries; for texts {byte_pairs.DEFAULT} by "
        "default.",
    )
    flags.DEFINE_integer(
        "eos_id",
        None,
        "The id between documents; by default what the tokenizer or the corpus says.",
    )
    flags.DEFINE_string("part", "", "K/N: every N-th document, from the K-th on.")
    flags.DEFINE_integer(
        "max_tokens", None, "Cut the corpus there; planted copies come on top."
    )
    flags.DEFINE_string("plant_from", "", "K/N: plant passages of these documents.")
    flags.DEFINE_string(
        "plant_counts",
        None,
        f"How often passages are planted; {counts} by default.",
    )
    flags.DEFINE_integer(
        "plant_passages",
        None,
        f"Passages for each count; {Planting.passages_per_count} by default.",
    )
    flags.DEFINE_integer(
        "plant_tokens",
        None,
        f"Tokens of a passage, at least 50; {Planting.num_tokens} by default.",
    )
    flags.DEFINE_integer("seed", 0, "Of what is planted and where.")


if __name__ == "__main__":
    _define_flags()
    command_line.run(main, config_keys=())
