import sys
import types

import numpy as np
import pytest

from experiments import data
from experiments.data import tokenizer
from experiments.errors import RunError


class FakeSource(list):
    def __init__(self, examples, features):
        super().__init__(examples)
        self.dataset_info = types.SimpleNamespace(features=features)


def install_fake(monkeypatch, data_source):
    module = types.ModuleType("tensorflow_datasets")
    module.data_source = data_source
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", module)


def examples(count, shape=(4, 4, 3)):
    return [
        {"image": np.full(shape, 51 * i, np.uint8), "label": np.int64(i % 2)}
        for i in range(count)
    ]


def test_reads_both_splits(monkeypatch):
    features = {"image": None, "label": types.SimpleNamespace(num_classes=2)}

    def data_source(name, split):
        assert (name, split) == ("cifar10", ["train", "test"])
        return [FakeSource(examples(4), features), FakeSource(examples(2), features)]

    install_fake(monkeypatch, data_source)
    dataset = data.load("tfds:cifar10")
    assert dataset.train_inputs_N.shape == (4, 4, 4, 3)
    assert dataset.train_inputs_N.dtype == np.float32
    np.testing.assert_allclose(dataset.train_inputs_N[1], 0.2)
    assert dataset.train_labels_N.tolist() == [0, 1, 0, 1]
    assert dataset.test_labels_N.dtype == np.int32
    assert dataset.num_classes == 2


def test_missing_package_names_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    with pytest.raises(RunError, match=r"tfds:mnist.*\.\[tfds\].*TensorFlow"):
        data.load("tfds:mnist")


def test_data_that_is_not_prepared(monkeypatch):
    def data_source(name, split):
        raise ImportError("No module named 'tensorflow'")

    install_fake(monkeypatch, data_source)
    with pytest.raises(RunError, match=r"cannot be opened.*prepare it once"):
        data.load("tfds:mnist")


def test_reads_texts(monkeypatch):
    features = {"text": None, "label": types.SimpleNamespace(num_classes=2)}
    reviews = [
        {"text": b"Not a good film", "label": np.int64(0)},
        {"text": "Caf\u00e9".encode(), "label": np.int64(1)},
    ]

    def data_source(name, split):
        return [FakeSource(reviews, features), FakeSource(reviews[:1], features)]

    install_fake(monkeypatch, data_source)
    dataset = data.load("tfds:imdb_reviews", sequence_length=3)
    expected = tokenizer.encode_all(["not a good", "caf\u00e9"], 3)
    np.testing.assert_array_equal(dataset.train_inputs_N, expected)
    assert dataset.train_inputs_N[1, 1:].tolist() == [0, 0]
    assert dataset.train_labels_N.tolist() == [0, 1]
    assert dataset.test_inputs_N.shape == (1, 3)
    assert (dataset.num_classes, dataset.vocabulary_size) == (2, 8192)


def test_data_that_are_not_labelled(monkeypatch):
    source = FakeSource([], {"text": None})
    install_fake(monkeypatch, lambda name, split: [source, source])
    with pytest.raises(RunError, match=r"\['text'\], expected label and one of"):
        data.load("tfds:imdb_reviews")


def test_images_of_different_sizes(monkeypatch):
    features = {"image": None, "label": types.SimpleNamespace(num_classes=2)}
    source = FakeSource(examples(1) + examples(1, (5, 4, 3)), features)
    install_fake(monkeypatch, lambda name, split: [source, source])
    with pytest.raises(RunError, match="different sizes"):
        data.load("tfds:imagenette")
