"""The tensors of a Hugging Face folder: one file, or shards and their index."""

import collections
import json
import pathlib

import numpy as np

from experiments.errors import RunError, UsageError, one_line

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
TORCH_WEIGHTS = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_DTYPES = ("F32", "F16", "BF16")


def locate(folder: pathlib.Path) -> dict[str, pathlib.Path]:
    """The file of every tensor in `folder`, by the tensor's name.

    Raises:
      UsageError: The folder has no safetensors weights.
      RunError: A file is missing, cut short or not what the index says.
    """
    if (folder / WEIGHTS).is_file():
        return dict.fromkeys(_names(folder / WEIGHTS), folder / WEIGHTS)
    if not (folder / INDEX).is_file():
        raise UsageError(_no_weights(folder))
    located = {}
    names_by_file = _read_index(folder)
    for file, indexed in names_by_file.items():
        path = folder / file
        if not path.is_file():
            raise RunError(
                f"{folder / INDEX} names the file {file!r}, which is missing: copy it "
                f"to {folder}"
            )
        differing = sorted(indexed ^ set(_names(path)))
        if differing:
            raise RunError(
                f"{path} and {INDEX} do not hold the same tensors ({differing[0]!r} is "
                f"in one of them alone, of {len(differing)}): copy the folder again"
            )
        located.update(dict.fromkeys(indexed, path))
    return located


def read(path: pathlib.Path, name: str) -> np.ndarray:
    """One tensor as float32.

    Raises:
      RunError: The file cannot be read, or its numbers are not floating point.
    """
    # Imported where needed: who loads no checkpoint needs no safetensors.
    import safetensors

    try:
        with safetensors.safe_open(path, framework="np") as file:
            dtype = file.get_slice(name).get_dtype()
            if dtype not in _DTYPES:
                raise RunError(
                    f"{path} holds {name!r} as {dtype}, expected one of "
                    f"{', '.join(_DTYPES)}: use a checkpoint that was saved so"
                )
            return file.get_tensor(name).astype(np.float32)
    except (safetensors.SafetensorError, OSError) as error:
        raise RunError(_broken(path, error)) from error


def write(path: pathlib.Path, tensors: dict[str, np.ndarray]) -> None:
    """Writes one safetensors file, marked so that transformers opens it."""
    from safetensors.numpy import save_file

    contiguous = {name: np.ascontiguousarray(x) for name, x in tensors.items()}
    save_file(contiguous, path, metadata={"format": "pt"})


def _names(path: pathlib.Path) -> list[str]:
    import safetensors

    try:
        with safetensors.safe_open(path, framework="np") as file:
            return list(file.keys())
    except (safetensors.SafetensorError, OSError) as error:
        raise RunError(_broken(path, error)) from error


def _read_index(folder: pathlib.Path) -> dict[str, set[str]]:
    """Names of the tensors in each file."""
    path = folder / INDEX
    names_by_file = collections.defaultdict(set)
    try:
        for name, file in json.loads(path.read_text())["weight_map"].items():
            names_by_file[pathlib.Path(file).name].add(name)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(
            f"{path} is not an index of shards ({one_line(error)}): copy it again"
        ) from error
    return names_by_file


def _broken(path: pathlib.Path, error: Exception) -> str:
    return (
        f"{path} cannot be read ({one_line(error)}): it was cut short or is no "
        "safetensors file, so copy it again"
    )


def _no_weights(folder: pathlib.Path) -> str:
    if any((folder / name).exists() for name in TORCH_WEIGHTS):
        return (
            f"{folder} has {TORCH_WEIGHTS[0]} but no {WEIGHTS}: convert it where torch "
            "and transformers are installed, with AutoModelForCausalLM.from_pretrained("
            "FOLDER).save_pretrained(NEW_FOLDER), or AutoModelForSeq2SeqLM for a T5"
        )
    shards = sorted(folder.glob("*.safetensors"))
    if shards:
        return f"{folder} has {shards[0].name} but no {INDEX}: copy that file too"
    return f"{folder} has no {WEIGHTS}: give a folder that save_pretrained wrote"
