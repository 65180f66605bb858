import importlib
import json
import pathlib
import shutil
import sys

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from experiments.errors import RunError, UsageError
from experiments.models import safetensors_folder

SHARDED = pathlib.Path(__file__).parent / "golden" / "gpt_neox_sharded"
INDEX = safetensors_folder.INDEX
SHARD = "model-00005-of-00006.safetensors"


@pytest.fixture
def sharded(tmp_path):
    return pathlib.Path(shutil.copytree(SHARDED, tmp_path / "model"))


def test_one_file(tmp_path):
    tensors = {"a": np.arange(6, dtype=np.float32).reshape(2, 3).T, "b": np.ones(1)}
    path = tmp_path / "model.safetensors"
    safetensors_folder.write(path, {"a": tensors["a"]})
    assert safetensors_folder.locate(tmp_path) == {"a": path}
    np.testing.assert_array_equal(safetensors_folder.read(path, "a"), tensors["a"])


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_short_floats_become_float32(tmp_path, dtype):
    values = np.array([[1.5, -2.25], [3e-5, 60000.0]]).astype(dtype)
    path = tmp_path / "model.safetensors"
    save_file({"x": values}, path)
    found = safetensors_folder.read(path, "x")
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, values.astype(np.float32))


@pytest.mark.parametrize("dtype", [np.int8, np.float64])
def test_other_types(tmp_path, dtype):
    path = tmp_path / "model.safetensors"
    save_file({"x": np.ones(2, dtype)}, path)
    with pytest.raises(RunError, match=r"'x' as .*, expected one of F32, F16, BF16"):
        safetensors_folder.read(path, "x")


def test_shards(sharded):
    located = safetensors_folder.locate(sharded)
    assert len(set(located.values())) == 6
    for name, path in located.items():
        assert np.isfinite(safetensors_folder.read(path, name)).all()


def test_missing_shard(sharded):
    (sharded / "model-00002-of-00006.safetensors").unlink()
    with pytest.raises(RunError, match=r"names the file 'model-00002-of-\d+.*missing"):
        safetensors_folder.locate(sharded)


@pytest.mark.parametrize("size", [0, 5, 100, -1])
def test_truncated_shard(sharded, size):
    path = sharded / "model-00003-of-00006.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(RunError, match=r"00003-of.* cannot be read .* copy it again"):
        safetensors_folder.locate(sharded)


def test_index_and_shard_differ(sharded):
    index = json.loads((sharded / INDEX).read_text())
    name = "gpt_neox.layers.1.post_attention_layernorm.bias"
    assert index["weight_map"][name] == SHARD
    del index["weight_map"][name]
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(RunError, match=f"{SHARD} and .* do not hold.*{name}"):
        safetensors_folder.locate(sharded)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map'])
def test_broken_index(sharded, text):
    (sharded / INDEX).write_text(text)
    with pytest.raises(RunError, match="is not an index of shards"):
        safetensors_folder.locate(sharded)


def test_lost_index(sharded):
    (sharded / INDEX).unlink()
    with pytest.raises(UsageError, match=f"but no {INDEX}: copy that file too"):
        safetensors_folder.locate(sharded)


def test_torch_weights_alone(tmp_path):
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(UsageError, match=r"pytorch_model.bin but no .*save_pretrained"):
        safetensors_folder.locate(tmp_path)


def test_no_weights(tmp_path):
    with pytest.raises(UsageError, match=r"has no model.safetensors: give a folder"):
        safetensors_folder.locate(tmp_path)


def test_models_are_imported_without_safetensors(monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    importlib.reload(safetensors_folder)
