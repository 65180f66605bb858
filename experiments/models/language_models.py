"""Language models by name, and from and to Hugging Face folders.

A folder holds config.json, model.safetensors (or shards and their index) and, for
models trained here, tokenizer.json: what `transformers` reads and writes. Neither it
nor torch is needed.
"""

import collections
import dataclasses
import json
import os
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np

from experiments.errors import RunError, UsageError
from experiments.models import (
    checkpoint_names,
    decoder_config,
    huggingface_config,
    huggingface_t5,
    model_spec,
    safetensors_folder,
    t5_config,
)
from experiments.models.decoder import Decoder
from experiments.models.t5 import T5
from experiments.models.t5_config import T5Config

CONFIG, TOKENIZER = "config.json", "tokenizer.json"
# In a folder of experiments.extraction.train_lm.
TRAINED = "model"

_DECODERS = {
    "gpt2": decoder_config.gpt2,
    "gpt_neo": decoder_config.gpt_neo,
    "gpt_j": decoder_config.gpt_j,
    "gpt_neox": decoder_config.gpt_neox,
}
_BUILDERS: dict[str, Callable[..., Any]] = {**_DECODERS, "t5": t5_config.t5_v1_1}

Model = Decoder | T5
Params = dict[str, Any]


def build_language_model(
    spec: str, vocabulary_size: int, max_positions: int, *, eos_id: int | None = None
) -> Model:
    """The untrained model that `spec` describes.

    Args:
      spec: `NAME:OPTION=VALUE:...`; NAME is gpt2, gpt_neo, gpt_j or gpt_neox, options
        are those of the function of that name in `experiments.models.decoder_config`.
        Or NAME is t5, an encoder-decoder, with the options of
        `experiments.models.t5_config.t5_v1_1`.
      vocabulary_size: Number of token ids, to which a T5 adds those of its own: see
        `experiments.models.t5_config.for_a_corpus`.
      max_positions: Longest sequence; a T5 has no limit.
      eos_id: The token between documents, if there is one; it also starts a text. To
        a T5 it is a token like any other.

    Raises:
      UsageError: No such model or option, or sizes that do not fit each other.

    Example:
      >>> model = build_language_model("gpt2:layers=2:width=8:heads=2", 10, 6)
      >>> shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 6), int))
      >>> sum(leaf.size for leaf in jax.tree.leaves(shapes))
      1888
    """
    name, options = model_spec.parse(spec, _BUILDERS)
    if name not in _DECODERS:
        size = vocabulary_size + t5_config.NUM_OWN_TOKENS
        return T5(t5_config.for_a_corpus(t5_config.t5_v1_1(size, **options)))
    try:
        config = _DECODERS[name](vocabulary_size, max_positions, **options)
    except (ValueError, ZeroDivisionError) as error:
        raise UsageError(f"model={spec!r}: {error}; change its options") from error
    return Decoder(dataclasses.replace(config, bos_id=eos_id, eos_id=eos_id))


def model_folder(folder: str | os.PathLike[str]) -> pathlib.Path:
    """`folder`, or the model's folder in it if it is a run of `train_lm`.

    Raises:
      UsageError: There is no such folder, or it holds no model.
    """
    path = pathlib.Path(folder).expanduser()
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise UsageError(f"model folder {str(path)!r} {what}: give a folder")
    if (path / TRAINED / CONFIG).is_file():
        return path / TRAINED
    if not (path / CONFIG).is_file():
        raise UsageError(
            f"model folder {str(path)!r} has no {CONFIG}: give a Hugging Face folder, "
            "or a finished run of train_lm"
        )
    return path


def architecture(folder: str | os.PathLike[str]) -> Model:
    """The model in `folder`, without its weights; errors are those of `load`."""
    return _architecture(model_folder(folder))


def load(folder: str | os.PathLike[str]) -> tuple[Model, Params]:
    """Reads a model and its weights, as float32.

    Args:
      folder: A Hugging Face folder, or a run folder of `train_lm`.

    Returns:
      The model and what its `init` would return: `model.apply(params, tokens_BxT)` are
      logits_BxTxV; of a T5, `model.apply(params, inputs_BxS, targets_BxT)` are.

    Raises:
      UsageError: No model there, an unknown family, or a config with something that
        changes logits and is not built here.
      RunError: A broken file, or tensors that are not those of the config.
    """
    path = model_folder(folder)
    model = _architecture(path)
    config = model.config
    located = _canonical(safetensors_folder.locate(path), config, path)
    _drop_copies(located, config)
    slots = checkpoint_names.slots(config)
    _check_names(located, [slot.tensor for slot in slots], config, path)
    return model, {"params": _read_params(model, slots, located)}


def save(
    folder: str | os.PathLike[str],
    model: Model,
    params: Params,
    tokenizer_json: str | os.PathLike[str] | None = None,
) -> None:
    """Writes a folder that `load` and transformers open, whole or not at all.

    Args:
      folder: Does not exist yet, or is empty.
      model: What `load` or `build_language_model` returned.
      params: Its variables; written as float32.
      tokenizer_json: A file to copy into the folder.

    Raises:
      UsageError: There is something in `folder`.
      ValueError: The parameters are not those of the model.
    """
    path = pathlib.Path(folder).expanduser()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UsageError(f"{str(path)!r} exists: give another folder for the model")
    config = model.config
    flat = flax.traverse_util.flatten_dict(params["params"])
    shapes = {path: np.shape(parameter) for path, parameter in flat.items()}
    if shapes != _shapes(model):
        raise ValueError("params have other names or shapes than the model's own")
    tensors = {}
    for slot in checkpoint_names.slots(config):
        parameter = np.asarray(flat[slot.path], np.float32)
        shape = checkpoint_names.tensor_shape(parameter, slot, config)
        view = checkpoint_names.view(parameter, slot, config)
        tensors[slot.tensor] = view.reshape(shape)
    partial = path.with_name(f"{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    (partial / CONFIG).write_text(f"{json.dumps(_to_json(config), indent=2)}\n")
    safetensors_folder.write(partial / safetensors_folder.WEIGHTS, tensors)
    if tokenizer_json is not None:
        shutil.copyfile(tokenizer_json, partial / TOKENIZER)
    os.replace(partial, path)


def _architecture(folder: pathlib.Path) -> Model:
    path = folder / CONFIG
    values = _read_json(path)
    if values.get("model_type") == huggingface_t5.MODEL_TYPE:
        return T5(huggingface_t5.parse(values, str(path)))
    return Decoder(huggingface_config.parse(values, str(path)))


def _to_json(config: checkpoint_names.Config) -> dict[str, Any]:
    if isinstance(config, T5Config):
        return huggingface_t5.to_json(config)
    return huggingface_config.to_json(config)


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text())
    except ValueError as error:
        raise RunError(f"{path} is not JSON ({error}): copy it again") from error
    if not isinstance(values, dict):
        raise RunError(f"{path} is not a JSON object: copy it again")
    return values


def _canonical(
    located: dict[str, pathlib.Path],
    config: checkpoint_names.Config,
    folder: pathlib.Path,
) -> dict[str, tuple[pathlib.Path, str]]:
    """File and own name of every tensor that is not a buffer, by its canonical name."""
    found: dict[str, tuple[pathlib.Path, str]] = {}
    for name, path in located.items():
        canonical = checkpoint_names.canonical(name, config)
        if checkpoint_names.is_buffer(canonical):
            continue
        if canonical in found:
            raise RunError(
                f"{folder} holds {canonical!r} twice, as {found[canonical][1]!r} and "
                f"as {name!r}: remove one"
            )
        found[canonical] = (path, name)
    return found


def _drop_copies(
    located: dict[str, tuple[pathlib.Path, str]], config: checkpoint_names.Config
) -> None:
    """Takes out what is held twice, such as a tied head, once it is known to be equal.

    If nothing but the copy is there, it is taken for the tensor.
    """
    for copy, name in checkpoint_names.copies(config):
        if copy not in located:
            continue
        place = located.pop(copy)
        first = located.setdefault(name, place)
        if not np.array_equal(
            safetensors_folder.read(*place), safetensors_folder.read(*first)
        ):
            raise RunError(
                f"{place[0]} holds {copy!r}, which differs from {name!r} although "
                f"{CONFIG} ties them: copy the folder again, or set "
                "tie_word_embeddings to false there if the head is meant"
            )


def _check_names(
    located: dict[str, Any],
    expected: list[str],
    config: checkpoint_names.Config,
    folder: pathlib.Path,
) -> None:
    missing = [name for name in expected if name not in located]
    extra = sorted(located.keys() - set(expected))
    for what, names in (("lacks", missing), ("has the unexpected", extra)):
        if names:
            others = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise RunError(
                f"{folder} {what} tensor {names[0]!r}{others}, so it is not the "
                f"{config.family} of {config.num_layers} layers that its {CONFIG} "
                "describes: copy the folder again, or correct its config"
            )


def _read_params(
    model: Model,
    slots: list[checkpoint_names.Slot],
    located: dict[str, tuple[pathlib.Path, str]],
) -> Params:
    by_path = collections.defaultdict(list)
    for slot in slots:
        by_path[slot.path].append(slot)
    params = {}
    for path, shape in _shapes(model).items():
        parameter = np.empty(shape, np.float32)
        for slot in by_path[path]:
            _fill(parameter, slot, *located[slot.tensor], model.config)
        params[path] = jnp.asarray(parameter)
    return flax.traverse_util.unflatten_dict(params)


def _shapes(model: Model) -> dict[tuple[str, ...], tuple[int, ...]]:
    """Shape of every parameter, by its path below "params"."""
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    sequences = (tokens, tokens) if isinstance(model, T5) else (tokens,)
    params = jax.eval_shape(model.init, jax.random.key(0), *sequences)["params"]
    flat = flax.traverse_util.flatten_dict(params)
    return {path: leaf.shape for path, leaf in flat.items()}


def _fill(
    parameter: np.ndarray,
    slot: checkpoint_names.Slot,
    path: pathlib.Path,
    name: str,
    config: checkpoint_names.Config,
) -> None:
    tensor = safetensors_folder.read(path, name)
    expected = checkpoint_names.tensor_shape(parameter, slot, config)
    if tensor.shape != expected:
        raise RunError(
            f"{path} holds {name!r} of shape {tensor.shape}, expected {expected} from "
            f"its {CONFIG}: copy the folder again, or correct its config"
        )
    view = checkpoint_names.view(parameter, slot, config)
    view[...] = tensor.reshape(view.shape)
