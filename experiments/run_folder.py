"""The folder of one run: never shared, never overwritten.

config.json     the config and what follows from it
metrics.jsonl   one row per logged step
checkpoints/    of a private run: private, they hold the seed
"""

import contextlib
import fcntl
import json
import os
import pathlib
import time
from collections.abc import Iterator
from typing import Any

from experiments.errors import RunError, UsageError

LOCK = ".lock"
CONFIG = "config.json"
METRICS = "metrics.jsonl"
CHECKPOINTS = "checkpoints"
_PARTIAL = ".partial"


def choose(
    out: str,
    slug: str,
    root: pathlib.Path = pathlib.Path("runs"),
    flag: str = "--config.out",
) -> pathlib.Path:
    """Returns the folder named by `out`, made if absent; empty makes a fresh one.

    Args:
      out: What the user gave as `flag`.
      slug: Starts the name of a fresh folder.
      root: Where a fresh one is made.
      flag: Named in errors.
    """
    if out:
        path = pathlib.Path(out).expanduser()
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"{flag.lstrip('-')}={out!r} cannot be made a folder "
                f"({error.strerror}): give another {flag}"
            ) from error
        return path
    stem = f"{slug}-{time.strftime('%Y%m%d-%H%M%S')}"
    for suffix in ("", *(f"-{i}" for i in range(1, 100))):
        path = root / f"{stem}{suffix}"
        with contextlib.suppress(FileExistsError):
            path.mkdir(parents=True)
            return path
    raise RunError(f"{root}/{stem}-* are all taken: set {flag}")


@contextlib.contextmanager
def locked(
    folder: pathlib.Path, remedy: str = "wait for it or give another --config.out"
) -> Iterator[None]:
    """Holds `folder` for this process; the lock ends with the process, however it ends.

    Args:
      folder: A folder that exists.
      remedy: What to do while another process works here.

    Raises:
      RunError: Another process does.
    """
    with (folder / LOCK).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunError(
                f"{str(folder)!r} is in use by another process: {remedy}"
            ) from error
        yield


def claim(folder: pathlib.Path, config: dict[str, Any]) -> None:
    """Writes config.json into an empty folder, or checks that it is this very config.

    Raises:
      UsageError: The folder belongs to another run or to something else. Nothing was
        changed in it.
    """
    path = folder / CONFIG
    if not path.exists():
        foreign = _contents(folder)
        if foreign:
            raise UsageError(
                f"config.out={str(folder)!r} holds {foreign[0]!r} but no {CONFIG}, so "
                "it is not a run folder: give another --config.out"
            )
        _write_config(folder, config)
        return
    try:
        before = json.loads(path.read_text())
        keys = sorted(before.keys() | config.keys())
    except (ValueError, AttributeError) as error:
        raise RunError(
            f"{path} is not the config of a run ({error}): give another --config.out"
        ) from error
    differing = [k for k in keys if before.get(k) != config.get(k)]
    if differing:
        # What follows from the config differs with it, and alone only if data changed.
        differing = [k for k in differing if k != "derived"] or differing
        changes = ", ".join(
            f"{k}={before.get(k)!r} (now {config.get(k)!r})" for k in differing[:4]
        )
        raise UsageError(
            f"config.out={str(folder)!r} holds a run with {changes}: give another "
            "--config.out, or the same config to continue that run"
        )


def _contents(folder: pathlib.Path) -> list[str]:
    """What is in `folder` beside the traces of a start that got no further."""
    ours = (LOCK, CONFIG + _PARTIAL)
    return sorted(e.name for e in folder.iterdir() if e.name not in ours)


def _write_config(folder: pathlib.Path, config: dict[str, Any]) -> None:
    write_atomically(folder / CONFIG, json.dumps(config, indent=2) + "\n")


def write_atomically(path: pathlib.Path, text: str) -> None:
    """Replaces the file at `path` by `text`, whole or not at all."""
    partial = path.with_name(path.name + _PARTIAL)
    with partial.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def read_metrics(folder: pathlib.Path) -> list[dict[str, Any]]:
    """The complete rows of metrics.jsonl; a row cut short by a crash is left out."""
    path = folder / METRICS
    if not path.exists():
        return []
    rows = []
    for line in path.read_text().splitlines(keepends=True):
        if not line.endswith("\n"):
            break
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise RunError(
                f"{path}: row {len(rows) + 1} is not JSON: restore the file, or give "
                "another --config.out"
            ) from error
    return rows


def truncate_metrics(folder: pathlib.Path, last_step: int) -> None:
    """Drops the rows after `last_step`; the run will write them again."""
    rows = [row for row in read_metrics(folder) if row["step"] <= last_step]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    write_atomically(folder / METRICS, text)


def append_metrics(folder: pathlib.Path, row: dict[str, Any]) -> None:
    """Adds one row and makes sure that it is on the disk."""
    with (folder / METRICS).open("a") as file:
        file.write(json.dumps(row) + "\n")
        file.flush()
        os.fsync(file.fileno())
