import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.checkpoints import Checkpoints, Progress
from experiments.dp.steps import TrainState
from experiments.errors import RunError


def make_state(fill=0.5, size=3):
    rows = np.random.default_rng(0).normal(size=(size, 2)).astype(np.float32)
    params = {"w": jnp.asarray(rows), "b": jnp.full(2, float(fill))}
    optimizer_state = optax.adam(0.1).init(params)
    return TrainState(params, (jax.random.key(7), jnp.int32(3), optimizer_state))


@pytest.fixture
def checkpoints(tmp_path):
    return Checkpoints(tmp_path)


def progress(step):
    return Progress(step, seed=2**127 + 5, ledger='{"entries": []}')


def test_what_is_saved_comes_back(checkpoints):
    state = make_state(fill=1 / 3)
    checkpoints.save(progress(4), state)
    restored = checkpoints.restore(make_state())
    assert checkpoints.progress() == progress(4)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    for old, new in zip(jax.tree.leaves(state), jax.tree.leaves(restored), strict=True):
        assert old.dtype == new.dtype
        if jax.dtypes.issubdtype(old.dtype, jax.dtypes.prng_key):
            old, new = jax.random.key_data(old), jax.random.key_data(new)
        np.testing.assert_array_equal(old, new)
        # Else a resumed run would compile, and run, another program.
        assert new.committed == old.committed


def test_the_newest_counts_and_few_are_kept(checkpoints, tmp_path):
    for step in range(5):
        checkpoints.save(progress(step), make_state(fill=step))
    assert checkpoints.latest_step() == 4
    assert float(checkpoints.restore(make_state()).params["b"][0]) == 4
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept == ["step_2", "step_3", "step_4"]


def test_none_yet(checkpoints):
    assert checkpoints.latest_step() is None


def largest_file(folder):
    files = [path for path in folder.rglob("*") if path.is_file()]
    return max(files, key=lambda path: path.stat().st_size)


def flip_a_bit(folder):
    path = largest_file(folder / "state")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut_short(folder):
    path = largest_file(folder / "state")
    path.write_bytes(path.read_bytes()[:100])


def lose_a_file(folder):
    largest_file(folder / "state").unlink()


def add_a_file(folder):
    (folder / "state" / "more").write_text("rubbish")


def fill_with_rubbish(folder):
    for path in folder.rglob("*"):
        if path.is_file():
            path.write_text("rubbish")


def lose_the_progress(folder):
    (folder / "progress.json").unlink()


def progress_of_something_else(folder):
    (folder / "progress.json").write_text('{"weights": 1}')


def progress_is_a_list(folder):
    (folder / "progress.json").write_text("[]")


@pytest.mark.parametrize(
    "damage",
    [
        flip_a_bit,
        cut_short,
        lose_a_file,
        add_a_file,
        fill_with_rubbish,
        lose_the_progress,
        progress_of_something_else,
        progress_is_a_list,
    ],
)
def test_damage_is_one_error_with_the_way_out(checkpoints, tmp_path, damage):
    for step in (3, 6):
        checkpoints.save(progress(step), make_state(size=40))
    damage(tmp_path / "step_6")
    message = r"step_6 is damaged.*delete that folder to continue from step 3"
    for read in (
        checkpoints.progress,
        lambda: checkpoints.restore(make_state(size=40)),
    ):
        with pytest.raises(RunError, match=message) as error:
            read()
        assert "\n" not in str(error.value)


def test_the_way_out_works(checkpoints, tmp_path):
    for step in (3, 6):
        checkpoints.save(progress(step), make_state(fill=step))
    shutil.rmtree(tmp_path / "step_6")
    assert checkpoints.progress() == progress(3)
    assert float(checkpoints.restore(make_state()).params["b"][0]) == 3


def test_killed_while_saving(checkpoints, tmp_path):
    checkpoints.save(progress(3), make_state())
    (tmp_path / "step_6.partial" / "state").mkdir(parents=True)
    (tmp_path / "step_6.partial" / "state" / "half").write_text("a checkp")
    assert checkpoints.latest_step() == 3
    checkpoints.save(progress(6), make_state())
    assert checkpoints.progress() == progress(6)
    assert checkpoints.restore(make_state()).params["b"].tolist() == [0.5, 0.5]


def test_state_of_another_model(checkpoints):
    checkpoints.save(progress(1), make_state(size=3))
    with pytest.raises(RunError, match=r"of another program.*another --config\.out"):
        checkpoints.restore(make_state(size=4))
