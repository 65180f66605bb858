"""The files of google-research/lm-extraction-benchmark (Carlini et al. 2022).

SPLIT_prefix.npy   integers [K, P]: what a model is prompted with (K, 50 there)
SPLIT_suffix.npy   integers [K, S]: how it goes on in the Pile (S = 50 there)
SPLIT_dataset.csv  one line per example, without a heading: 12 integers, the first the
                   example's number, the last how often it occurs, or -1; the arrays
                   are in the order of the numbers

A guess is one line of a CSV file: the place of the example in the arrays, and a list of
the tokens of its suffix, the surest guesses first.
"""

import csv
import itertools
import os
import pathlib
from collections.abc import Iterable

import numpy as np

from experiments.errors import RunError, UsageError, one_line
from experiments.extraction import token_files

VOCABULARY_SIZE = 50_257
"""That of GPT-2 and GPT-Neo, whose token ids the benchmark has."""

_HEADING = ("Example ID", "Suffix Guess")
_CSV_FIELDS = 12
_UNKNOWN = -1
_MOST = 2**63 - 1


def read_windows(folder: pathlib.Path, split: str) -> np.ndarray:
    """Prefixes and suffixes, joined.

    Args:
      folder: Where the files are.
      split: Their names begin with it: `train`, `val`.

    Returns:
      uint32[K, P + S].

    Raises:
      UsageError: There are no such files.
      RunError: They hold anything but token ids, or do not go together.
    """
    parts = [_read_ids(folder / f"{split}_{what}.npy") for what in ("prefix", "suffix")]
    if len(parts[0]) != len(parts[1]):
        raise RunError(
            f"{folder} has {len(parts[0])} prefixes and {len(parts[1])} suffixes of "
            f"{split!r}, expected as many: copy both files from the same place"
        )
    return np.concatenate(parts, axis=1).astype(np.uint32)


def read_counts(folder: pathlib.Path, split: str, num_windows: int) -> np.ndarray:
    """How often each example occurs in the Pile, as far as the benchmark says.

    Args:
      folder: As in `read_windows`.
      split: As in `read_windows`.
      num_windows: The number of examples.

    Returns:
      int64[num_windows]; 0 where nothing is known, as everywhere without the file.

    Raises:
      RunError: The file is another.
    """
    path = folder / f"{split}_dataset.csv"
    if not path.is_file():
        return np.zeros(num_windows, np.int64)
    try:
        with path.open(newline="") as file:
            rows = sorted(_numbers(line) for line in csv.reader(file) if line)
    except (ValueError, csv.Error) as error:
        raise RunError(f"{path}: {error}: copy the file again") from error
    if len(rows) != num_windows:
        raise RunError(
            f"{path} has {len(rows)} lines, but there are {num_windows} prefixes: copy "
            "all files of a split from the same place"
        )
    for row, following in itertools.pairwise(rows):
        if row[0] == following[0]:
            raise RunError(
                f"{path} has two lines of example {row[0]}, so their order is not "
                "known: copy the file again"
            )
    return np.maximum(np.array([row[-1] for row in rows], np.int64), 0)


def write_guesses(
    path: pathlib.Path, guesses: Iterable[tuple[int, Iterable[int]]]
) -> None:
    """Writes guesses in the benchmark's format, whole or not at all.

    Args:
      path: The CSV file.
      guesses: The place of an example, from 0, and the tokens of its suffix; the surest
        guesses first.
    """
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(_HEADING)
        for example, tokens in guesses:
            writer.writerow(
                [int(example), f"[{','.join(str(int(t)) for t in tokens)}]"]
            )
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def _read_ids(path: pathlib.Path) -> np.ndarray:
    if not path.is_file():
        raise UsageError(
            f"{path}: no such file: give --source=FOLDER with the benchmark's "
            "SPLIT_prefix.npy and SPLIT_suffix.npy, and --split=SPLIT"
        )
    try:
        ids = token_files.map_npy(path)
    except ValueError as error:
        raise RunError(
            f"{path} is not a whole .npy file ({one_line(error)}): copy it again"
        ) from error
    if ids.ndim != 2 or ids.dtype.kind not in "iu" or not ids.size:
        raise RunError(
            f"{path} holds {ids.dtype}{list(ids.shape)}, expected integers [examples, "
            "tokens]: copy it again"
        )
    if ids.min() < 0 or ids.max() >= VOCABULARY_SIZE:
        raise RunError(
            f"{path} holds ids from {ids.min()} to {ids.max()}, expected 0 to "
            f"{VOCABULARY_SIZE - 1}, those of GPT-2: copy it again"
        )
    return ids


def _numbers(fields: list[str]) -> list[int]:
    numbers = [int(field) for field in fields]
    count = numbers[-1]
    if len(numbers) != _CSV_FIELDS or not _UNKNOWN <= count <= _MOST or not count:
        raise ValueError(
            f"the line of example {numbers[0]} is not 12 numbers that end with a count"
        )
    return numbers
