"""What every reader of images returns."""

import dataclasses

import numpy as np

from experiments.errors import RunError


@dataclasses.dataclass(frozen=True)
class ImageDataset:
    """Labelled images, split into a training and a test set.

    The number of training examples and the number of classes are treated as public:
    they shape the model and the sampling probability.

    Attributes:
      train_images_NxHxWxC: float32 in [0, 1].
      train_labels_N: int32 in [0, num_classes).
      test_images_NxHxWxC: float32 in [0, 1].
      test_labels_N: int32 in [0, num_classes).
      num_classes: Number of classes.
    """

    train_images_NxHxWxC: np.ndarray
    train_labels_N: np.ndarray
    test_images_NxHxWxC: np.ndarray
    test_labels_N: np.ndarray
    num_classes: int

    @property
    def num_train(self) -> int:
        """Number of training examples."""
        return len(self.train_labels_N)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Height, width and channels of one image."""
        _, height, width, channels = self.train_images_NxHxWxC.shape
        return height, width, channels


def check(dataset: ImageDataset, source: str) -> ImageDataset:
    """Returns `dataset` if it is one that can be trained on.

    Raises:
      RunError: Empty splits, lengths or image shapes that disagree, or labels out of
        range.
    """
    splits = {
        "train": (dataset.train_images_NxHxWxC, dataset.train_labels_N),
        "test": (dataset.test_images_NxHxWxC, dataset.test_labels_N),
    }
    for name, (images, labels) in splits.items():
        if len(images) != len(labels):
            raise RunError(
                f"{source}: {len(images)} {name} images but {len(labels)} labels; "
                "expected one label per image: replace the files"
            )
        if images.size == 0:
            raise RunError(f"{source}: the {name} split is empty; replace the files")
        if labels.min() < 0 or labels.max() >= dataset.num_classes:
            raise RunError(
                f"{source}: {name} labels span [{labels.min()}, {labels.max()}]; "
                f"expected [0, {dataset.num_classes - 1}]: replace the files"
            )
    if splits["train"][0].shape[1:] != splits["test"][0].shape[1:]:
        raise RunError(
            f"{source}: train images are {splits['train'][0].shape[1:]} and test "
            f"images {splits['test'][0].shape[1:]}; expected one shape: replace the "
            "files"
        )
    return dataset
