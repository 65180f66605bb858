"""Checkpoints of a private run: enough to continue to the same bits.

A checkpoint is private: it holds the seed, from which the noise can be recomputed.
"""

import contextlib
import dataclasses
import hashlib
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from experiments.dp.steps import TrainState
from experiments.errors import RunError, one_line

FORMAT = "dpjax.private_training.1"
KEPT = 3


@dataclasses.dataclass(frozen=True)
class Progress:
    """What a run has done and needs to know, apart from its arrays.

    Attributes:
      step: Updates made. It is also the sampler's position.
      seed: The secret seed.
      ledger: The privacy ledger, serialised.
    """

    step: int
    seed: int
    ledger: str


class Checkpoints:
    """The checkpoints of one run folder, newest last."""

    def __init__(self, folder: pathlib.Path):
        """Args: `folder`: made if absent."""
        self._folder = folder.resolve()
        self._manager = ocp.CheckpointManager(
            self._folder,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=KEPT, enable_async_checkpointing=False, step_prefix="step"
            ),
        )

    def latest_step(self) -> int | None:
        """The step of the newest complete checkpoint."""
        return self._manager.latest_step()

    def save(self, progress: Progress, state: TrainState) -> None:
        """Writes a checkpoint; it appears whole or not at all."""
        arrays = _unwrap_keys(state)
        record = {
            "format": FORMAT,
            "step": progress.step,
            # JSON numbers beyond 64 bits do not survive every reader.
            "seed": str(progress.seed),
            "ledger": progress.ledger,
            "sha256": _digest(arrays),
        }
        self._manager.save(
            progress.step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(arrays),
                progress=ocp.args.JsonSave(record),
            ),
        )

    def progress(self) -> Progress:
        """Reads the newest checkpoint, but for its arrays.

        Raises:
          RunError: The checkpoint is damaged or belongs to another program.
        """
        step = self._manager.latest_step()
        with self._explained(step):
            args = ocp.args.Composite(progress=ocp.args.JsonRestore())
            record = self._manager.restore(step, args=args).progress
            if record["format"] != FORMAT or record["step"] != step:
                raise ValueError(f"{record['format']!r} at step {record['step']}")
            return Progress(step, int(record["seed"]), record["ledger"])

    def restore(self, like: TrainState) -> TrainState:
        """Reads the arrays of the newest checkpoint.

        Args:
          like: A state of the same structure, shapes and dtypes.

        Raises:
          RunError: The checkpoint is damaged or belongs to another program.
        """
        step = self._manager.latest_step()
        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, _unwrap_keys(like))
        with self._explained(step):
            args = ocp.args.Composite(
                state=ocp.args.StandardRestore(target),
                progress=ocp.args.JsonRestore(),
            )
            restored = self._manager.restore(step, args=args)
            # Orbax writes no checksums of array data.
            if _digest(restored.state) != restored.progress["sha256"]:
                raise ValueError("the arrays are not those that were saved")
            return _rewrap_keys(like, restored.state)

    def close(self) -> None:
        """Releases the folder."""
        self._manager.close()

    @contextlib.contextmanager
    def _explained(self, step: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            # Orbax and tensorstore raise many classes for damaged or foreign files.
            earlier = [s for s in self._manager.all_steps() if s < step]
            remedy = "give another --config.out"
            if earlier:
                remedy = (
                    f"delete that folder to continue from step {max(earlier)}, or "
                    f"{remedy}"
                )
            raise RunError(
                f"{self._folder}/step_{step} is damaged or of another program, so the "
                f"run cannot continue from it: {remedy} "
                f"[{type(error).__name__}: {one_line(error, limit=160)}]"
            ) from error


def _digest(arrays: Any) -> str:
    digest = hashlib.sha256()
    for path, leaf in jax.tree.leaves_with_path(arrays):
        array = np.asarray(leaf)
        header = f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}"
        digest.update(header.encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(
        leaf.dtype, jax.dtypes.prng_key
    )


def _unwrap_keys(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.random.key_data(x) if _is_key(x) else x, tree)


def _rewrap_keys(like: Any, tree: Any) -> Any:
    def rewrap(old: Any, new: Any) -> Any:
        if not _is_key(old):
            return new
        return jax.random.wrap_key_data(new, impl=jax.random.key_impl(old))

    return jax.tree.map(rewrap, like, tree)
