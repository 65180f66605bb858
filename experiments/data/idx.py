"""Folders of files in the format of MNIST, compressed or not.

An idx file is a big-endian header (two zero bytes, a type code, the number of
dimensions, then each dimension as uint32) and the bytes of the array in C order. See
http://yann.lecun.com/exdb/mnist/.
"""

import gzip
import math
import pathlib
import zlib

import numpy as np

from experiments.data.dataset import Dataset, check
from experiments.errors import RunError, UsageError

UNSIGNED_BYTE = 0x08


def load(folder: str) -> Dataset:
    """Reads `{train,t10k}-images-idx3-ubyte[.gz]` and `...-labels-idx1-ubyte[.gz]`.

    Raises:
      UsageError: `folder` does not exist.
      RunError: A file is missing, truncated or of another format.
    """
    path = pathlib.Path(folder).expanduser()
    if not path.is_dir():
        raise UsageError(
            f"dataset='idx:{folder}': there is no such folder; give one that holds "
            "train-images-idx3-ubyte[.gz] and its three companions (Debian: "
            "apt install dataset-fashion-mnist)"
        )
    train_labels_N = _read(path, "train-labels", 1)
    test_labels_N = _read(path, "t10k-labels", 1)
    dataset = Dataset(
        _scaled(_read(path, "train-images", 3)),
        train_labels_N.astype(np.int32),
        _scaled(_read(path, "t10k-images", 3)),
        test_labels_N.astype(np.int32),
        num_classes=int(
            max(train_labels_N.max(initial=0), test_labels_N.max(initial=0))
        )
        + 1,
    )
    return check(dataset, f"dataset='idx:{folder}'")


def _scaled(images_NxHxW: np.ndarray) -> np.ndarray:
    return images_NxHxW[..., None].astype(np.float32) / 255.0


def _read(folder: pathlib.Path, name: str, num_dims: int) -> np.ndarray:
    path = _find(folder, f"{name}-idx{num_dims}-ubyte")
    data = _contents(path)
    header_size = 4 + 4 * num_dims
    if len(data) < header_size or data[:4] != bytes([0, 0, UNSIGNED_BYTE, num_dims]):
        raise RunError(
            f"{path}: starts with {data[:4].hex() or 'nothing'}, expected "
            f"{bytes([0, 0, UNSIGNED_BYTE, num_dims]).hex()} (idx, unsigned bytes, "
            f"{num_dims} dimensions) and a full header: replace the file"
        )
    shape = tuple(int(n) for n in np.frombuffer(data, ">u4", num_dims, offset=4))
    expected = math.prod(shape)
    found = len(data) - header_size
    if found != expected:
        raise RunError(
            f"{path}: holds {found} bytes of data, expected {expected} for shape "
            f"{shape}: the file is truncated or damaged, replace it"
        )
    return np.frombuffer(data, np.uint8, offset=header_size).reshape(shape)


def _find(folder: pathlib.Path, name: str) -> pathlib.Path:
    for candidate in (folder / name, folder / f"{name}.gz"):
        if candidate.is_file():
            return candidate
    raise RunError(
        f"{folder}: holds neither {name} nor {name}.gz; expected the four files of an "
        "MNIST-format data set: add the missing one"
    )


def _contents(path: pathlib.Path) -> bytes:
    try:
        if path.suffix == ".gz":
            return gzip.decompress(path.read_bytes())
        return path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise RunError(
            f"{path}: cannot be read ({error}): the file is truncated or damaged, "
            "replace it"
        ) from error
