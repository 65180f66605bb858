"""Image data sets by SPEC: `digits`, `idx:DIR`, `tfds:NAME`."""

import difflib

from experiments.data import digits, idx, tfds
from experiments.data.image_dataset import ImageDataset
from experiments.errors import UsageError

__all__ = ["ImageDataset", "load"]

SPECS = ("digits", "idx:DIR", "tfds:NAME")


def load(spec: str) -> ImageDataset:
    """Loads the images that `spec` names.

    Args:
      spec: `digits` (scikit-learn's, no download), `idx:DIR` (a folder of files in the
        format of MNIST) or `tfds:NAME` (a TensorFlow data set, an optional extra).

    Raises:
      UsageError: No such spec, or no such folder.
      RunError: The data is there but cannot be read.

    Example:
      >>> dataset = load("digits")
      >>> dataset.train_images_NxHxWxC.shape, dataset.num_classes
      ((1437, 8, 8, 1), 10)
    """
    kind, _, argument = spec.partition(":")
    if spec == "digits":
        return digits.load()
    if kind == "idx" and argument:
        return idx.load(argument)
    if kind == "tfds" and argument:
        return tfds.load(argument)
    close = difflib.get_close_matches(spec, ["digits", "idx:", "tfds:"], n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    raise UsageError(
        f"dataset={spec!r} is unknown{hint}: expected one of {', '.join(SPECS)}"
    )
