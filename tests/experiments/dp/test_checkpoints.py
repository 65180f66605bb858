import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.dp.checkpoints import Checkpoints, Progress
from experiments.dp.steps import TrainState
from experiments.errors import RunError


def make_state(fill=0.5, size=3):
    rows = np.random.default_rng(0).normal(size=(size, 2)).astype(np.float32)
    params = {"w": jnp.asarray(rows), "b": jnp.full(2, float(fill))}
    optimizer_state = optax.adam(0.1).init(params)
    return TrainState(params, (jax.random.key(7), jnp.int32(3), optimizer_state))


@pytest.fixture
def checkpoints(tmp_path):
    opened = Checkpoints(tmp_path)
    yield opened
    opened.close()


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


def fill_with_rubbish(folder):
    for path in folder.rglob("*"):
        if path.is_file():
            path.write_text("rubbish")


def replace_progress(folder):
    (folder / "progress" / "metadata").write_text('{"weights": 1}')


@pytest.mark.parametrize(
    "damage", [flip_a_bit, cut_short, fill_with_rubbish, replace_progress]
)
def test_damage_is_one_error_with_the_way_out(tmp_path, damage):
    for step in (3, 6):
        writer = Checkpoints(tmp_path)
        writer.save(progress(step), make_state(size=40, fill=0.1))
        writer.close()
    damage(tmp_path / "step_6")
    reader = Checkpoints(tmp_path)
    with pytest.raises(RunError, match=r"step_6 is .*delete that folder.* step 3") as e:
        reader.restore(make_state(size=40))
    assert "\n" not in str(e.value)
    reader.close()


def test_state_of_another_model(checkpoints):
    checkpoints.save(progress(1), make_state(size=3))
    with pytest.raises(RunError, match=r"of another program.*another --config\.out"):
        checkpoints.restore(make_state(size=4))
