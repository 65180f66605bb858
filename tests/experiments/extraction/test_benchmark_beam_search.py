import jax
import jax.numpy as jnp
import numpy as np

from experiments import models
from experiments.extraction import beam_search, benchmark_beam_search
from experiments.extraction.benchmark_beam_search import Settings

MODEL, VOCABULARY = "gpt2:layers=1:width=8:heads=2", 11


def test_whole_caches_find_the_same_beams():
    model = models.build_language_model(MODEL, VOCABULARY, 20)
    params = model.init(jax.random.key(3), jnp.zeros((1, 1), jnp.int32))
    # Random weights hardly tell tokens apart.
    params = jax.tree.map(lambda leaf: 8 * leaf, params)
    prompts_3x4 = jax.random.randint(jax.random.key(0), (3, 4), 0, VOCABULARY)
    options = {"num_beams": 5, "num_tokens": 6}
    ours = beam_search.search(model, params, prompts_3x4, **options)
    theirs = benchmark_beam_search.search_with_whole_caches(
        model, params, prompts_3x4, **options
    )
    np.testing.assert_array_equal(ours.tokens_PxNxT, theirs.tokens_PxNxT)
    np.testing.assert_allclose(ours.scores_PxN, theirs.scores_PxN, rtol=1e-5)


def test_every_way_is_timed():
    settings = Settings(MODEL, VOCABULARY, (2,), num_beams=3, rounds=1)
    result = benchmark_beam_search.measure(settings)
    assert [cell["context"] for cell in result["cells"]] == [2]
    for cell in result["cells"]:
        assert len(cell["seconds"]) == 3
        assert min(cell["seconds"].values()) > 0
        assert cell["times_shared"][benchmark_beam_search.SHARED] == 1
