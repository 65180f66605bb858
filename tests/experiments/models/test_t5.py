import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import models
from experiments.models import registry
from experiments.models.t5 import T5
from experiments.models.t5_config import T5Config, t5_v1_1

GOLDEN = pathlib.Path(__file__).parent / "golden"
NAMES = ["t5_v1_1", "t5_first"]
# More decoder layers than encoder layers, and heads that do not fill the width.
CONFIG = dataclasses.replace(
    t5_v1_1(20, layers=1, width=16, heads=2, head_dim=6, feed_forward=24),
    num_decoder_layers=2,
    num_buckets=8,
    max_distance=10,
)
CONFIGS = {
    "v1_1": CONFIG,
    "first": dataclasses.replace(CONFIG, activation="relu", tied_head=True),
}


def tokens_of(seed, length, batch_size=2):
    generator = np.random.default_rng(seed)
    return jnp.asarray(generator.integers(0, 20, (batch_size, length)), jnp.int32)


def params_of(config):
    """Random weights, large enough that all that is read shows in the logits."""
    model = T5(config)
    shapes = jax.eval_shape(
        model.init, jax.random.key(0), tokens_of(0, 1), tokens_of(0, 1)
    )
    rng = np.random.default_rng(0)

    def leaf(path, x):
        if x.ndim == 1:
            return (1 + 0.1 * rng.normal(size=x.shape)).astype(np.float32)
        is_table = "embedding" in jax.tree_util.keystr(path)
        scale = 1.0 if is_table else x.shape[0] ** -0.5
        return (scale * rng.normal(size=x.shape)).astype(np.float32)

    return jax.tree.map_with_path(leaf, shapes)


class Compiled:
    """A model with random weights and its compiled logits, with and without a mask."""

    def __init__(self, config):
        self.model, self.params = T5(config), params_of(config)
        self._apply = jax.jit(self.model.apply)

    def logits(self, *arrays):
        return np.asarray(self._apply(self.params, *arrays))


@pytest.fixture(scope="module")
def compiled():
    return {name: Compiled(config) for name, config in CONFIGS.items()}


@pytest.mark.parametrize("name", NAMES)
def test_logits_of_the_reference(name):
    """On more positions than the buckets tell apart, with and without a mask."""
    model, params = models.load(GOLDEN / name)
    expected = np.load(GOLDEN / name / "expected.npz")
    apply = jax.jit(model.apply)
    assert expected["inputs"].shape == (2, 200)
    assert expected["tokens"].shape == (2, 180)
    assert model.config.max_distance < 150
    logits_BxTxV = apply(params, expected["inputs"], expected["tokens"])
    assert logits_BxTxV.shape == (2, 180, 128)
    assert logits_BxTxV.dtype == jnp.float32
    masked_BxTxV = apply(
        params, expected["inputs"], expected["tokens"], expected["mask"]
    )
    for found, key in ((logits_BxTxV, "logits"), (masked_BxTxV, "masked_logits")):
        np.testing.assert_allclose(
            np.asarray(found)[:, expected["positions"]], expected[key], 0, 1e-4
        )
    difference_BxP = np.abs(expected["logits"] - expected["masked_logits"]).max(-1)
    assert difference_BxP.min() > 0.01


def test_families():
    first, v1_1 = (models.load(GOLDEN / name)[0].config for name in NAMES[::-1])
    assert (first.activation, first.tied_head) == ("relu", True)
    assert (v1_1.activation, v1_1.tied_head) == ("gated_gelu", False)
    assert (v1_1.num_layers, v1_1.num_decoder_layers) == (2, 3)
    assert {first.family, v1_1.family} == {"t5"}


@pytest.mark.parametrize("name", NAMES)
def test_params_are_those_of_init(name):
    model, params = models.load(GOLDEN / name)
    expected = jax.eval_shape(
        model.init, jax.random.key(0), tokens_of(0, 3), tokens_of(0, 2)
    )
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), params)
    assert shapes == jax.tree.map(lambda x: (x.shape, x.dtype), expected)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize("name", CONFIGS)
def test_what_reaches_which_target(compiled, name):
    """All inputs reach all targets, a target reaches later ones alone."""
    run = compiled[name]
    inputs_BxS, targets_BxT = tokens_of(1, 9), tokens_of(2, 7)
    before = run.logits(inputs_BxS, targets_BxT)
    changed = inputs_BxS.at[0, -1].set((inputs_BxS[0, -1] + 1) % 20)
    reached_BxT = np.abs(run.logits(changed, targets_BxT) - before).max(-1) > 1e-4
    assert reached_BxT[0].all()
    assert not reached_BxT[1].any()
    changed = targets_BxT.at[0, 3].set((targets_BxT[0, 3] + 1) % 20)
    reached_BxT = np.abs(run.logits(inputs_BxS, changed) - before).max(-1) > 1e-4
    np.testing.assert_array_equal(reached_BxT[0], np.arange(7) > 3)
    assert not reached_BxT[1].any()


@pytest.mark.parametrize("name", CONFIGS)
def test_the_start_token_is_read_first(compiled, name):
    """The first logits are those of any targets, and of no other start token."""
    run = compiled[name]
    inputs_BxS = tokens_of(1, 9)
    first, other = (run.logits(inputs_BxS, tokens_of(s, 7))[:, 0] for s in (2, 3))
    np.testing.assert_allclose(first, other, rtol=0, atol=1e-5)
    model = T5(dataclasses.replace(run.model.config, start_id=5))
    moved = jax.jit(model.apply)(run.params, inputs_BxS, tokens_of(2, 7))[:, 0]
    assert np.abs(moved - first).max() > 1e-2


@pytest.mark.parametrize("name", CONFIGS)
def test_masked_inputs_do_not_show(compiled, name):
    """Whatever they are: logits are those of the inputs alone."""
    run = compiled[name]
    inputs_BxS, targets_BxT = tokens_of(1, 9), tokens_of(2, 7)
    expected = run.logits(inputs_BxS[:, :6], targets_BxT)
    mask_BxS = jnp.arange(9)[None] < jnp.array([[6], [6]])
    for seed in (3, 4):
        filled = jnp.where(mask_BxS, inputs_BxS, tokens_of(seed, 9))
        found = run.logits(filled, targets_BxT, mask_BxS)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    longer = jnp.concatenate([targets_BxT[:, :4], tokens_of(5, 3)], axis=1)
    np.testing.assert_allclose(
        run.logits(filled, longer, mask_BxS)[:, :4], expected[:, :4], 1e-5, 1e-5
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_padding_ids_are_ordinary_tokens(compiled, name):
    """No mask is inferred from ids."""
    run = compiled[name]
    inputs_BxS = tokens_of(1, 9).at[:, -2:].set(run.model.config.pad_id)
    targets_BxT = tokens_of(2, 7)
    mask_BxS = inputs_BxS != run.model.config.pad_id
    all_seen = run.logits(inputs_BxS, targets_BxT)
    assert np.abs(run.logits(inputs_BxS, targets_BxT, mask_BxS) - all_seen).max() > 0.01
    np.testing.assert_allclose(
        run.logits(inputs_BxS, targets_BxT, jnp.ones_like(mask_BxS)), all_seen, 0, 1e-5
    )


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("wrong", [20, -1])
def test_ids_outside_the_vocabulary_are_nan(compiled, name, wrong):
    run = compiled[name]
    inputs_BxS, targets_BxT = tokens_of(1, 9), tokens_of(2, 7)
    logits = run.logits(inputs_BxS.at[0, 3].set(wrong), targets_BxT)
    assert np.isnan(logits[0]).all()
    assert np.isfinite(logits[1]).all()
    logits = run.logits(inputs_BxS, targets_BxT.at[1, 3].set(wrong))
    assert np.isfinite(logits[0]).all()
    assert np.isnan(logits[1]).all()


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_the_head_of_hidden(compiled, name):
    run = compiled[name]
    arrays = tokens_of(1, 9), tokens_of(2, 7)
    hidden = jax.jit(functools.partial(run.model.apply, method="hidden"))
    x_BxTxD = hidden(run.params, *arrays)
    assert x_BxTxD.shape == (2, 7, 16)
    found = run.model.apply(run.params, x_BxTxD[:, -2:], method="logits")
    np.testing.assert_allclose(found, run.logits(*arrays)[:, -2:], 1e-4, 1e-4)


def test_published_sizes():
    """The parameter counts of the published checkpoints, to the last one."""
    first = T5Config(32_128, 6, 6, 512, 8, 64, 2048, "relu", tied_head=True)
    small = {"layers": 8, "width": 512, "heads": 6, "feed_forward": 1024}
    for config, expected in (
        (t5_v1_1(32_128, **small), 76_961_152),
        (first, 60_506_624),
    ):
        shapes = jax.eval_shape(
            T5(config).init, jax.random.key(0), tokens_of(0, 2), tokens_of(0, 2)
        )
        assert registry.num_parameters(shapes) == expected


def test_first_logits_are_of_moderate_size():
    model = T5(t5_v1_1(100, layers=1, width=32, heads=2, head_dim=16, feed_forward=64))
    arrays = tokens_of(1, 9), tokens_of(2, 7)
    logits, params = jax.jit(model.init_with_output)(jax.random.key(0), *arrays)
    assert params.keys() == {"params"}
    assert 0.3 < float(jnp.std(logits)) < 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_buckets": 3}, "3 position buckets, expected 4 or more"),
        ({"max_distance": 4}, "from distance 4 on, expected more than half of the 8"),
        ({"eos_id": 20}, "eos_id=20 is not one of the 20 tokens"),
        ({"start_id": -1}, "start_id=-1 is not one"),
    ],
)
def test_sizes_that_do_not_fit(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **changes)
