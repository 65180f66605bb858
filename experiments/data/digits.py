"""Scikit-learn's handwritten digits: the default that needs no download."""

import numpy as np
import sklearn.datasets

from experiments.data.dataset import Dataset

RUN, TEST_EVERY = 10, 5


def load() -> Dataset:
    """The 1,797 images of 8x8 pixels, 17 grey levels, ten classes.

    They come writer by writer (43 writers), the classes mostly in the cycle 0 to 9.
    Images are therefore split in runs of ten: every fifth run, counted from the first,
    is for testing (360 images), the others for training (1,437). Both halves hold all
    writers and nearly equal class counts.
    """
    data = sklearn.datasets.load_digits()
    images_NxHxWxC = (data.images[..., None] / 16.0).astype(np.float32)
    labels_N = data.target.astype(np.int32)
    is_test = np.arange(len(labels_N)) // RUN % TEST_EVERY == 0
    return Dataset(
        images_NxHxWxC[~is_test],
        labels_N[~is_test],
        images_NxHxWxC[is_test],
        labels_N[is_test],
        num_classes=10,
    )
