"""The suffix array of a corpus, built once and kept beside it.

suffix_array.npy   int32 or int64; row r is where the r-th smallest suffix starts
suffix_array.json  which corpus it sorts, and its own hash; it comes last, so where it
                   is, the array is whole
"""

import json
import os
import pathlib
from typing import Any

import numpy as np

from experiments import run_folder
from experiments.errors import RunError, UsageError
from experiments.extraction import suffix_array, token_files
from experiments.extraction.corpus_folder import TOKENS, Corpus

FORMAT = "dpjax suffix array 1"
ARRAY = "suffix_array.npy"
RECORD = "suffix_array.json"
_PARTIAL = ".partial"


def folder_of(corpus: Corpus) -> pathlib.Path:
    """The folder of a corpus, or one beside a token file that belongs to none."""
    filename = getattr(corpus.tokens_N, "filename", None)
    if filename is None:
        raise ValueError("the corpus is not the memory map of a file")
    path = pathlib.Path(filename)
    # A folder may hold many token files, but only one that is called as in a corpus.
    return path.parent if path.name == TOKENS else path.with_suffix(".suffix_array")


def load(corpus: Corpus, folder: pathlib.Path) -> np.ndarray:
    """Maps the suffix array in `folder`; the first time, it is built there.

    Building takes about 24 bytes of memory per uint16 token, twice that for uint32.
    Opening reads the array once, for its hash, and leaves it on disk.

    Args:
      corpus: What it sorts.
      folder: Where; `folder_of(corpus)` finds it again from any command.

    Returns:
      int32[N] or int64[N], a read-only memory map.

    Raises:
      UsageError: The folder holds the suffix array of another corpus.
      RunError: The array is damaged, or another process is building it.
    """
    if not (folder / RECORD).exists():
        _build(corpus, folder)
    return _open(corpus, folder)


def _build(corpus: Corpus, folder: pathlib.Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with run_folder.locked(folder, "wait for the suffix array that it makes"):
        print(f"Sorting {len(corpus.tokens_N):,} suffixes ...", flush=True)
        positions_R, _ = suffix_array.build(np.asarray(corpus.tokens_N))
        _write(corpus, positions_R, folder)


def _write(corpus: Corpus, positions_R: np.ndarray, folder: pathlib.Path) -> None:
    partial = folder / (ARRAY + _PARTIAL)
    with partial.open("wb") as file:
        np.lib.format.write_array(file, positions_R, allow_pickle=False)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, folder / ARRAY)
    record = {
        "format": FORMAT,
        "corpus_sha256": corpus.sha256,
        "array_sha256": token_files.summarize(positions_R, None).sha256,
    }
    run_folder.write_atomically(folder / RECORD, json.dumps(record, indent=2) + "\n")


def _open(corpus: Corpus, folder: pathlib.Path) -> np.ndarray:
    record, path = _read_record(folder), folder / ARRAY
    if record["corpus_sha256"] != corpus.sha256:
        raise UsageError(
            f"{path} does not belong to the corpus (it sorts the tokens with sha256 "
            f"{record['corpus_sha256'][:12]}..., not {corpus.sha256[:12]}...): delete "
            f"it and {RECORD}, and it is built anew"
        )
    try:
        positions_R = token_files.map_npy(path)
        num_rows = len(corpus.tokens_N)
        if positions_R.shape != (num_rows,) or positions_R.dtype.kind != "i":
            raise ValueError(f"{positions_R.dtype}{positions_R.shape}")
        if token_files.summarize(positions_R, None).sha256 != record["array_sha256"]:
            raise ValueError("its sha256 is another")
    except (OSError, ValueError) as error:
        raise RunError(
            f"{path} is not the array that {RECORD} describes ({error}): delete both, "
            "and it is built anew"
        ) from error
    return positions_R


def _read_record(folder: pathlib.Path) -> dict[str, Any]:
    path = folder / RECORD
    try:
        record = json.loads(path.read_text())
        if record["format"] != FORMAT:
            raise ValueError(f"its format is {record['format']!r}")
        return {key: str(record[key]) for key in ("corpus_sha256", "array_sha256")}
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"{path} does not describe a suffix array ({error}; expected the format "
            f"{FORMAT!r}): delete it, and the array is built anew"
        ) from error
