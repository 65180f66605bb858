import pathlib
import shutil

import pytest

from experiments import models
from experiments.errors import RunError, UsageError
from experiments.extraction import sweep_models
from experiments.models import registry
from tests.experiments.extraction.known_windows import GOLDEN


def names(*paths):
    return sweep_models.unique_names([pathlib.Path(path) for path in paths])


def test_names_are_as_short_as_they_can_be():
    assert names("/a/gpt2") == ["gpt2"]
    assert names("/x/a/model", "/y/a/model", "/y/b/model") == [
        "x/a/model",
        "y/a/model",
        "b/model",
    ]


def test_a_folder_given_twice_under_two_names():
    relative = str(GOLDEN / "gpt_neo" / ".." / "gpt2")
    with pytest.raises(UsageError, match=r"golden/gpt2' 2 times: give it once"):
        sweep_models.describe([str(GOLDEN / "gpt2")], [relative])


def test_what_is_known_before_weights_are_loaded():
    neo, sharded = sweep_models.describe(
        [str(GOLDEN / "gpt_neo")], [str(GOLDEN / "gpt_neox_sharded")]
    )
    model, params = models.load(GOLDEN / "gpt_neo")
    assert neo.config == model.config
    assert neo.params == registry.num_parameters(params)
    assert [neo.name, sharded.name] == ["gpt_neo", "gpt_neox_sharded"]
    assert [neo.baseline, sharded.baseline] == [False, True]
    assert neo.record() == {
        "model": "gpt_neo",
        "folder": str(GOLDEN / "gpt_neo"),
        "params": neo.params,
        "baseline": False,
        "sha256": neo.sha256,
    }


def test_the_hash_is_of_all_weights(tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(GOLDEN / "gpt_neox_sharded", folder)

    def sha256():
        return sweep_models.describe([str(folder)], [])[0].sha256

    before = sha256()
    assert before == sha256()
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 1
    for shard in shards:
        whole = shard.read_bytes()
        shard.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        assert sha256() != before
        shard.write_bytes(whole)
    (folder / "expected.npz").write_bytes(b"not of the model")
    assert sha256() == before


def test_a_truncated_shard_is_found_before_anything_runs(tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(GOLDEN / "gpt_neox_sharded", folder)
    shard = max(folder.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-8])
    with pytest.raises(RunError, match=f"{shard.name} cannot be read"):
        sweep_models.describe([str(folder)], [])
    shard.unlink()
    with pytest.raises(RunError, match="missing"):
        sweep_models.describe([str(folder)], [])


def test_a_missing_folder(tmp_path):
    with pytest.raises(UsageError, match=r"'.*absent' does not exist"):
        sweep_models.describe([str(tmp_path / "absent")], [])


def test_a_run_of_train_lm_is_called_by_its_own_name(tmp_path):
    run = tmp_path / "my_run"
    shutil.copytree(GOLDEN / "gpt2", run / "model")
    (model,) = sweep_models.describe([str(run)], [])
    assert model.name == "my_run"
