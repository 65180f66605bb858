"""The models of a sweep: what is known of them before their weights are loaded."""

import dataclasses
import hashlib
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import tqdm

from experiments.errors import UsageError
from experiments.models import language_models, registry, safetensors_folder
from experiments.models.decoder_config import DecoderConfig
from experiments.models.t5 import T5
from experiments.models.t5_config import T5Config


@dataclasses.dataclass(frozen=True)
class SweptModel:
    """A model of the sweep.

    Attributes:
      name: The last part of its folder, longer where others would have the same.
      folder: As the config has it.
      baseline: It has not been trained on the corpus.
      config: Its architecture. Ids that a padded vocabulary has beyond the tokenizer's
        take part in the argmax, as they do in other implementations.
      params: Number of parameters; those used twice count once.
      sha256: Of its config and weights.
    """

    name: str
    folder: str
    baseline: bool
    config: DecoderConfig | T5Config
    params: int
    sha256: str

    def record(self) -> dict[str, Any]:
        """What config.json says about it."""
        return {
            "model": self.name,
            "folder": self.folder,
            "params": self.params,
            "baseline": self.baseline,
            "sha256": self.sha256,
        }


def describe(models: Sequence[str], baselines: Sequence[str]) -> tuple[SweptModel, ...]:
    """Reads the configs of models, then of baselines, and hashes their weights.

    Raises:
      UsageError: A folder holds no model that can be built, or is given twice.
      RunError: Weights are missing or cut short.
    """
    folders = (*models, *baselines)
    names = unique_names([pathlib.Path(f).expanduser().resolve() for f in folders])
    # Hashing takes some seconds for every 10 GB.
    with tqdm.tqdm(folders, "Hashing weights", unit="model", delay=2) as progress_bar:
        return tuple(
            _describe(name, folder, baseline=i >= len(models))
            for i, (name, folder) in enumerate(zip(names, progress_bar, strict=True))
        )


def unique_names(paths: Sequence[pathlib.Path]) -> list[str]:
    """The last part of each path, and as many before it as tell it from the others.

    Raises:
      UsageError: A path is given twice.

    Example:
      >>> paths = ["/runs/small/model", "/runs/large/model", "/gpt2"]
      >>> unique_names([pathlib.Path(path) for path in paths])
      ['small/model', 'large/model', 'gpt2']
    """
    for path in paths:
        times = paths.count(path)
        if times > 1:
            raise UsageError(
                f"config.models and config.baselines have the folder {str(path)!r} "
                f"{times} times: give it once"
            )
    lengths = [1] * len(paths)
    while True:
        names = ["/".join(p.parts[-n:]) for p, n in zip(paths, lengths, strict=True)]
        clashing = [names.count(name) > 1 for name in names]
        if not any(clashing):
            return names
        lengths = [n + clash for n, clash in zip(lengths, clashing, strict=True)]


def _describe(name: str, folder: str, *, baseline: bool) -> SweptModel:
    path = language_models.model_folder(folder)
    model = language_models.architecture(path)
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    sequences = (tokens, tokens) if isinstance(model, T5) else (tokens,)
    shapes = jax.eval_shape(model.init, jax.random.key(0), *sequences)
    # Finds missing and truncated shards, too, while nothing has been computed yet.
    weights = set(safetensors_folder.locate(path).values())
    return SweptModel(
        name=name,
        folder=folder,
        baseline=baseline,
        config=model.config,
        params=registry.num_parameters(shapes),
        sha256=_sha256([path / language_models.CONFIG, *sorted(weights)]),
    )


def _sha256(paths: Iterable[pathlib.Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
