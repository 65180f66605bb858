"""Takes windows from other programs, and gives them guesses and records.

    python -m experiments.extraction.convert --to=windows --source=datasets --out=DIR
    python -m experiments.extraction.convert --to=guesses --source=SWEEP --out=FILE.csv
    python -m experiments.extraction.convert --to=jsonl --source=SWEEP --out=FILE.jsonl

--to=windows reads the benchmark google-research/lm-extraction-benchmark: the folder
--source holds SPLIT_prefix.npy and SPLIT_suffix.npy, and may hold SPLIT_dataset.csv.
It writes an evaluation set, which a sweep takes as --config.windows; each window is a
prefix and its suffix, in the order of the benchmark, the last --last of them (its own
baseline takes the last 1000). How often a window occurs is what the benchmark says, or
is counted in --corpus; where neither tells, `count` and `bucket` are null, and report,
which shows results by them, refuses the sweep. Where a window occurs is not known:
`position` is null, and each window is a cluster of its own.

--to=guesses writes what a sweep with --config.decode=True has generated, in the CSV
format of the benchmark: "Example ID", the number of the window, and "Suffix Guess", its
tokens. Guesses are in the order of windows, or, with --order_by=COLUMN, by a column of
the records, largest first; columns that depend on the true suffix are refused.

--to=jsonl writes records.parquet of a sweep (or windows.parquet of an evaluation set)
as JSON, one object a line. Numbers that JSON has none of, NaN and infinity, are null.

Nothing existing is overwritten.
"""

import hashlib
import os
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import polars
from absl import flags

from experiments import command_line
from experiments.errors import RunError, UsageError, one_line
from experiments.extraction import (
    buckets,
    byte_pairs,
    corpus_folder,
    dataset_config,
    evaluation_set,
    lm_extraction_benchmark,
    lookup,
    records,
    stored_suffix_array,
)
from experiments.extraction.token_sources import TOKENS

WINDOWS, GUESSES, JSONL = FORMATS = ("windows", "guesses", "jsonl")
_FLAGS_OF = {
    "split": WINDOWS,
    "last": WINDOWS,
    "corpus": WINDOWS,
    "eos_id": WINDOWS,
    "tokenizer": WINDOWS,
    "model": GUESSES,
    "context": GUESSES,
    "order_by": GUESSES,
}
_NAMES = ("to", "source", "out", *_FLAGS_OF)
_KNOW_THE_TRUTH = (
    "extracted",
    "first_mismatch",
    "tokens_correct",
    "min_margin",
    "tie",
    "suffix_logprob",
    "anywhere",
    "bleu",
    "edit_distance",
    "beam_extracted",
    "scheme_logprob",
    "samples_extracted",
    # Of the whole window, its suffix too.
    "whitespace",
    "entropy",
)


def main() -> None:
    """Converts as the flags say; the last line names what was written."""
    print(convert({name: flags.FLAGS[name].value for name in _NAMES}))


def convert(values: dict[str, Any]) -> str:
    """Converts, and says what was written.

    Args:
      values: The flags by name, None for what was not given.

    Raises:
      UsageError: A flag is missing or cannot be, or what is there is not overwritten.
      RunError: What is read is damaged.
    """
    for name in ("to", "source", "out"):
        if not values[name]:
            raise UsageError(f"--{name} is missing: see --help")
    for name, kind in _FLAGS_OF.items():
        if values[name] is not None and values["to"] != kind:
            raise UsageError(
                f"--{name} has no meaning with to={values['to']}: leave it out"
            )
    source = pathlib.Path(values["source"]).expanduser()
    out = pathlib.Path(values["out"]).expanduser().resolve()
    write: Callable[[pathlib.Path, pathlib.Path, dict[str, Any]], str] = {
        WINDOWS: _write_windows,
        GUESSES: _write_guesses,
        JSONL: _write_jsonl,
    }[values["to"]]
    if values["to"] != WINDOWS and out.exists():
        raise UsageError(f"{out} exists already: name another --out")
    return write(source, out, values)


def _write_windows(
    source: pathlib.Path, out: pathlib.Path, values: dict[str, Any]
) -> str:
    split = values["split"] or "train"
    tokens_KxL = lm_extraction_benchmark.read_windows(source, split)
    counts_K = lm_extraction_benchmark.read_counts(source, split, len(tokens_KxL))
    last = len(tokens_KxL) if values["last"] is None else values["last"]
    if not 0 < last <= len(tokens_KxL):
        raise UsageError(
            f"last={last}, but there are {len(tokens_KxL)} examples: give --last=1 to "
            f"--last={len(tokens_KxL)}, or leave it out"
        )
    tokens_KxL, counts_K = tokens_KxL[-last:], counts_K[-last:]
    found = {"corpus_sha256": None, "num_tokens": None, "eos_id": None}
    if values["corpus"]:
        counts_K, found = _counted(tokens_KxL, values)
    tokenizer = byte_pairs.find(values["tokenizer"]) if values["tokenizer"] else None
    manifest = {
        "corpus": values["corpus"] or f"lm-extraction-benchmark:{split}",
        **found,
        "vocabulary_size": lm_extraction_benchmark.VOCABULARY_SIZE,
        "tokenizer_fingerprint": tokenizer and byte_pairs.fingerprint(tokenizer),
        "sample": f"the last {last} of lm-extraction-benchmark:{split}",
        "edges": dataset_config.DEFAULT_EDGES,
        "lengths": [tokens_KxL.shape[1]],
        "source_sha256": hashlib.sha256(tokens_KxL.tobytes()).hexdigest(),
        "clusters": "each window is its own",
    }
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file, expected a folder: name another --out")
    out.mkdir(parents=True, exist_ok=True)
    if evaluation_set.finished(out, manifest) is None:
        evaluation_set.write(out, [_rows(tokens_KxL, counts_K)], manifest, tokenizer)
    unknown = int((counts_K == 0).sum())
    note = f"; of {unknown:,} the count is unknown" if unknown else ""
    return f"Evaluation set: {out} ({last:,} windows{note})"


def _counted(
    tokens_KxL: np.ndarray, values: dict[str, Any]
) -> tuple[np.ndarray, dict[str, Any]]:
    """How often windows occur in --corpus, and what the manifest says of it."""
    spec = values["corpus"]
    if not spec.startswith(TOKENS):
        raise UsageError(
            f"corpus={spec!r}, expected tokens:DIR or tokens:FILE.npy: make a corpus "
            "of texts with build_corpus first"
        )
    path = pathlib.Path(spec.removeprefix(TOKENS)).expanduser()
    corpus = corpus_folder.open_tokens(path, values["eos_id"], tokenizer="")
    positions_R = stored_suffix_array.load(
        corpus, stored_suffix_array.folder_of(corpus)
    )
    searched = lookup.prepare(
        corpus.tokens_N, corpus.eos_id, corpus.vocabulary_size, positions_R
    )
    counts_K = lookup.count(searched, tokens_KxL)
    absent = np.flatnonzero(counts_K == 0)
    if absent.size:
        raise RunError(
            f"window {absent[0]} (and {absent.size - 1} others of {len(counts_K)}) "
            f"does not occur in corpus={spec!r}: give the corpus that the windows are "
            "from, tokenised alike, or leave --corpus out"
        )
    return counts_K, {
        "corpus_sha256": corpus.sha256,
        "num_tokens": len(corpus.tokens_N),
        "eos_id": corpus.eos_id,
    }


def _rows(tokens_KxL: np.ndarray, counts_K: np.ndarray) -> polars.DataFrame:
    bucket_list = buckets.quarter_powers(max(1, int(counts_K.max())))
    numbers = np.array([bucket.number for bucket in bucket_list])
    places_K = buckets.places(bucket_list, np.maximum(counts_K, 1))
    rows = evaluation_set.rows(
        tokens_KxL,
        bucket_K=numbers[places_K],
        count_K=counts_K,
        position_K=np.zeros(len(counts_K), np.int64),
        cluster_K=np.arange(len(counts_K)),
    )
    known = polars.when(polars.col("count") > 0)
    return rows.with_columns(
        known.then(polars.col("bucket")).alias("bucket"),
        known.then(polars.col("count")).alias("count"),
        position=polars.lit(None, polars.Int64()),
    )


def _write_guesses(
    source: pathlib.Path, out: pathlib.Path, values: dict[str, Any]
) -> str:
    rows = _read_parquet(source / records.RECORDS)
    if "generated" not in rows.columns:
        raise UsageError(
            f"{source} has no generated suffixes: sweep with --config.decode=True"
        )
    for name in ("model", "context"):
        rows = _only(rows, name, values[name], source)
    order = values["order_by"]
    if order in _KNOW_THE_TRUTH:
        raise UsageError(
            f"order_by={order!r} depends on the true suffix, which a guess must not "
            "know: name another column, or leave --order_by out"
        )
    if order is not None:
        if order not in rows.columns or not rows[order].dtype.is_numeric():
            numeric = [c for c in rows.columns if rows[c].dtype.is_numeric()]
            expected = ", ".join(c for c in numeric if c not in _KNOW_THE_TRUTH)
            raise UsageError(
                f"order_by={order!r} is no column of numbers in {source}: expected one "
                f"of {expected}"
            )
        rows = rows.sort(order, descending=True, nulls_last=True, maintain_order=True)
    lm_extraction_benchmark.write_guesses(
        out, rows.select("window_id", "generated").iter_rows()
    )
    return f"Guesses: {out} ({len(rows):,} of {rows['model'][0]!r})"


def _only(
    rows: polars.DataFrame, name: str, wanted: Any, source: pathlib.Path
) -> polars.DataFrame:
    """The rows with the one value of a column that is wanted, or that there is."""
    there = rows[name].unique(maintain_order=True).to_list()
    if wanted is None and len(there) == 1:
        return rows
    if wanted not in there:
        found = f"no record with {name}={wanted!r}"
        if wanted is None:
            found = f"several values of {name}"
        raise UsageError(
            f"{source} has {found}: give --{name}=X with X one of "
            f"{', '.join(map(str, there))}"
        )
    return rows.filter(polars.col(name) == wanted)


def _write_jsonl(source: pathlib.Path, out: pathlib.Path, _: dict[str, Any]) -> str:
    names = (records.RECORDS, evaluation_set.WINDOWS)
    path = next((source / n for n in names if (source / n).is_file()), None)
    if path is None:
        raise UsageError(
            f"{source} holds neither {' nor '.join(names)}: give the folder of a sweep "
            "that has ended, or of an evaluation set"
        )
    rows = _read_parquet(path)
    partial = out.with_name(out.name + ".partial")
    with partial.open("wb") as file:
        rows.write_ndjson(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, out)
    return f"Records: {out} ({len(rows):,} lines)"


def _read_parquet(path: pathlib.Path) -> polars.DataFrame:
    if not path.is_file():
        raise UsageError(
            f"{path}: no such file: give --source=FOLDER of a sweep that has ended"
        )
    try:
        return polars.read_parquet(path)
    except (OSError, polars.exceptions.PolarsError) as error:
        raise RunError(
            f"{path} is damaged ({one_line(error, 200)}): make it again"
        ) from error


def _define_flags() -> None:
    flags.DEFINE_enum("to", None, FORMATS, "What to make; see above.")
    flags.DEFINE_string("source", None, "The folder to read.")
    flags.DEFINE_string(
        "out", None, "The file to write; for windows a folder, new or empty."
    )
    flags.DEFINE_string(
        "split", None, "windows: what the names of its files begin with; train."
    )
    flags.DEFINE_integer("last", None, "windows: take only so many, from the end.")
    flags.DEFINE_string(
        "corpus",
        None,
        "windows: count them in tokens:DIR or tokens:FILE.npy, which must hold them "
        "all; its suffix array is built beside it, or found there.",
    )
    flags.DEFINE_integer(
        "eos_id", None, "windows: the separator of a --corpus that does not name it."
    )
    flags.DEFINE_string(
        "tokenizer",
        None,
        "windows: GPT-2's tokenizer.json or a folder that holds it, to show texts.",
    )
    flags.DEFINE_string("model", None, "guesses: whose, if the sweep has several.")
    flags.DEFINE_integer(
        "context", None, "guesses: after how many tokens, if the sweep has several."
    )
    flags.DEFINE_string(
        "order_by", None, "guesses: the column that says how sure they are."
    )


if __name__ == "__main__":
    _define_flags()
    command_line.run(main, config_keys=())
