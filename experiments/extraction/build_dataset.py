"""Builds an evaluation set: windows of a corpus, with exactly how often each occurs.

    python -m experiments.extraction.build_dataset --corpus=stdlib --out=/tmp/windows
    python -m experiments.extraction.build_dataset --corpus=tokens:corpus/tokens.npy \\
        --eos_id=0 --out=/tmp/windows --lengths=50,100,200 --per_bucket=100

For each length, distinct windows are drawn from each bucket of counts, all windows of a
bucket equally likely: bucket n holds the windows that occur at least 2^(n/4) and fewer
than 2^((n+1)/4) times (the duplication-normalized sample of Carlini et al. 2023,
arXiv 2202.07646). A bucket with fewer windows than asked for is kept with those it has
and marked short. With --sample=uniform, windows are drawn at random positions instead
(their section 4.5).

A window lies within one document: it never holds the separator. Copies that overlap
count separately. All counting is on token ids, and every count is proved by comparing
tokens; --verify counts the chosen windows again, by another algorithm.

The folder holds windows.parquet (the columns are described in evaluation_set.py),
manifest.json and, if the corpus has one, a copy of its tokenizer.json. The same corpus,
flags and seed give the same windows.parquet, bit for bit. A window is chosen by its own
random key: other lengths, edges or sample sizes do not change which windows come first.
"""

import contextlib
import pathlib
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import polars
import tqdm
from absl import flags
from numpy.lib.stride_tricks import sliding_window_view

from experiments import command_line, run_folder
from experiments.errors import RunError, UsageError
from experiments.extraction import (
    corpus,
    dataset_config,
    evaluation_set,
    fingerprints,
    repeats,
    window_sampling,
)
from experiments.extraction.buckets import Bucket
from experiments.extraction.corpus import Corpus
from experiments.extraction.dataset_config import BY_COUNT, UNIFORM, DatasetConfig
from experiments.extraction.repeats import Index
from experiments.extraction.window_sampling import Sample


def main() -> None:
    """Builds what the flags say; the last line of output names the folder."""
    names = DatasetConfig.__dataclass_fields__
    config = dataset_config.parse({name: flags.FLAGS[name].value for name in names})
    folder = build(config)
    print(f"Evaluation set: {folder}")


def build(config: DatasetConfig) -> pathlib.Path:
    """Builds the evaluation set that `config` describes, and returns its folder.

    A folder that holds this very set is left as it is, once its files are checked (and
    counts too, if `config.verify`).

    Raises:
      UsageError: The corpus does not have what is asked for, or the folder belongs to
        something else.
      RunError: The corpus cannot be read, or a count is wrong.
    """
    with _locked_folder(config.out) as folder:
        # Before the corpus is made, which may take long, and again when it is known.
        evaluation_set.finished(folder, config.record())
        source = corpus.load(
            config.corpus,
            folder / evaluation_set.CORPUS,
            eos_id=config.eos_id,
            tokenizer=config.tokenizer,
        )
        record = config.record() | _corpus_record(source)
        if evaluation_set.finished(folder, record) is not None:
            windows = evaluation_set.load(folder).windows
            if config.verify:
                _verify_rows(source.tokens_N, windows)
            print(f"Already there: {len(windows):,} windows in {folder}")
            return folder
        started = time.perf_counter()
        parts, cells = _sampled_windows(config, source)
        evaluation_set.write(
            folder, parts, record | {"buckets": cells}, source.tokenizer
        )
        seconds = time.perf_counter() - started
        print(_heading(config), _table(cells), sep="\n")
        print(
            f"{sum(map(len, parts)):,} windows in {seconds:.1f} s, peak memory "
            f"{_peak_memory() / 1e9:.2f} GB"
        )
    return folder


@contextlib.contextmanager
def _locked_folder(out: str) -> Iterator[pathlib.Path]:
    folder = pathlib.Path(out).expanduser().resolve()
    if folder.exists() and not folder.is_dir():
        raise UsageError(
            f"out={out!r} is a file, expected a folder: give another --out"
        )
    folder.mkdir(parents=True, exist_ok=True)
    with run_folder.locked(folder, "wait for it or give another --out"):
        yield folder


def _sampled_windows(
    config: DatasetConfig, source: Corpus
) -> tuple[list[polars.DataFrame], list[dict[str, Any]]]:
    """The rows of each length, and what each of its buckets had and gave."""
    tokens_N = np.asarray(source.tokens_N)
    _check_lengths(config, tokens_N, source.eos_id)
    print(f"Sorting {len(tokens_N):,} suffixes ...", flush=True)
    started = time.perf_counter()
    index = repeats.build(tokens_N, source.eos_id, max(config.lengths))
    print(f"Sorted and checked in {time.perf_counter() - started:.1f} s", flush=True)
    bucket_list = config.bucket_list(len(tokens_N))
    samples, parts = [], []
    progress_bar = tqdm.tqdm(config.lengths, desc="Sampling", unit="length")
    for length in progress_bar:
        progress_bar.set_postfix(length=length)
        sample = _sample(config, index, bucket_list, length)
        samples.append(sample)
        parts.append(_rows(config, index, bucket_list, length, sample))
    if not sum(map(len, parts)):
        raise UsageError(_why_nothing(config, index))
    return parts, _cells(config, bucket_list, samples)


def _check_lengths(
    config: DatasetConfig, tokens_N: np.ndarray, eos_id: int | None
) -> None:
    longest = repeats.longest_document(tokens_N, eos_id)
    too_long = [length for length in config.lengths if length > longest]
    if not longest:
        raise UsageError(
            f"corpus={config.corpus!r} holds nothing but the separator {eos_id}: give "
            "another --corpus or --eos_id"
        )
    if too_long:
        raise UsageError(
            f"corpus={config.corpus!r} has no window of {_listed(too_long)} tokens, as "
            f"its longest document has {longest}: give --lengths up to {longest}"
        )


def _sample(
    config: DatasetConfig, index: Index, bucket_list: Sequence[Bucket], length: int
) -> Sample:
    if config.sample == BY_COUNT:
        return window_sampling.by_count(
            index,
            length,
            bucket_list,
            config.per_bucket,
            config.seed,
            config.one_per_repeat,
        )
    sample = window_sampling.by_position(
        index, length, bucket_list, config.num_windows, config.seed
    )
    if len(sample.windows) < config.num_windows:
        raise UsageError(
            f"num_windows={config.num_windows}, but windows of {length} tokens start "
            f"at {len(sample.windows)} positions only: lower --num_windows"
        )
    return sample


def _rows(
    config: DatasetConfig,
    index: Index,
    bucket_list: Sequence[Bucket],
    length: int,
    sample: Sample,
) -> polars.DataFrame:
    """The rows of a sample; its counts are checked."""
    _, chosen, which_K = np.unique(
        sample.windows.rows_K, return_index=True, return_inverse=True
    )
    distinct = sample.windows[chosen]
    repeats.check_counts(index, distinct, length)
    positions = repeats.first_positions(index, distinct)
    clusters = repeats.repeat_starts(index, distinct, positions)
    tokens = sliding_window_view(index.tokens_N, length)[positions]
    if config.verify:
        _verify(index.tokens_N, tokens, distinct.counts_K, positions)
    numbers = np.array([bucket.number for bucket in bucket_list])
    return evaluation_set.rows(
        tokens[which_K],
        bucket_K=numbers[sample.places_K],
        count_K=sample.windows.counts_K,
        position_K=positions[which_K],
        cluster_K=clusters[which_K],
    )


def _verify_rows(tokens_N: np.ndarray, windows: polars.DataFrame) -> None:
    """Counts the windows of a finished set again."""
    for (length,), rows in windows.group_by("length", maintain_order=True):
        tokens = rows["tokens"].list.to_array(int(length)).to_numpy()
        _verify(tokens_N, tokens, rows["count"].to_numpy(), rows["position"].to_numpy())


def _verify(
    tokens_N: np.ndarray,
    windows_KxL: np.ndarray,
    counts_K: np.ndarray,
    positions_K: np.ndarray,
) -> None:
    """Counts again without the suffix array.

    Raises:
      RunError: A count or a first occurrence differs.
    """
    recounts_K, again_K = fingerprints.count(tokens_N, windows_KxL)
    wrong = np.flatnonzero((recounts_K != counts_K) | (again_K != positions_K))
    if wrong.size:
        k = wrong[0]
        raise RunError(
            f"the window of {windows_KxL.shape[1]} tokens at {positions_K[k]} was "
            f"counted {counts_K[k]} times, but {recounts_K[k]} times (first at "
            f"{again_K[k]}) by fingerprints; {wrong.size} windows differ: one of the "
            "two counters is defective, do not use these counts"
        )


def _cells(
    config: DatasetConfig, bucket_list: Sequence[Bucket], samples: Sequence[Sample]
) -> list[dict[str, Any]]:
    """Per length and bucket: the counts it holds, the windows it has, those taken."""
    num_buckets = len(bucket_list)
    if config.edges is None:
        # The grid goes on for ever: it ends here with the last bucket in use.
        in_use = sum(sample.available_B for sample in samples)
        num_buckets = 1 + int(np.flatnonzero(in_use)[-1])
    cells = []
    for length, sample in zip(config.lengths, samples, strict=True):
        taken_B = np.bincount(sample.places_K, minlength=num_buckets)
        for bucket, available, taken in zip(
            bucket_list[:num_buckets], sample.available_B, taken_B, strict=False
        ):
            cells.append(
                {
                    "length": length,
                    "bucket": bucket.number,
                    "low": bucket.low,
                    "high": bucket.high,
                    "available": int(available),
                    "taken": int(taken),
                    "short": config.sample == BY_COUNT
                    and bool(taken < config.per_bucket),
                }
            )
    return cells


def _why_nothing(config: DatasetConfig, index: Index) -> str:
    most = {
        length: max(
            int(piece.counts_K.max(initial=0))
            for piece in repeats.distinct_windows(index, length)
        )
        for length in config.lengths
    }
    listed = ", ".join(f"{count} ({length} tokens)" for length, count in most.items())
    return (
        f"edges={_listed(config.edges or ())}: no window has a count within them; the "
        f"highest counts are {listed}: change --edges"
    )


def _heading(config: DatasetConfig) -> str:
    if config.sample == UNIFORM:
        return "Windows by length: drawn/distinct ones in the corpus"
    return f"Windows by length: taken/available (* fewer than {config.per_bucket})"


def _table(cells: Sequence[dict[str, Any]]) -> str:
    """Lengths to the right, counts downwards."""
    lengths = sorted({cell["length"] for cell in cells})
    table = [["count", *map(str, lengths)]]
    for bucket in sorted({cell["bucket"] for cell in cells}):
        row = [cell for cell in cells if cell["bucket"] == bucket]
        low, high = row[0]["low"], row[0]["high"]
        table.append(
            [
                f"{low}" if high == low + 1 else f"{low}-{high - 1}",
                *(
                    f"{c['taken']}/{c['available']}{'*' if c['short'] else ' '}"
                    for c in row
                ),
            ]
        )
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        "  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True))
        for line in table
    ]
    return "\n".join(lines)


def _corpus_record(source: Corpus) -> dict[str, Any]:
    return {
        "corpus_sha256": source.sha256,
        "num_tokens": len(source.tokens_N),
        "vocabulary_size": source.vocabulary_size,
        "eos_id": source.eos_id,
        "tokenizer_fingerprint": source.tokenizer_fingerprint,
    }


def _listed(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


def _peak_memory() -> int:
    """Bytes; macOS counts in them, Linux in KiB."""
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _define_flags() -> None:
    default = DatasetConfig(out="")
    lengths = _listed(default.lengths)
    flags.DEFINE_string(
        "corpus",
        None,
        "stdlib (the sources of Python's standard library), text:GLOB, jsonl:GLOB, "
        "tfds:NAME, tokens:FILE.npy or tokens:DIR; texts are tokenised into OUT/corpus "
        f"first. Default: {default.corpus}",
    )
    flags.DEFINE_string("out", None, "The folder of the set; new, or empty")
    flags.DEFINE_string(
        "lengths", None, f"Tokens per window, with commas. Default: {lengths}"
    )
    flags.DEFINE_enum(
        "sample",
        None,
        [BY_COUNT, UNIFORM],
        "by_count: distinct windows, by buckets of how often they occur; uniform: "
        f"windows at random positions. Default: {default.sample}",
    )
    flags.DEFINE_integer(
        "per_bucket",
        None,
        "by_count: windows per length and bucket; a bucket with fewer gives all. "
        f"Default: {default.per_bucket}",
    )
    flags.DEFINE_integer(
        "num_windows",
        None,
        f"uniform: windows per length. Default: {default.num_windows}",
    )
    flags.DEFINE_string(
        "edges",
        None,
        "by_count: bucket edges instead of 2^(n/4): 1,2,10,100 makes buckets of the "
        "counts 1, 2 to 9 and 10 to 99",
    )
    flags.DEFINE_bool(
        "one_per_repeat",
        None,
        "by_count: at most one window of each maximal repeat (say, of a licence text) "
        "per length and bucket, all repeats equally likely; windows that occur once "
        "are drawn as ever",
    )
    flags.DEFINE_integer(
        "seed", None, f"Another seed, another sample. Default: {default.seed}"
    )
    flags.DEFINE_integer(
        "eos_id",
        None,
        "The id that separates documents, for a tokens: corpus that does not say so "
        "itself. Default: what the corpus says, else it is one document",
    )
    flags.DEFINE_string(
        "tokenizer",
        None,
        "bpe:SIZE, a tokenizer.json or a folder that holds one. Default: what the "
        "corpus says, else bpe:4096",
    )
    flags.DEFINE_bool(
        "verify",
        None,
        "Count the chosen windows again without the suffix array, and fail if a count "
        "differs",
    )


if __name__ == "__main__":
    _define_flags()
    command_line.run(main, config_keys=())
