"""Checkpoints of a training run: enough to continue to the same bits.

    step_120/
      state/          parameters and optimizer state, in orbax's format
      progress.json   step, seed, ledger; what the arrays are; SHA-256 of every file

The checkpoints of a private run are themselves private: they hold the seed, from which
the noise can be recomputed.
"""

import dataclasses
import hashlib
import json
import os
import pathlib
import re
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from experiments.errors import RunError, one_line

FORMAT = "dpjax.training.1"
KEPT = 3
_STATE, _PROGRESS = "state", "progress.json"


@dataclasses.dataclass(frozen=True)
class Progress:
    """What a run has done and needs to know, apart from its arrays.

    Attributes:
      step: Updates made. It is also the sampler's position.
      seed: The seed; secret if the run is private.
      ledger: The privacy ledger, serialised; empty if the run is not private.
    """

    step: int
    seed: int
    ledger: str = ""


class Checkpoints:
    """The checkpoints of one run, in one folder."""

    def __init__(self, folder: pathlib.Path):
        """Args: `folder`: made at the first save."""
        self._folder = folder.resolve()

    def latest_step(self) -> int | None:
        """The step of the newest checkpoint, None if there is none."""
        return max(self._steps(), default=None)

    def save(self, progress: Progress, state: Any) -> None:
        """Writes a checkpoint, whole or not at all, and drops the oldest ones."""
        arrays = _without_typed_keys(state)
        final = self._folder / f"step_{progress.step}"
        partial = final.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(partial / _STATE, arrays)
        record = {
            "format": FORMAT,
            "step": progress.step,
            # JSON numbers beyond 64 bits do not survive every reader.
            "seed": str(progress.seed),
            "ledger": progress.ledger,
            "arrays": _describe(arrays),
            "sha256": _digests(partial / _STATE),
        }
        with (partial / _PROGRESS).open("w") as file:
            json.dump(record, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.rename(partial, final)
        for step in sorted(self._steps())[:-KEPT]:
            shutil.rmtree(self._folder / f"step_{step}")

    def progress(self) -> Progress:
        """Reads the newest checkpoint, but for its arrays.

        Raises:
          RunError: The checkpoint is damaged or belongs to another program.
        """
        record = self._checked_record(self._newest())
        return Progress(record["step"], int(record["seed"]), record["ledger"])

    def restore(self, like: Any) -> Any:
        """Reads the arrays of the newest checkpoint.

        Args:
          like: A state of the same structure, shapes and dtypes.

        Raises:
          RunError: The checkpoint is damaged or belongs to another program.
        """
        step = self._newest()
        arrays = _without_typed_keys(like)
        if self._checked_record(step)["arrays"] != _describe(arrays):
            raise self._unusable(step, "its arrays are not those of this model")
        with ocp.StandardCheckpointer() as checkpointer:
            path = self._folder / f"step_{step}" / _STATE
            restored = checkpointer.restore(path, jax.tree.map(np.asarray, arrays))
        # Orbax would commit arrays to a device, for which JAX compiles another program
        # than for those of a fresh run.
        return _with_typed_keys(like, jax.tree.map(jnp.asarray, restored))

    def _steps(self) -> list[int]:
        if not self._folder.is_dir():
            return []
        names = [entry.name for entry in self._folder.iterdir() if entry.is_dir()]
        return [int(name[5:]) for name in names if re.fullmatch(r"step_\d+", name)]

    def _newest(self) -> int:
        step = self.latest_step()
        if step is None:
            raise RunError(f"{self._folder} holds no checkpoint: train first")
        return step

    def _checked_record(self, step: int) -> dict[str, Any]:
        """progress.json, after every file was found to be as it was written.

        Orbax has no checksums of its own, and reading damaged files with it leaves
        threads and coroutines behind.
        """
        path = self._folder / f"step_{step}"
        try:
            record = json.loads((path / _PROGRESS).read_text())
            if record["format"] != FORMAT or record["step"] != step:
                raise ValueError(f"{record['format']!r} at step {record['step']}")
            int(record["seed"]), str(record["ledger"]), dict(record["arrays"])
            files, found = dict(record["sha256"]), _digests(path / _STATE)
        except (OSError, KeyError, TypeError, ValueError) as error:
            cause = f"{type(error).__name__}: {one_line(error, limit=160)}"
            raise self._unusable(step, cause) from error
        if changed := [k for k in files | found if files.get(k) != found.get(k)]:
            raise self._unusable(step, f"{_STATE}/{changed[0]} is not as it was saved")
        return record

    def _unusable(self, step: int, cause: str) -> RunError:
        earlier = [s for s in self._steps() if s < step]
        remedy = "give another --config.out"
        if earlier:
            remedy = (
                f"delete that folder to continue from step {max(earlier)}, or {remedy}"
            )
        return RunError(
            f"{self._folder}/step_{step} is damaged or of another program, so the run "
            f"cannot continue from it: {remedy} ({cause})"
        )


def _digests(folder: pathlib.Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def _describe(arrays: Any) -> dict[str, str]:
    return {
        jax.tree_util.keystr(path): f"{leaf.dtype}{list(leaf.shape)}"
        for path, leaf in jax.tree.leaves_with_path(arrays)
    }


def _is_typed_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(
        leaf.dtype, jax.dtypes.prng_key
    )


def _without_typed_keys(tree: Any) -> Any:
    return jax.tree.map(
        lambda leaf: jax.random.key_data(leaf) if _is_typed_key(leaf) else leaf, tree
    )


def _with_typed_keys(like: Any, tree: Any) -> Any:
    def restored(old: Any, new: Any) -> Any:
        if not _is_typed_key(old):
            return new
        return jax.random.wrap_key_data(new, impl=jax.random.key_impl(old))

    return jax.tree.map(restored, like, tree)
