"""Which package of Python's standard library does a piece of source code come from?

A text classification task that needs no download: the sources are on every machine that
runs Python. Their versions differ, and with them the examples and, at the margin, the
packages; on one installation everything is determined.
"""

import pathlib
import sysconfig

import numpy as np

from experiments.data import tokenizer
from experiments.data.dataset import Dataset, check
from experiments.errors import RunError

NUM_PACKAGES = 10
# So that no package swamps the others: `encodings` alone has 370,000 tokens.
MAX_TRAIN_TOKENS, MAX_TEST_TOKENS = 100_000, 25_000
# One file in five is for testing, so each package needs five.
TEST_EVERY, TEST_PLACE = 5, 2
# Tests, an editor and a copy of an old parser: not what anyone imports.
EXCLUDED = {"test", "tests", "idle_test", "idlelib", "lib2to3", "site-packages"}


def load(sequence_length: int) -> Dataset:
    """Cuts the ten largest packages into windows of `sequence_length` tokens.

    A window never spans two files, and no two windows overlap: a token is in one
    example, and what is left at the end of a file is dropped. The split is by file: in
    order of size, the third file of every five is for testing. Of each package at most
    100,000 tokens are for training and 25,000 for testing, from its largest files. The
    class is the place of the package in alphabetical order.

    Raises:
      RunError: The sources are not where they should be, or too short for the windows.
    """
    folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
    files_by_package = _largest_packages(folder)
    source = f"dataset='stdlib' ({folder})"
    if len(files_by_package) < NUM_PACKAGES:
        raise RunError(
            f"{source}: found {len(files_by_package)} packages with {TEST_EVERY} or "
            f"more source files, expected {NUM_PACKAGES}: install Python with its "
            "standard library's sources"
        )
    train: list[np.ndarray] = []
    test: list[np.ndarray] = []
    for _, files in sorted(files_by_package.items()):
        held_out = files[TEST_PLACE::TEST_EVERY]
        others = [path for path in files if path not in held_out]
        train.append(_windows(others, sequence_length, MAX_TRAIN_TOKENS))
        test.append(_windows(held_out, sequence_length, MAX_TEST_TOKENS))
    for name, split in (("train", train), ("test", test)):
        if min(len(windows) for windows in split) == 0:
            raise RunError(
                f"{source}: a package has no {name} window of {sequence_length} "
                "tokens: lower --config.sequence_length"
            )
    dataset = Dataset(
        np.concatenate(train),
        _labels(train),
        np.concatenate(test),
        _labels(test),
        num_classes=NUM_PACKAGES,
        vocabulary_size=tokenizer.VOCABULARY_SIZE,
    )
    return check(dataset, source)


def _largest_packages(folder: pathlib.Path) -> dict[str, list[pathlib.Path]]:
    """The files of each package, the largest first, ties in alphabetical order."""
    files_by_package: dict[str, list[pathlib.Path]] = {}
    sizes: dict[pathlib.Path, int] = {}
    for init in sorted(folder.glob("*/__init__.py")):
        if init.parent.name in EXCLUDED:
            continue
        files = [
            path
            for path in sorted(init.parent.rglob("*.py"))
            if not EXCLUDED & set(path.relative_to(folder).parts)
        ]
        sizes |= {path: path.stat().st_size for path in files}
        if len(files) >= TEST_EVERY:
            files_by_package[init.parent.name] = sorted(files, key=lambda p: -sizes[p])
    totals = {
        name: sum(sizes[path] for path in files)
        for name, files in files_by_package.items()
    }
    largest = sorted(totals, key=lambda name: (-totals[name], name))[:NUM_PACKAGES]
    return {name: files_by_package[name] for name in largest}


def _windows(files: list[pathlib.Path], length: int, max_tokens: int) -> np.ndarray:
    windows: list[list[int]] = []
    for path in files:
        ids = tokenizer.encode(path.read_text(encoding="utf-8", errors="replace"))
        windows += [
            ids[start : start + length]
            for start in range(0, len(ids) - length + 1, length)
        ]
        if len(windows) * length >= max_tokens:
            break
    windows = windows[: max_tokens // length]
    return np.asarray(windows, np.int32).reshape(-1, length)


def _labels(windows_by_class: list[np.ndarray]) -> np.ndarray:
    counts = [len(windows) for windows in windows_by_class]
    return np.repeat(np.arange(len(counts), dtype=np.int32), counts)
