"""An evaluation set as it lies on disk: windows of a corpus, with their exact counts.

windows.parquet  one row per window, with the columns of `COLUMNS`
tokenizer.json   what the token ids mean, for display; absent if nobody said
manifest.json    the corpus, the seed, the buckets, the hash of windows.parquet; it
                 comes last, so where it is, the set is complete
corpus/          the token corpus, if the set was made from texts
"""

import dataclasses
import hashlib
import json
import os
import pathlib
import shutil
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

import numpy as np
import polars

from experiments import run_folder
from experiments.errors import RunError, UsageError

FORMAT = "dpjax evaluation set 1"
WINDOWS = "windows.parquet"
TOKENIZER = "tokenizer.json"
MANIFEST = "manifest.json"
CORPUS = "corpus"
_PARTIAL = ".partial"
_ROW_GROUP = 1 << 14
_TOOLS = ("numpy", "polars", "pydivsufsort")

COLUMNS = {
    "window_id": polars.Int64(),
    "length": polars.Int32(),
    "bucket": polars.Int32(),
    "count": polars.Int64(),
    "position": polars.Int64(),
    "tokens": polars.List(polars.UInt32()),
    "cluster": polars.Int64(),
}
"""The columns of windows.parquet.

window_id  0, 1, 2, ... in order of rows
length     in tokens
bucket     the number of the bucket of `count`: see the manifest for its limits
count      how often the window occurs in the corpus, overlaps included
position   where it occurs first
tokens     its ids, `length` of them
cluster    where the maximal repeat around it occurs first; for a window that occurs
           once, where its document starts (see `repeats.repeat_starts`)
"""


@dataclasses.dataclass(frozen=True)
class EvaluationSet:
    """Windows to prompt a model with.

    Attributes:
      windows: The rows of windows.parquet; see `COLUMNS`.
      manifest: What they were made from and how.
      sha256: Of windows.parquet.
    """

    windows: polars.DataFrame
    manifest: dict[str, Any]
    sha256: str


def rows(
    tokens_KxL: np.ndarray,
    *,
    bucket_K: np.ndarray,
    count_K: np.ndarray,
    position_K: np.ndarray,
    cluster_K: np.ndarray,
) -> polars.DataFrame:
    """Windows of one length: the columns of `COLUMNS` but for `window_id`."""
    num_windows, length = tokens_KxL.shape
    tokens = polars.Series(
        tokens_KxL.astype(np.uint32), dtype=polars.Array(polars.UInt32(), length)
    )
    values: dict[str, Any] = {
        "length": np.full(num_windows, length),
        "bucket": bucket_K,
        "count": count_K,
        "position": position_K,
        "tokens": tokens,
        "cluster": cluster_K,
    }
    return polars.DataFrame(
        {name: polars.Series(values[name]).cast(COLUMNS[name]) for name in values}
    )


def finished(folder: pathlib.Path, asked: Mapping[str, Any]) -> dict[str, Any] | None:
    """The manifest of the set in `folder`, or None if the folder is free for one.

    Args:
      folder: A folder that exists.
      asked: What the manifest must say; other keys may be anything.

    Raises:
      UsageError: The folder belongs to another evaluation set or to something else.
      RunError: Its manifest cannot be read.
    """
    if (folder / MANIFEST).exists():
        manifest = _read_manifest(folder)
        _check_same(folder, manifest, asked)
        return manifest
    ours = [run_folder.LOCK, CORPUS]
    if (folder / (MANIFEST + _PARTIAL)).exists():
        # Writing was stopped before the manifest took its place.
        ours += [WINDOWS, TOKENIZER]
    foreign = sorted(
        entry.name
        for entry in folder.iterdir()
        if entry.name not in ours and entry.suffix != _PARTIAL
    )
    if foreign:
        raise UsageError(
            f"out={str(folder)!r} holds {foreign[0]!r} but no {MANIFEST}, so it is not "
            "an evaluation set: give another --out"
        )
    return None


def write(
    folder: pathlib.Path,
    parts: Sequence[polars.DataFrame],
    manifest: Mapping[str, Any],
    tokenizer: pathlib.Path | None,
) -> None:
    """Writes a set into a folder that is free, the manifest last.

    The same rows make the same bytes.

    Args:
      folder: A folder that exists.
      parts: Rows, as `rows` makes them.
      manifest: What they were made from. Added are the format, the number of rows, the
        hash of the file and the versions of what wrote it.
      tokenizer: A tokenizer.json to put beside them.
    """
    windows = (
        polars.concat(parts).with_row_index("window_id").cast(polars.Schema(COLUMNS))
    )
    partial = folder / (WINDOWS + _PARTIAL)
    with partial.open("wb") as file:
        windows.write_parquet(file, compression="zstd", row_group_size=_ROW_GROUP)
        file.flush()
        os.fsync(file.fileno())
    manifest = {
        "format": FORMAT,
        "num_windows": len(windows),
        **manifest,
        "windows_sha256": _sha256(partial),
        "versions": {name: metadata.version(name) for name in _TOOLS},
    }
    whole = folder / (MANIFEST + _PARTIAL)
    with whole.open("w") as file:
        file.write(json.dumps(manifest, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())
    if tokenizer is not None:
        copy = folder / (TOKENIZER + _PARTIAL)
        shutil.copyfile(tokenizer, copy)
        os.replace(copy, folder / TOKENIZER)
    os.replace(partial, folder / WINDOWS)
    os.replace(whole, folder / MANIFEST)


def load(folder: str | os.PathLike[str]) -> EvaluationSet:
    """Reads a set and checks that it is whole.

    Raises:
      UsageError: There is no evaluation set.
      RunError: Its files are damaged.
    """
    folder = pathlib.Path(folder).expanduser()
    if not (folder / MANIFEST).is_file():
        raise UsageError(
            f"{str(folder)!r} holds no {MANIFEST}, so it is not an evaluation set: "
            "make one with python -m experiments.extraction.build_dataset"
        )
    manifest = _read_manifest(folder)
    path = folder / WINDOWS
    if not path.is_file():
        raise RunError(f"{path} is missing: build the evaluation set again")
    sha256 = _sha256(path)
    if sha256 != manifest["windows_sha256"]:
        raise RunError(
            f"{path} has the sha256 {sha256[:12]}..., but {MANIFEST} says "
            f"{manifest['windows_sha256'][:12]}...: build the evaluation set again"
        )
    windows = polars.read_parquet(path)
    if windows.schema != polars.Schema(COLUMNS):
        raise RunError(
            f"{path} has the columns {dict(windows.schema)}, expected {COLUMNS}: build "
            "the evaluation set again"
        )
    return EvaluationSet(windows, manifest, sha256)


def _read_manifest(folder: pathlib.Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text())
        if manifest["format"] != FORMAT:
            raise ValueError(f"its format is {manifest['format']!r}")
        return {**manifest, "windows_sha256": str(manifest["windows_sha256"])}
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"{path} is not the manifest of an evaluation set ({error}; expected the "
            f"format {FORMAT!r}): build the set again, into another folder"
        ) from error


def _check_same(
    folder: pathlib.Path, manifest: Mapping[str, Any], asked: Mapping[str, Any]
) -> None:
    differing = [key for key in asked if manifest.get(key) != asked[key]]
    if differing:
        changes = ", ".join(
            f"{key}={manifest.get(key)!r} (now {asked[key]!r})" for key in differing[:4]
        )
        raise UsageError(
            f"out={str(folder)!r} holds an evaluation set with {changes}: give another "
            "--out"
        )


def _sha256(path: pathlib.Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
