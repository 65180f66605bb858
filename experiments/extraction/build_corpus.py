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

from absl import flags

from experiments import command_line
from experiments.errors import UsageError
from experiments.extraction import byte_pairs, corpus_folder
from experiments.extraction.corpus_building import Request, build
from experiments.extraction.documents import Part
from experiments.extraction.planting import Planting
from experiments.extraction.token_sources import ALL

_CORPUS = flags.DEFINE_string(
    "corpus", "stdlib", "stdlib, text:GLOB, jsonl:GLOB, tfds:NAME or tokens:PATH."
)
_OUT = flags.DEFINE_string("out", None, "The folder to write; it must be new or empty.")
_TOKENIZER = flags.DEFINE_string(
    "tokenizer",
    "",
    "A tokenizer.json, or a folder that holds one (of a Hugging Face model, or of a "
    f"corpus), or bpe:V to train V entries. By default {byte_pairs.DEFAULT} for texts.",
)
_EOS_ID = flags.DEFINE_integer(
    "eos_id",
    None,
    "The id between documents. By default what the tokenizer or the corpus says.",
)
_PART = flags.DEFINE_string("part", "", "K/N: every N-th document, from the K-th on.")
_MAX_TOKENS = flags.DEFINE_integer(
    "max_tokens", None, "Cut the corpus there; planted copies come on top."
)
_PLANT_FROM = flags.DEFINE_string(
    "plant_from", "", "K/N: plant passages of these documents."
)
_PLANT_COUNTS = flags.DEFINE_list(
    "plant_counts", "1,2,4,8,16,32,64", "How often passages are planted."
)
_PLANT_PASSAGES = flags.DEFINE_integer(
    "plant_passages", 50, "How many passages are planted so often, for each count."
)
_PLANT_TOKENS = flags.DEFINE_integer(
    "plant_tokens", 500, "Tokens of a passage, at least 50."
)
_SEED = flags.DEFINE_integer("seed", 0, "Of what is planted and where.")


def main() -> None:
    """Builds as the flags say; the last line names the folder and its size."""
    if not _OUT.value:
        raise UsageError("--out is missing: give --out=FOLDER")
    folder = pathlib.Path(_OUT.value).expanduser().resolve()
    corpus = build(_request(), folder)
    manifest = corpus_folder.read_manifest(folder)
    planted = manifest["planting"] or []
    if planted:
        copies = sum(passage["copies"] for passage in planted)
        print(f"Planted {copies:,} copies of {len(planted):,} passages")
    print(
        f"Corpus: {folder} ({len(corpus.tokens_N):,} tokens, "
        f"{manifest['num_documents']:,} documents, {corpus.vocabulary_size:,} entries "
        "in the vocabulary)"
    )


def _request() -> Request:
    return Request(
        _CORPUS.value,
        _TOKENIZER.value,
        _EOS_ID.value,
        Part.parse(_PART.value) if _PART.value else ALL,
        _MAX_TOKENS.value,
        _planting(),
    )


def _planting() -> Planting | None:
    if _PLANT_FROM.value:
        return Planting(
            Part.parse(_PLANT_FROM.value, "plant_from"),
            _counts(_PLANT_COUNTS.value),
            _PLANT_PASSAGES.value,
            _PLANT_TOKENS.value,
            _SEED.value,
        )
    for flag in (_PLANT_COUNTS, _PLANT_PASSAGES, _PLANT_TOKENS):
        if flag.present:
            raise UsageError(
                f"--{flag.name} is given without --plant_from, which says where "
                "passages come from: give both or neither"
            )
    return None


def _counts(values: list[str]) -> tuple[int, ...]:
    try:
        return tuple(int(value) for value in values)
    except ValueError as error:
        raise UsageError(
            f"--plant_counts={','.join(values)}, expected integers: give "
            "--plant_counts=1,2,4,8"
        ) from error


if __name__ == "__main__":
    command_line.run(main, config_keys=())
