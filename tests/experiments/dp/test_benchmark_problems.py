import jax
import numpy as np
import pytest

from experiments.dp import benchmark_problems
from experiments.dp.benchmark_cells import CellSpec

IMAGES = CellSpec("mlp:hidden_sizes=4", (8, 8, 3), 5)
TOKENS = CellSpec(
    "transformer:width=8:heads=2:feed_forward=8:vocabulary_size=16", (6,), 5
)


@pytest.mark.parametrize("cell", [IMAGES, TOKENS])
def test_the_problem_has_the_shapes_that_were_promised(cell):
    problem = benchmark_problems.make_problem(cell, noise_multiplier=2.0)
    abstract = benchmark_problems.abstract_problem(cell, noise_multiplier=2.0)
    described = jax.eval_shape(lambda: (problem.params, problem.batch))
    assert described == (abstract.params, abstract.batch)
    assert problem.batch_size == abstract.batch_size == 5
    assert problem.batch.inputs_N.shape == (5, *cell.input_shape)
    losses_B = problem.losses(problem.params, problem.batch)
    assert losses_B.shape == (5,)
    mean = problem.loss(problem.params, problem.batch)
    np.testing.assert_allclose(mean, losses_B.mean(), rtol=1e-6)
    larger = benchmark_problems.with_batch_size(problem, 7)
    assert larger.batch.inputs_N.shape == (7, *cell.input_shape)


def test_tokens_are_of_the_vocabulary_and_not_padding():
    ids_NxT = benchmark_problems.make_problem(TOKENS, 0.0).batch.inputs_N
    assert ids_NxT.dtype == np.int32
    assert ids_NxT.min() >= 1
    assert 8 < ids_NxT.max() < 16
