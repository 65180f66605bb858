"""Data sets by SPEC: `digits`, `stdlib`, `idx:DIR`, `tfds:NAME`."""

import difflib

from experiments.data import digits, idx, stdlib, tfds
from experiments.data.dataset import Dataset
from experiments.errors import UsageError

__all__ = ["Dataset", "load"]

SPECS = ("digits", "stdlib", "idx:DIR", "tfds:NAME")
DEFAULT_SEQUENCE_LENGTH = 256


def load(spec: str, sequence_length: int | None = None) -> Dataset:
    """Loads the images or texts that `spec` names.

    Args:
      spec: `digits` (scikit-learn's images) or `stdlib` (Python's standard library as
        text to classify), which need no download; `idx:DIR` (a folder of files in the
        format of MNIST); or `tfds:NAME` (a TensorFlow data set of images or texts, an
        optional extra).
      sequence_length: Tokens per text, 256 by default; images have none.

    Raises:
      UsageError: No such spec, no such folder, or a sequence length for images.
      RunError: The data is there but cannot be read.

    Example:
      >>> dataset = load("digits")
      >>> dataset.train_inputs_N.shape, dataset.num_classes
      ((1437, 8, 8, 1), 10)
    """
    dataset = _load(spec, sequence_length or DEFAULT_SEQUENCE_LENGTH)
    if sequence_length is not None and dataset.vocabulary_size is None:
        raise UsageError(
            f"sequence_length={sequence_length} is for texts, but dataset={spec!r} "
            "holds images: leave --config.sequence_length out"
        )
    return dataset


def _load(spec: str, sequence_length: int) -> Dataset:
    kind, _, argument = spec.partition(":")
    if spec == "digits":
        return digits.load()
    if spec == "stdlib":
        return stdlib.load(sequence_length)
    if kind == "idx" and argument:
        return idx.load(argument)
    if kind == "tfds" and argument:
        return tfds.load(argument, sequence_length)
    close = difflib.get_close_matches(spec, ["digits", "stdlib", "idx:", "tfds:"], n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    raise UsageError(
        f"dataset={spec!r} is unknown{hint}: expected one of {', '.join(SPECS)}"
    )
