import sysconfig

import numpy as np
import pytest

from experiments import data
from experiments.data import stdlib, tokenizer
from experiments.errors import RunError


@pytest.fixture(scope="module")
def dataset():
    return data.load("stdlib")


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A standard library of ten packages with five files, of distinct words."""
    for p in range(stdlib.NUM_PACKAGES):
        package = tmp_path / f"package{p}"
        package.mkdir()
        for f in range(5):
            words = " ".join(f"w {p} {f} {i}" for i in range(60 - 10 * f))
            name = "__init__.py" if f == 4 else f"module{f}.py"
            (package / name).write_text(words)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    return tmp_path


def test_real_sources(dataset):
    assert dataset.train_inputs_N.dtype == np.int32
    assert dataset.input_shape == (256,)
    assert dataset.vocabulary_size == tokenizer.VOCABULARY_SIZE
    assert dataset.num_classes == 10
    assert 1500 < dataset.num_train < 4000
    for inputs, labels in (
        (dataset.train_inputs_N, dataset.train_labels_N),
        (dataset.test_inputs_N, dataset.test_labels_N),
    ):
        assert inputs.min() > 0, "windows are full"
        share_of_classes = np.bincount(labels, minlength=10) / len(labels)
        assert share_of_classes.min() > 0.01
        assert share_of_classes.max() < 0.25


def test_loading_again_gives_the_same(dataset):
    again = data.load("stdlib")
    np.testing.assert_array_equal(again.train_inputs_N, dataset.train_inputs_N)
    np.testing.assert_array_equal(again.test_labels_N, dataset.test_labels_N)


def test_split_by_file(library):
    dataset = data.load("stdlib", sequence_length=4)
    # The middle file in size is held out: 40 windows of "w P 2 I".
    assert dataset.num_train == 10 * (60 + 50 + 30 + 20)
    assert len(dataset.test_labels_N) == 10 * 40
    two = tokenizer.encode("2")[0]
    assert np.all(dataset.test_inputs_N[:, 2] == two)
    assert not np.any(dataset.train_inputs_N[:, 2] == two)


def test_windows_hold_every_token_of_a_file_once(library):
    dataset = data.load("stdlib", sequence_length=7)
    text = (library / "package3" / "module0.py").read_text()
    ids = tokenizer.encode(text)
    of_class = dataset.train_inputs_N[dataset.train_labels_N == 3]
    expected = np.asarray(ids[: len(ids) // 7 * 7]).reshape(-1, 7)
    np.testing.assert_array_equal(of_class[: len(expected)], expected)


def test_large_packages_are_cut(library, monkeypatch):
    monkeypatch.setattr(stdlib, "MAX_TRAIN_TOKENS", 100)
    monkeypatch.setattr(stdlib, "MAX_TEST_TOKENS", 17)
    dataset = data.load("stdlib", sequence_length=4)
    assert np.bincount(dataset.train_labels_N).tolist() == [25] * 10
    assert np.bincount(dataset.test_labels_N).tolist() == [4] * 10


def test_largest_packages_without_tests(library):
    for name in ("test", "zlarge"):
        (library / name / "tests").mkdir(parents=True)
        for f in range(5):
            (library / name / f"module{f}.py").write_text("large " * 1000)
        (library / name / "tests" / "module.py").write_text("tested " * 1000)
        (library / name / "__init__.py").write_text("")
    (library / "package7" / "module0.py").write_text("small")
    dataset = data.load("stdlib", sequence_length=4)
    large, tested = tokenizer.encode("large tested")
    assert np.all(dataset.train_inputs_N[dataset.train_labels_N == 9] == large)
    assert not np.any(dataset.train_inputs_N == tested)
    seven = tokenizer.encode("7")[0]
    assert not np.any(dataset.train_inputs_N[:, 1] == seven)


def test_missing_sources(library):
    for path in (library / "package0").iterdir():
        path.unlink()
    with pytest.raises(RunError, match=r"found 9 packages .* expected 10: install"):
        data.load("stdlib")


def test_windows_too_long(library):
    with pytest.raises(RunError, match=r"no test window of 161 tokens: lower --config"):
        data.load("stdlib", sequence_length=161)
