"""The run folder of a language model: whose it is, before and after its corpus is read.

config.json      the config, and what follows from it and the corpus
corpus/          the tokens, if the corpus was given as texts
metrics.jsonl    one row per logged step
loss.png
checkpoints/
model/           at the end: a Hugging Face folder, with tokenizer.json if there is one

A corpus of texts is tokenised inside the folder, and only then is it known what
config.json says. So a folder is checked first, and claimed when the corpus is there.
"""

import dataclasses
import json
import pathlib
from typing import Any

from experiments import run_folder
from experiments.errors import UsageError
from experiments.extraction.lm_config import LmConfig

CORPUS = "corpus"
MODEL = "model"
PLOT = "loss.png"
_DERIVED = "derived"


def check(folder: pathlib.Path, config: LmConfig) -> None:
    """Makes sure that `folder` is new, or of a run with this config.

    Raises:
      UsageError: It belongs to another run or to something else.
      RunError: Its config.json is damaged.
    """
    path = folder / run_folder.CONFIG
    if path.exists():
        run_folder.claim(folder, _record(config, _derived_before(path)))
        return
    foreign = sorted(e.name for e in folder.iterdir() if not _is_ours(e.name))
    if foreign:
        raise UsageError(
            f"config.out={str(folder)!r} holds {foreign[0]!r} but no "
            f"{run_folder.CONFIG}, so it is not a run folder: give another --config.out"
        )


def claim(folder: pathlib.Path, config: LmConfig, derived: dict[str, Any]) -> None:
    """Writes config.json, or makes sure that the corpus is the one it was.

    Args:
      folder: Checked.
      config: As the user gave it.
      derived: What follows from the config and the corpus.

    Raises:
      UsageError: The run in `folder` was about another corpus.
    """
    path = folder / run_folder.CONFIG
    if not path.exists():
        text = json.dumps(_record(config, derived), indent=2) + "\n"
        run_folder.write_atomically(path, text)
        return
    before = _derived_before(path)
    differing = [k for k in derived if before.get(k) != derived[k]]
    if differing:
        key = differing[0]
        raise UsageError(
            f"config.out={str(folder)!r} holds a run with {key}={before.get(key)!r} "
            f"(now {derived[key]!r}), so config.corpus={config.corpus!r} is not what "
            "it was: give another --config.out, or the same corpus to continue that run"
        )


def _record(config: LmConfig, derived: dict[str, Any]) -> dict[str, Any]:
    record = dataclasses.asdict(config) | {_DERIVED: derived}
    del record["out"]
    return record


def _derived_before(path: pathlib.Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text())[_DERIVED])
    except (ValueError, TypeError, KeyError):
        # Not a config.json of ours: `run_folder.claim` says so.
        return {}


def _is_ours(name: str) -> bool:
    """Whether a start that got no further than the corpus may have left this."""
    stem = name.removesuffix(".partial")
    return name == run_folder.LOCK or stem in (run_folder.CONFIG, CORPUS)
