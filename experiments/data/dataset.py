"""What every reader of data returns."""

import dataclasses

import numpy as np

from experiments.errors import RunError


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Labelled images or texts, split into a training and a test set.

    The number of training examples and the number of classes are treated as public:
    they shape the model and the sampling probability.

    Attributes:
      train_inputs_N: Images f32[N, H, W, C] in [0, 1], or token ids i32[N, T].
      train_labels_N: int32 in [0, num_classes).
      test_inputs_N: As `train_inputs_N`.
      test_labels_N: As `train_labels_N`.
      num_classes: Number of classes.
      vocabulary_size: Token ids lie in [0, vocabulary_size); None for images.
    """

    train_inputs_N: np.ndarray
    train_labels_N: np.ndarray
    test_inputs_N: np.ndarray
    test_labels_N: np.ndarray
    num_classes: int
    vocabulary_size: int | None = None

    @property
    def num_train(self) -> int:
        """Number of training examples."""
        return len(self.train_labels_N)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Of one example: height, width and channels, or number of tokens."""
        return self.train_inputs_N.shape[1:]


def check(dataset: Dataset, source: str) -> Dataset:
    """Returns `dataset` if it is one that can be trained on.

    Raises:
      RunError: Empty splits, lengths or shapes that disagree, or labels out of range.
    """
    what = "images" if dataset.vocabulary_size is None else "texts"
    splits = {
        "train": (dataset.train_inputs_N, dataset.train_labels_N),
        "test": (dataset.test_inputs_N, dataset.test_labels_N),
    }
    for name, (inputs, labels) in splits.items():
        if len(inputs) != len(labels):
            raise RunError(
                f"{source}: {len(inputs)} {name} {what} but {len(labels)} labels; "
                f"expected one label for each of the {what}: replace the files"
            )
        if inputs.size == 0:
            raise RunError(f"{source}: the {name} split is empty; replace the files")
        if labels.min() < 0 or labels.max() >= dataset.num_classes:
            raise RunError(
                f"{source}: {name} labels span [{labels.min()}, {labels.max()}]; "
                f"expected [0, {dataset.num_classes - 1}]: replace the files"
            )
    if splits["train"][0].shape[1:] != splits["test"][0].shape[1:]:
        raise RunError(
            f"{source}: train {what} are {splits['train'][0].shape[1:]} and test "
            f"{what} {splits['test'][0].shape[1:]}; expected one shape: replace the "
            "files"
        )
    return dataset
