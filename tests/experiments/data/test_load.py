import numpy as np
import pytest

from experiments import data
from experiments.errors import UsageError


def test_digits_are_split_once_and_for_all():
    dataset = data.load("digits")
    assert dataset.train_inputs_N.shape == (1437, 8, 8, 1)
    assert dataset.test_inputs_N.shape == (360, 8, 8, 1)
    assert dataset.train_inputs_N.dtype == np.float32
    assert dataset.train_labels_N.dtype == np.int32
    assert dataset.train_inputs_N.min() == 0
    assert dataset.train_inputs_N.max() == 1
    assert dataset.test_labels_N[:10].tolist() == list(range(10))
    for labels_N in (dataset.train_labels_N, dataset.test_labels_N):
        share_of_classes = np.bincount(labels_N, minlength=10) / len(labels_N)
        assert np.all(np.abs(share_of_classes - 0.1) < 0.03)


@pytest.mark.parametrize(
    "spec", ["", "digit", "idx", "idx:", "tfds:", "mnist", "digits:"]
)
def test_unknown_spec(spec):
    with pytest.raises(
        UsageError, match=r"is unknown.*digits, stdlib, idx:DIR, tfds:NAME"
    ):
        data.load(spec)


def test_images_have_no_sequence_length():
    with pytest.raises(
        UsageError, match="sequence_length=64 is for texts, but dataset"
    ):
        data.load("digits", sequence_length=64)


def test_unknown_spec_gets_a_near_name():
    with pytest.raises(UsageError, match="did you mean 'digits'"):
        data.load("digit")
