"""Texts by SPEC, and parts of them.

`stdlib`, `text:GLOB`, `jsonl:GLOB`, `tfds:NAME`.
"""

import dataclasses
import difflib
import glob
import gzip
import json
import math
import os
import pathlib
import re
import sysconfig
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from experiments.errors import RunError, UsageError

SPECS = ("stdlib", "text:GLOB", "jsonl:GLOB", "tfds:NAME")
_KEY = "text"
_EXCLUDED = {"site-packages", "dist-packages", "__pycache__"}


@dataclasses.dataclass(frozen=True)
class Part:
    """The documents whose index is `index` modulo `of`.

    Example:
      >>> part = Part.parse("1/3")
      >>> [i for i in range(7) if i in part]
      [1, 4]
      >>> part.is_disjoint(Part(0, 2)), part.is_disjoint(Part(2, 3))
      (False, True)
    """

    index: int
    of: int

    @classmethod
    def parse(cls, text: str, name: str = "part") -> "Part":
        """Reads `K/N`.

        Raises:
          UsageError: It is not that, K is not below N, or N has over 18 digits.
        """
        match = re.fullmatch(r"(\d{1,18})/(\d{1,18})", text)
        if not match or int(match[1]) >= int(match[2]):
            raise UsageError(
                f"{name}={text!r}, expected K/N with K from 0 to N-1, the documents "
                f"whose index is K modulo N: give --{name}=0/2"
            )
        return cls(int(match[1]), int(match[2]))

    def __contains__(self, document: int) -> bool:
        """Whether the document of this index is in the part."""
        return document % self.of == self.index

    def is_disjoint(self, other: "Part") -> bool:
        """Whether no index at all is in both."""
        return (self.index - other.index) % math.gcd(self.of, other.of) != 0

    def __str__(self) -> str:
        """As `parse` reads it."""
        return f"{self.index}/{self.of}"


ALL = Part(0, 1)


@dataclasses.dataclass(frozen=True)
class Documents:
    """Texts that can be read any number of times, always in the same order.

    Attributes:
      spec: Which.
      count: How many, if that is known without reading them.
      size: Number and total bytes of the files they are read from; None without files.
      read: Starts to read.
    """

    spec: str
    count: int | None
    size: dict[str, int] | None
    read: Callable[[], Iterator[str]]

    def __iter__(self) -> Iterator[str]:
        """Reads the texts from the first."""
        return self.read()


def find(spec: str) -> Documents:
    """The texts that `spec` names; they are read when iterated over.

    Args:
      spec: `stdlib`, each source file of Python's standard library, in order of path,
        without site-packages; `text:GLOB`, each file that matches, in order of path;
        `jsonl:GLOB`, each line of such files (also .gz), of which the key "text"
        counts; `tfds:NAME`, each example of the split `train` of a TensorFlow data set
        with the feature `text`. Bytes that are not UTF-8 are replaced by U+FFFD, save
        in jsonl, where they are an error.

    Raises:
      UsageError: No such spec, or no file matches.
      RunError: The data cannot be opened; raised from the iteration, the file and line
        that cannot be read.

    Example:
      >>> texts = find("stdlib")
      >>> texts.count > 500
      True
    """
    kind, _, argument = spec.partition(":")
    if spec == "stdlib":
        return _from_files(spec, _stdlib(), _read_whole)
    if kind == "text" and argument:
        return _from_files(spec, _matching(spec, argument), _read_whole)
    if kind == "jsonl" and argument:
        files = _matching(spec, argument)
        return dataclasses.replace(_from_files(spec, files, _read_lines), count=None)
    if kind == "tfds" and argument:
        return _tensorflow_data_set(spec, argument)
    known = [known.partition(":")[0] for known in (*SPECS, "tokens:")]
    close = difflib.get_close_matches(kind, known, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    raise UsageError(
        f"corpus={spec!r} is unknown{hint}: expected one of {', '.join(SPECS)}, "
        "tokens:FILE.npy, tokens:DIR"
    )


def _stdlib() -> list[pathlib.Path]:
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    files = []
    for parent, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _EXCLUDED]
        files += [pathlib.Path(parent, name) for name in names if name.endswith(".py")]
    if not files:
        raise RunError(
            f"corpus='stdlib': no *.py under {root}: install Python with its "
            "standard library's sources, or give --corpus=text:GLOB"
        )
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def _matching(spec: str, pattern: str) -> list[pathlib.Path]:
    expanded = str(pathlib.Path(pattern).expanduser())
    names = sorted(glob.glob(expanded, recursive=True))
    files = [path for path in map(pathlib.Path, names) if path.is_file()]
    if not files:
        folder = next((name for name in names), None)
        hint = f"a folder's files are {folder}/*, or {folder}/**/*" if folder else ""
        raise UsageError(
            f"corpus={spec!r} matches no file: "
            f"{hint or 'check the path, and quote the pattern for the shell'}"
        )
    return files


def _from_files(
    spec: str,
    files: list[pathlib.Path],
    read: Callable[[pathlib.Path], Iterator[str]],
) -> Documents:
    size = {"count": len(files), "bytes": sum(file.stat().st_size for file in files)}
    return Documents(
        spec, len(files), size, lambda: (text for file in files for text in read(file))
    )


def _read_whole(path: pathlib.Path) -> Iterator[str]:
    # Bytes, so that line ends stay what they are.
    yield path.read_bytes().decode("utf-8", "replace")


def _read_lines(path: pathlib.Path) -> Iterator[str]:
    number = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for line in file:
                number += 1
                if line.strip():
                    yield _text_of(line)
    # A damaged archive shows as any of the latter three.
    except (ValueError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        place = number if isinstance(error, ValueError) else number + 1
        raise RunError(
            f"{path}, line {place}: {error}; expected one JSON object with the key "
            f"{_KEY!r} a line: mend or remove the line"
        ) from error


def _text_of(line: bytes) -> str:
    try:
        example = json.loads(line.decode("utf-8").rstrip())
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at column {error.colno}") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(example, dict) or _KEY not in example:
        keys = sorted(example)[:5] if isinstance(example, dict) else None
        found = f"the keys {keys}" if keys is not None else type(example).__name__
        raise ValueError(f"found {found}")
    if not isinstance(example[_KEY], str):
        raise ValueError(f"{_KEY!r} is {type(example[_KEY]).__name__}, not a string")
    return _without_surrogates(example[_KEY])


def _without_surrogates(text: str) -> str:
    # JSON may escape half a character, which no encoding can write.
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _tensorflow_data_set(spec: str, name: str) -> Documents:
    # Its package loads scikit-learn, which takes seconds that few need to wait.
    from experiments.data import tfds

    source = f"corpus={spec!r}"
    (examples,) = tfds.open_splits(name, ["train"], source)
    features = set(examples.dataset_info.features)
    if _KEY not in features:
        raise RunError(
            f"{source} has the features {sorted(features)}, expected {_KEY}: name a "
            "data set of texts such as tfds:imdb_reviews"
        )

    def read() -> Iterator[str]:
        return (_as_text(examples[i][_KEY]) for i in range(len(examples)))

    return Documents(spec, len(examples), None, read)


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else bytes(value).decode("utf-8", "replace")
