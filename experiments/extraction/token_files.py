"""Token ids on disk: one 1-D `.npy` of uint16 or uint32, read as a memory map."""

import dataclasses
import hashlib
import math
import os
import pathlib
import tokenize
from collections.abc import Iterable, Iterator
from typing import BinaryIO

import numpy as np
import tqdm

from experiments.errors import RunError, UsageError, one_line

# Little-endian by name: the hash is of the bytes in the file.
_UINT16, _UINT32 = np.dtype("<u2"), np.dtype("<u4")
MAX_VOCABULARY_SIZE = 2**32
_BLOCK = 1 << 22
_SHOW_PROGRESS_FROM = 1 << 29


@dataclasses.dataclass(frozen=True)
class Summary:
    """What one pass over a token array finds.

    Attributes:
      sha256: Of the array's bytes, without the header of the file.
      max_id: The largest id.
      num_separators: How often the separator occurs; 0 if there is none.
    """

    sha256: str
    max_id: int
    num_separators: int


def dtype_for(vocabulary_size: int) -> np.dtype:
    """The smallest of the two dtypes that holds every id below `vocabulary_size`.

    Raises:
      RunError: Neither does.

    Example:
      >>> dtype_for(65_536), dtype_for(65_537)
      (dtype('uint16'), dtype('uint32'))
    """
    if vocabulary_size > MAX_VOCABULARY_SIZE:
        raise RunError(
            f"a vocabulary of {vocabulary_size:,} entries, expected at most "
            f"{MAX_VOCABULARY_SIZE:,}, the ids of uint32: use another tokenizer"
        )
    return _UINT16 if vocabulary_size <= 2**16 else _UINT32


def open_array(path: pathlib.Path) -> np.ndarray:
    """Maps a token file read-only, without reading it.

    Returns:
      uint16[N] or uint32[N] with N at least 1.

    Raises:
      UsageError: There is no such file.
      RunError: It is no `.npy`, is cut short or too long, or holds anything but a
        non-empty 1-D array of one of the two dtypes.
    """
    if not path.is_file():
        raise UsageError(
            f"{path}: no such file, expected a .npy of token ids: give "
            "tokens:FILE.npy, or tokens:DIR for a folder of build_corpus"
        )
    try:
        tokens_N = map_npy(path)
    except ValueError as error:
        raise RunError(
            f"{path} is not a whole .npy file ({one_line(error)}): {_REWRITE}"
        ) from error
    if tokens_N.ndim != 1:
        raise RunError(
            f"{path} has the shape {tokens_N.shape}, expected one dimension: join the "
            "documents into one array, with a separator id between two of them"
        )
    if tokens_N.dtype not in (_UINT16, _UINT32):
        raise RunError(
            f"{path} holds {tokens_N.dtype.str}, expected uint16 or uint32 "
            f"({_UINT16.str} or {_UINT32.str}): once no id is negative or too large, "
            "save it again with .astype('<u2') or .astype('<u4')"
        )
    if not tokens_N.size:
        raise RunError(f"{path} holds no tokens: give a corpus that has some")
    surplus = path.stat().st_size - tokens_N.offset - tokens_N.nbytes
    if surplus:
        raise RunError(
            f"{path} has {surplus} bytes more than the {len(tokens_N)} tokens of its "
            f"header: {_REWRITE}"
        )
    return tokens_N


def map_npy(path: pathlib.Path) -> np.memmap:
    """Maps a `.npy` of any shape read-only, without reading it.

    Raises:
      ValueError: It is none, or is cut short.
    """
    try:
        with path.open("rb") as file:
            if file.read(6) != b"\x93NUMPY":
                raise ValueError("it does not start as one")
        return np.lib.format.open_memmap(path, mode="r")
    except (SyntaxError, tokenize.TokenError, OverflowError) as error:
        # NumPy takes the header for Python, and lets the tokenizer's errors through.
        raise ValueError(one_line(error)) from error


_REWRITE = "write it again with numpy.save, or build it with build_corpus"


def blocks(tokens_N: np.ndarray) -> Iterator[np.ndarray]:
    """The array in pieces that fit in memory; of a large one it shows the progress."""
    with tqdm.tqdm(
        total=len(tokens_N),
        unit="token",
        unit_scale=True,
        desc="Reading the corpus",
        disable=tokens_N.nbytes < _SHOW_PROGRESS_FROM,
    ) as progress_bar:
        for start in range(0, len(tokens_N), _BLOCK):
            block = tokens_N[start : start + _BLOCK]
            yield block
            progress_bar.update(len(block))


def summarize(tokens_N: np.ndarray, eos_id: int | None) -> Summary:
    """Reads the whole array once (about a second per gigabyte).

    Example:
      >>> summary = summarize(np.array([5, 0, 3], "<u2"), eos_id=0)
      >>> summary.max_id, summary.num_separators, summary.sha256[:4]
      (5, 1, '4f65')
    """
    sha256 = hashlib.sha256()
    max_id = num_separators = 0
    for block in blocks(tokens_N):
        sha256.update(np.ascontiguousarray(block).data)
        max_id = max(max_id, int(block.max()))
        if eos_id is not None:
            num_separators += int(np.count_nonzero(block == eos_id))
    return Summary(sha256.hexdigest(), max_id, num_separators)


def check_ids(
    tokens_N: np.ndarray, max_id: int, vocabulary_size: int, path: pathlib.Path
) -> None:
    """Raises `RunError` with the first id outside the vocabulary, if `max_id` is."""
    if max_id < vocabulary_size:
        return
    start = 0
    for block in blocks(tokens_N):
        outside = np.flatnonzero(block >= vocabulary_size)
        if outside.size:
            raise RunError(
                f"{path}: the token at position {start + outside[0]} is "
                f"{block[outside[0]]}, expected an id below the vocabulary size "
                f"{vocabulary_size}: use the tokenizer that made the file"
            )
        start += len(block)


def split(tokens_N: np.ndarray, eos_id: int | None) -> Iterator[np.ndarray]:
    """The documents between the separators, as views; some may be empty.

    Example:
      >>> [document.tolist() for document in split(np.array([5, 0, 0, 3]), eos_id=0)]
      [[5], [], [3]]
    """
    start = 0
    for end in separators(tokens_N, eos_id):
        yield tokens_N[start:end]
        start = end + 1
    yield tokens_N[start:]


def separators(tokens_N: np.ndarray, eos_id: int | None) -> np.ndarray:
    """The positions of the separator, i64[S]; none if there is no separator.

    Example:
      >>> separators(np.array([5, 0, 0, 3]), eos_id=0).tolist()
      [1, 2]
    """
    found, start = [np.zeros(0, np.int64)], 0
    if eos_id is None:
        return found[0]
    for block in blocks(tokens_N):
        found.append(np.flatnonzero(block == eos_id) + start)
        start += len(block)
    return np.concatenate(found)


def join(
    documents: Iterable[np.ndarray], eos_id: int, max_tokens: int | None = None
) -> Iterator[np.ndarray]:
    """Documents with one separator between two: none at the start, none at the end.

    Empty documents are left out. Of the documents that exceed `max_tokens`, separators
    counted, the first is cut and the rest is not read.

    Args:
      documents: Arrays of ids.
      eos_id: The separator.
      max_tokens: At least 1, or None for all.

    Example:
      >>> documents = [np.array(ids, int) for ids in ([5, 6], [], [7], [8, 9])]
      >>> np.concatenate(list(join(documents, eos_id=0))).tolist()
      [5, 6, 0, 7, 0, 8, 9]
      >>> np.concatenate(list(join(documents, eos_id=0, max_tokens=5))).tolist()
      [5, 6, 0, 7]
    """
    left = math.inf if max_tokens is None else max_tokens
    between = np.zeros(0, np.uint32)
    for document in documents:
        if not len(document):
            continue
        # A separator with nothing behind it would end the corpus.
        if left <= len(between):
            return
        yield between
        left -= len(between)
        kept = document[: int(min(left, len(document)))]
        yield kept
        left -= len(kept)
        between = np.array([eos_id], np.uint32)


def write_array(
    path: pathlib.Path, pieces: Iterable[np.ndarray], vocabulary_size: int
) -> int:
    """Writes token ids, piece by piece, as one `.npy`; returns how many there are.

    Args:
      path: The file; what is there is replaced.
      pieces: Arrays of ids, in any integer dtype.
      vocabulary_size: Decides between uint16 and uint32.

    Raises:
      RunError: An id is outside the vocabulary.
    """
    dtype = dtype_for(vocabulary_size)
    num_tokens = 0
    with path.open("wb") as file:
        # NumPy leaves room in the header for a length that is known later.
        _write_header(file, dtype, 0)
        header_size = file.tell()
        for piece in pieces:
            if len(piece) and not 0 <= piece.min() <= piece.max() < vocabulary_size:
                raise RunError(
                    f"ids from {piece.min()} to {piece.max()}, expected 0 to "
                    f"{vocabulary_size - 1}: the tokenizer is damaged, use another"
                )
            file.write(np.ascontiguousarray(piece, dtype).data)
            num_tokens += len(piece)
        file.seek(0)
        _write_header(file, dtype, num_tokens)
        if file.tell() != header_size:
            raise RunError(f"{path}: the header outgrew its place")
        file.flush()
        os.fsync(file.fileno())
    return num_tokens


def _write_header(file: BinaryIO, dtype: np.dtype, num_tokens: int) -> None:
    np.lib.format.write_array_header_1_0(
        file, {"descr": dtype.str, "fortran_order": False, "shape": (num_tokens,)}
    )
