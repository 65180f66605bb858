import dataclasses

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpjax
from experiments.errors import UsageError
from experiments.models import build_language_model, registry
from experiments.models.decoder import Decoder

VOCABULARY_SIZE, LENGTH = 20, 12
SIZES = "layers=2:width=16:heads=2"
# A window shorter than the sequences, so that it shows.
SPECS = {
    "gpt2": f"gpt2:{SIZES}",
    "gpt_neo": f"gpt_neo:{SIZES}:window=3",
    "gpt_j": f"gpt_j:{SIZES}:rotary_dim=4",
    "gpt_neox": f"gpt_neox:{SIZES}:rotary_dim=6",
}
# Of 12 tokens, in pieces of few sizes, since each size is compiled.
SPLITS = st.permutations([1, 1, 1, 1, 3, 5]) | st.just([1] * LENGTH)


def tokens_of(seed, batch_size=2, length=LENGTH):
    generator = np.random.default_rng(seed)
    return jnp.asarray(generator.integers(0, VOCABULARY_SIZE, (batch_size, length)))


class Compiled:
    """A model with large random weights, its methods compiled once."""

    def __init__(self, spec, random_params):
        self.model = model = build_language_model(spec, VOCABULARY_SIZE, LENGTH)
        self.params = random_params(model, tokens_of(0))
        self.logits = jax.jit(model.apply)
        self.hidden = jax.jit(lambda p, t: model.apply(p, t, method="hidden"))
        self.extend = jax.jit(lambda p, *args: model.apply(p, *args, method="extend"))


@pytest.fixture(scope="module")
def compiled(random_params):
    return {name: Compiled(spec, random_params) for name, spec in SPECS.items()}


@pytest.mark.parametrize("name", SPECS)
@hypothesis.settings(max_examples=10)
@hypothesis.given(seed=st.integers(0, 9), sizes=SPLITS)
def test_a_cache_changes_nothing(compiled, name, seed, sizes):
    """Whatever the split into prompts and single tokens, at every position."""
    run, tokens_BxT = compiled[name], tokens_of(seed)
    cache = run.model.init_cache(2, LENGTH)
    parts, start = [], 0
    for size in sizes:
        x, cache = run.extend(run.params, tokens_BxT[:, start : start + size], cache)
        parts.append(x)
        start += size
        assert int(cache.position) == start
    expected = run.hidden(run.params, tokens_BxT)
    found = jnp.concatenate(parts, axis=1)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", SPECS)
def test_prompts_are_shared(compiled, name):
    """Rows that continue two prompts, three each, are whole sequences."""
    run = compiled[name]
    prompts_PxC = tokens_of(8, batch_size=2, length=5)
    tokens_BxT = tokens_of(9, batch_size=6, length=6)
    _, prompts = run.extend(run.params, prompts_PxC, run.model.init_cache(2, 5))
    cache, parts = run.model.init_cache(6, 7), []
    for start, size in ((0, 1), (1, 1), (2, 4)):
        tokens_BxS = tokens_BxT[:, start : start + size]
        x, cache = run.extend(run.params, tokens_BxS, cache, prompts)
        parts.append(x)
    whole_BxT = jnp.concatenate(
        [jnp.repeat(prompts_PxC, 3, axis=0), tokens_BxT], axis=1
    )
    expected = run.hidden(run.params, whole_BxT)[:, 5:]
    found = jnp.concatenate(parts, axis=1)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_prompts_that_do_not_fit(compiled):
    run = compiled["gpt_neo"]
    token_Bx1 = tokens_of(0, batch_size=4, length=1)
    prompts = run.model.init_cache(2, 5)
    _, prompts = run.extend(run.params, tokens_of(0, length=3), prompts)
    x, _ = run.extend(run.params, token_Bx1, run.model.init_cache(4, 7), prompts)
    assert np.isnan(x).all(), "two of the keys are not there yet"
    _, prompts = run.extend(run.params, tokens_of(0, length=2), prompts)
    x, cache = run.extend(run.params, token_Bx1, run.model.init_cache(4, 7), prompts)
    assert np.isfinite(x).all()
    x, _ = run.extend(run.params, token_Bx1, cache._replace(position=7), prompts)
    assert np.isnan(x).all(), "the cache was full"
    message = f"13 tokens of prompt and cache, expected at most {LENGTH}"
    with pytest.raises(UsageError, match=message):
        run.extend(run.params, token_Bx1, run.model.init_cache(4, 8), prompts)


@pytest.mark.parametrize("name", SPECS)
def test_logits_are_the_head_of_hidden(compiled, name):
    run = compiled[name]
    tokens_BxT = tokens_of(1)
    logits_BxTxV = run.logits(run.params, tokens_BxT)
    assert logits_BxTxV.shape == (2, LENGTH, VOCABULARY_SIZE)
    assert logits_BxTxV.dtype == jnp.float32
    x_BxTxD = run.hidden(run.params, tokens_BxT)
    assert x_BxTxD.shape == (2, LENGTH, 16)
    found = run.model.apply(run.params, x_BxTxD[:, -3:], method="logits")
    np.testing.assert_allclose(found, logits_BxTxV[:, -3:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", SPECS)
def test_what_reaches_which_position(compiled, name):
    """A token changes itself and later ones, no earlier one and no other sequence."""
    run = compiled[name]
    tokens_BxT = tokens_of(2)
    changed_BxT = tokens_BxT.at[0, 4].set((tokens_BxT[0, 4] + 1) % VOCABULARY_SIZE)
    before, after = (run.logits(run.params, t) for t in (tokens_BxT, changed_BxT))
    reached_BxT = np.abs(np.asarray(before - after)).max(axis=-1) > 1e-4
    # In GPT-Neo too: its global layer carries what its local layer drops.
    np.testing.assert_array_equal(reached_BxT[0], np.arange(LENGTH) >= 4)
    assert not reached_BxT[1].any()


def test_a_local_layer_forgets(random_params):
    """Two layers that each see 3 tokens see 5 together."""
    model = build_language_model(SPECS["gpt_neo"], VOCABULARY_SIZE, LENGTH)
    model = Decoder(dataclasses.replace(model.config, windows=(3, 3)))
    tokens_BxT = tokens_of(3)
    params = random_params(model, tokens_BxT)
    changed_BxT = tokens_BxT.at[0, 2].set((tokens_BxT[0, 2] + 1) % VOCABULARY_SIZE)
    before, after = (jax.jit(model.apply)(params, t) for t in (tokens_BxT, changed_BxT))
    reached_T = np.abs(np.asarray(before - after)).max(axis=-1)[0] > 1e-4
    np.testing.assert_array_equal(np.flatnonzero(reached_T), [2, 3, 4, 5, 6])


@pytest.mark.parametrize("name", SPECS)
def test_examples_do_not_mix(compiled, name):
    run = compiled[name]
    tokens_BxT = tokens_of(4, batch_size=2)
    together = run.logits(run.params, tokens_BxT)
    swapped = run.logits(run.params, tokens_BxT[::-1])
    np.testing.assert_allclose(swapped[::-1], together, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", SPECS)
def test_more_tokens_than_positions(compiled, name):
    run = compiled[name]
    message = f"{LENGTH + 1} tokens.*, expected at most {LENGTH}"
    too_many = tokens_of(0, length=LENGTH + 1)
    for call in (run.logits, run.hidden):
        with pytest.raises(UsageError, match=message):
            call(run.params, too_many)
    with pytest.raises(UsageError, match=message):
        run.model.init_cache(2, LENGTH + 1)
    with pytest.raises(UsageError, match="13 tokens in a cache, expected at most 5"):
        run.extend(run.params, too_many, run.model.init_cache(2, 5))


@pytest.mark.parametrize("name", SPECS)
def test_tokens_beyond_the_cache_are_nan(compiled, name):
    """Where the position is traced, nothing can raise."""
    run = compiled[name]
    tokens_BxT = tokens_of(5)
    cache = run.model.init_cache(2, 9)
    x, cache = run.extend(run.params, tokens_BxT[:, :8], cache)
    assert np.isfinite(x).all()
    x, cache = run.extend(run.params, tokens_BxT[:, :1], cache)
    assert np.isfinite(x).all()
    x, cache = run.extend(run.params, tokens_BxT[:, :1], cache)
    assert np.isnan(x).all()


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("wrong", [VOCABULARY_SIZE, 2**31 - 1, -1])
def test_ids_outside_the_vocabulary_are_nan(compiled, name, wrong):
    run = compiled[name]
    logits = run.logits(run.params, tokens_of(6).at[0, 3].set(wrong))
    assert np.isnan(logits[0]).all()
    assert np.isfinite(logits[1]).all()


@pytest.mark.parametrize("name", ["gpt2", "gpt_j"])
def test_initial_weights(name):
    model = build_language_model(f"{name}:layers=2:width=64:heads=4", 500, 64)
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))
    assert params.keys() == {"params"}
    for path, leaf in jax.tree.leaves_with_path(params):
        key = jax.tree_util.keystr(path)
        if "scale" in key or "bias" in key:
            np.testing.assert_array_equal(leaf, 1.0 if "scale" in key else 0.0)
            continue
        is_residual = "['output']" in key or "mlp_output" in key
        expected = 0.01 if is_residual else 0.02
        assert float(jnp.std(leaf)) == pytest.approx(expected, rel=0.05), key


def test_a_tied_head_counts_once():
    tokens_BxT = jax.ShapeDtypeStruct((1, 4), jnp.int32)
    for spec, head in (("gpt2", 0), ("gpt_neox", 500 * 8)):
        model = build_language_model(f"{spec}:layers=1:width=8:heads=1", 500, 4)
        params = jax.eval_shape(model.init, jax.random.key(0), tokens_BxT)["params"]
        others = {k: v for k, v in params.items() if k not in ("embedding", "head")}
        expected = 500 * 8 + head + registry.num_parameters(others)
        assert registry.num_parameters(params) == expected


def test_published_sizes():
    """The tables of the models' papers and folders, to the last parameter."""
    for spec, vocabulary_size, positions, expected in (
        ("gpt2", 50_257, 1024, 124_439_808),
        ("gpt_neo", 50_257, 2048, 125_198_592),
        ("gpt_j:layers=28:width=4096:heads=16", 50_400, 2048, 6_050_882_784),
        ("gpt_neox:layers=6:width=512:heads=8", 50_304, 2048, 70_426_624),
    ):
        model = build_language_model(spec, vocabulary_size, positions)
        tokens_BxT = jax.ShapeDtypeStruct((1, 4), jnp.int32)
        params = jax.eval_shape(model.init, jax.random.key(0), tokens_BxT)
        assert registry.num_parameters(params) == expected, spec


def test_clipped_gradients(random_params, float64_reference, assert_clipped_sum):
    """The loss of a language model trains privately, with no parameter left over."""
    model = build_language_model("gpt2:layers=1:width=8:heads=2", 20, LENGTH)
    tokens_BxT = tokens_of(7, batch_size=3, length=6)
    params = random_params(model, tokens_BxT)

    def loss(params, tokens_BxT):
        logits_BxTxV = model.apply(params, tokens_BxT[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(
            logits_BxTxV, tokens_BxT[:, 1:]
        ).mean()

    reference = float64_reference(loss, params, (np.asarray(tokens_BxT),))
    clipped_sum, aux = jax.jit(
        dpjax.clipped_grad(
            loss, l2_clip_norm=reference.clip_norm, return_grad_norms=True, strict=True
        )
    )(params, tokens_BxT)
    np.testing.assert_allclose(aux.grad_norms, reference.norms_B, rtol=1e-5)
    assert_clipped_sum(clipped_sum, reference, 1e-5)
