import gzip
import struct

import numpy as np
import pytest

from experiments import data
from experiments.errors import RunError, UsageError


def idx_bytes(array: np.ndarray) -> bytes:
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    return header + array.astype(np.uint8).tobytes()


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    files = {
        "train-images-idx3-ubyte": rng.integers(0, 256, (6, 4, 5)),
        "train-labels-idx1-ubyte": np.array([0, 1, 2, 0, 1, 2]),
        "t10k-images-idx3-ubyte": rng.integers(0, 256, (3, 4, 5)),
        "t10k-labels-idx1-ubyte": np.array([2, 1, 0]),
    }
    for name, array in files.items():
        (tmp_path / name).write_bytes(idx_bytes(array))
    return tmp_path


def test_reads_images_and_labels(folder):
    raw = (folder / "train-images-idx3-ubyte").read_bytes()[16:]
    dataset = data.load(f"idx:{folder}")
    expected = np.frombuffer(raw, np.uint8).reshape(6, 4, 5, 1) / np.float32(255)
    np.testing.assert_array_equal(dataset.train_inputs_N, expected)
    assert dataset.train_inputs_N.dtype == np.float32
    assert dataset.train_labels_N.dtype == np.int32
    assert dataset.test_labels_N.tolist() == [2, 1, 0]
    assert dataset.num_classes == 3
    assert dataset.input_shape == (4, 5, 1)


def test_compressed_files_read_the_same(folder):
    plain = data.load(f"idx:{folder}")
    for path in list(folder.iterdir()):
        (folder / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    compressed = data.load(f"idx:{folder}")
    np.testing.assert_array_equal(plain.train_inputs_N, compressed.train_inputs_N)


def test_missing_folder():
    with pytest.raises(UsageError, match=r"idx:/nowhere.*no such folder"):
        data.load("idx:/nowhere")


def test_missing_file(folder):
    (folder / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(RunError, match="neither t10k-labels-idx1-ubyte nor"):
        data.load(f"idx:{folder}")


@pytest.mark.parametrize("size", [0, 3, 10, 16, 50])
def test_truncated_file(folder, size):
    path = folder / "train-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(RunError, match=r"train-images-idx3-ubyte.*replace"):
        data.load(f"idx:{folder}")


def test_surplus_bytes(folder):
    path = folder / "train-images-idx3-ubyte"
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(RunError, match="121 bytes of data, expected 120"):
        data.load(f"idx:{folder}")


def test_truncated_gzip(folder):
    path = folder / "train-labels-idx1-ubyte"
    compressed = gzip.compress(path.read_bytes())
    path.unlink()
    (folder / f"{path.name}.gz").write_bytes(compressed[:-9])
    with pytest.raises(RunError, match="truncated or damaged"):
        data.load(f"idx:{folder}")


def test_labels_in_the_place_of_images(folder):
    labels = (folder / "train-labels-idx1-ubyte").read_bytes()
    (folder / "train-images-idx3-ubyte").write_bytes(labels)
    with pytest.raises(RunError, match="starts with 00000801, expected 00000803"):
        data.load(f"idx:{folder}")


def test_lengths_that_disagree(folder):
    path = folder / "train-labels-idx1-ubyte"
    path.write_bytes(idx_bytes(np.arange(5)))
    with pytest.raises(RunError, match="6 train images but 5 labels"):
        data.load(f"idx:{folder}")


def test_empty_split(folder):
    (folder / "t10k-images-idx3-ubyte").write_bytes(idx_bytes(np.zeros((0, 4, 5))))
    (folder / "t10k-labels-idx1-ubyte").write_bytes(idx_bytes(np.zeros(0)))
    with pytest.raises(RunError, match="test split is empty"):
        data.load(f"idx:{folder}")


def test_image_shapes_that_disagree(folder):
    (folder / "t10k-images-idx3-ubyte").write_bytes(idx_bytes(np.zeros((3, 5, 4))))
    with pytest.raises(RunError, match=r"\(4, 5, 1\) and test images \(5, 4, 1\)"):
        data.load(f"idx:{folder}")
