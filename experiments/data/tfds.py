"""TensorFlow data sets, read without TensorFlow from prepared array_record files."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.data.image_dataset import ImageDataset, check
from experiments.errors import RunError


def load(name: str) -> ImageDataset:
    """Reads the splits `train` and `test` of the image data set `name`.

    Raises:
      RunError: The optional packages are missing, the data is not prepared and cannot
        be prepared here, or it holds something other than labelled images.
    """
    source = f"dataset='tfds:{name}'"
    try:
        import tensorflow_datasets
    except ImportError as error:
        raise RunError(
            f"{source} needs packages that are not installed ({error.name}): pip "
            "install -e '.[tfds]' reads data that is already prepared as array_record; "
            "preparing it the first time also needs TensorFlow (pip install tensorflow)"
        ) from error
    try:
        train, test = tensorflow_datasets.data_source(name, split=["train", "test"])
    except Exception as error:
        # Unknown names, missing TensorFlow and failed downloads all surface here, with
        # exception classes that differ between releases.
        raise RunError(
            f"{source} cannot be opened ({type(error).__name__}: {error}); prepare it "
            'once as array_record with TensorFlow installed: python -c "import '
            f"tensorflow_datasets as tfds; tfds.data_source('{name}')\""
        ) from error
    features = train.dataset_info.features
    if not {"image", "label"} <= set(features):
        raise RunError(
            f"{source} has the features {sorted(features)}, expected image and label: "
            "name an image classification data set such as tfds:mnist"
        )
    dataset = ImageDataset(
        *_arrays(train, source),
        *_arrays(test, source),
        num_classes=features["label"].num_classes,
    )
    return check(dataset, source)


def _arrays(
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
