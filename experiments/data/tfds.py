"""TensorFlow data sets, read without TensorFlow from prepared array_record files."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.data import tokenizer
from experiments.data.dataset import Dataset, check
from experiments.errors import RunError


def load(name: str, sequence_length: int) -> Dataset:
    """Reads the splits `train` and `test` of the data set `name`.

    Args:
      name: Of a data set of labelled images (mnist, cifar10) or texts (imdb_reviews).
      sequence_length: Of each text the first so many tokens are kept; shorter ones are
        padded.

    Raises:
      RunError: The optional packages are missing, the data is not prepared and cannot
        be prepared here, or it holds something other than labelled images or texts.
    """
    source = f"dataset='tfds:{name}'"
    train, test = open_splits(name, ["train", "test"], source)
    features = train.dataset_info.features
    if {"image", "label"} <= set(features):
        arrays = (*_images(train, source), *_images(test, source))
        vocabulary_size = None
    elif {"text", "label"} <= set(features):
        arrays = (*_texts(train, sequence_length), *_texts(test, sequence_length))
        vocabulary_size = tokenizer.VOCABULARY_SIZE
    else:
        raise RunError(
            f"{source} has the features {sorted(features)}, expected label and one of "
            "image and text: name a classification data set such as tfds:mnist or "
            "tfds:imdb_reviews"
        )
    num_classes = features["label"].num_classes
    return check(Dataset(*arrays, num_classes, vocabulary_size), source)


def open_splits(name: str, splits: Sequence[str], source: str) -> Sequence[Any]:
    """Opens splits of the data set `name` for random access.

    Args:
      name: Of the data set.
      splits: Which.
      source: What the user asked for, for errors.

    Raises:
      RunError: The optional packages are missing, or the data is not prepared and
        cannot be prepared here.
    """
    try:
        import tensorflow_datasets
    except ImportError as error:
        raise RunError(
            f"{source} needs packages that are not installed ({error.name}): pip "
            "install -e '.[tfds]' reads data that is already prepared as array_record; "
            "preparing it the first time also needs TensorFlow (pip install tensorflow)"
        ) from error
    try:
        return tensorflow_datasets.data_source(name, split=splits)
    except Exception as error:
        # Unknown names, missing TensorFlow and failed downloads all surface here, with
        # exception classes that differ between releases.
        raise RunError(
            f"{source} cannot be opened ({type(error).__name__}: {error}); prepare it "
            'once as array_record with TensorFlow installed: python -c "import '
            f"tensorflow_datasets as tfds; tfds.data_source('{name}')\""
        ) from error


def _images(
    examples: Sequence[dict[str, Any]], source: str
) -> tuple[np.ndarray, np.ndarray]:
    images, labels = [], []
    for example in examples:
        images.append(example["image"])
        labels.append(example["label"])
    if len({image.shape for image in images}) > 1:
        raise RunError(
            f"{source} has images of different sizes, expected one size: name another "
            "data set"
        )
    images_NxHxWxC = np.asarray(images, np.float32) / 255.0
    return images_NxHxWxC, np.asarray(labels, np.int32)


def _texts(
    examples: Sequence[dict[str, Any]], sequence_length: int
) -> tuple[np.ndarray, np.ndarray]:
    texts, labels = [], []
    for example in examples:
        text = example["text"]
        texts.append(text if isinstance(text, str) else bytes(text).decode())
        labels.append(example["label"])
    ids_NxT = tokenizer.encode_all(texts, sequence_length)
    return ids_NxT, np.asarray(labels, np.int32)
