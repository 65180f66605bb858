"""The folder of one report: it replaces its own files, and no others.

report.json says which sweeps the report is about and which files are its own.
"""

import dataclasses
import json
import pathlib
from collections.abc import Sequence

from experiments import run_folder
from experiments.errors import RunError, UsageError, one_line
from experiments.extraction.sweep_runs import Sweep

FORMAT = "dpjax extraction report 1"
MANIFEST = "report.json"


def claim(folder: pathlib.Path, sweeps: Sequence[Sweep], files: Sequence[str]) -> None:
    """Makes sure that `files` may be written into `folder`, and notes that they will.

    Args:
      folder: A folder that exists.
      sweeps: What the report is about; the same records make the same sweep, wherever
        they lie.
      files: Paths in the folder, with forward slashes.

    Raises:
      UsageError: The folder holds another report, something else, or a file of one of
        these names that is not a report's. Nothing was changed in it.
      RunError: Its report.json cannot be read.
    """
    before = _read(folder)
    if before is None:
        ours = (run_folder.LOCK, MANIFEST + ".partial")
        foreign = sorted(e.name for e in folder.iterdir() if e.name not in ours)
        if foreign:
            raise UsageError(
                f"--out={folder} holds {foreign[0]!r} but no {MANIFEST}, so it is not "
                "a report: give another --out"
            )
        _write(folder, sweeps, files)
        return
    if before.sweeps != {sweep.records_sha256 for sweep in sweeps}:
        raise UsageError(
            f"--out={folder} holds a report on other records, of "
            f"{', '.join(before.folders)}: give another --out"
        )
    for name in files:
        if name not in before.files and (folder / name).exists():
            raise UsageError(
                f"--out={folder} holds {name!r}, which is not the report's: move it "
                "away, or give another --out"
            )
    # Until all is written, the old files and the new ones are the report's.
    _write(folder, sweeps, sorted({*before.files, *files}))


def finish(folder: pathlib.Path, sweeps: Sequence[Sweep], files: Sequence[str]) -> None:
    """Removes what was claimed and is not among `files`, which are written."""
    before = _read(folder)
    for name in before.files if before else ():
        # A name that leads out of the folder is none that a report wrote.
        if name not in files and ".." not in pathlib.PurePosixPath(name).parts:
            (folder / name).unlink(missing_ok=True)
    _write(folder, sweeps, files)


@dataclasses.dataclass(frozen=True)
class _Manifest:
    folders: list[str]
    sweeps: set[str]
    files: list[str]


def _read(folder: pathlib.Path) -> _Manifest | None:
    path = folder / MANIFEST
    if not path.exists():
        return None
    try:
        manifest = json.loads(path.read_text())
        if manifest["format"] != FORMAT:
            raise ValueError(f"its format is {manifest['format']!r}")
        sweeps = manifest["sweeps"]
        return _Manifest(
            [str(sweep["folder"]) for sweep in sweeps],
            {sweep["records_sha256"] for sweep in sweeps},
            [str(name) for name in manifest["files"]],
        )
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"{path} is not a report's ({one_line(error)}): give another --out"
        ) from error


def _write(folder: pathlib.Path, sweeps: Sequence[Sweep], files: Sequence[str]) -> None:
    manifest = {
        "format": FORMAT,
        "sweeps": [
            {"folder": str(sweep.folder), "records_sha256": sweep.records_sha256}
            for sweep in sweeps
        ],
        "files": list(files),
    }
    run_folder.write_atomically(
        folder / MANIFEST, json.dumps(manifest, indent=2) + "\n"
    )
