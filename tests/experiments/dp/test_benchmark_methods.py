"""Every method against gradients in float64, clipped by hand."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.dp import benchmark_methods, benchmark_problems, measuring
from experiments.dp.benchmark_cells import CellSpec
from experiments.dp.benchmark_methods import METHODS
from experiments.dp.steps import Data

CLIPPING = [name for name, method in METHODS.items() if method.clipped_sum]

pytestmark = [
    pytest.mark.usefixtures("compiled_once", "compiled_cheaply"),
    # By jax_privacy.
    pytest.mark.filterwarnings("ignore:optax.global_norm is deprecated"),
]


@pytest.fixture(scope="module")
def problem():
    cell = CellSpec("mlp:hidden_sizes=4", (8, 8, 1), 4)
    problem = benchmark_problems.make_problem(cell, noise_multiplier=0.0)
    l2_clip_norm, _ = measuring.reference(problem)
    return dataclasses.replace(problem, l2_clip_norm=l2_clip_norm)


@pytest.fixture(scope="module")
def expected(problem):
    """The sum of clipped gradients, in float64."""
    with jax.enable_x64(True):
        params, batch = jax.tree.map(
            lambda x: jnp.asarray(
                x, jnp.float64 if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype
            ),
            (problem.params, problem.batch),
        )
        grad_fn = jax.jit(jax.grad(problem.loss))
        total, num_clipped = jax.tree.map(np.zeros_like, params), 0
        for i in range(problem.batch_size):
            one = jax.tree.map(lambda x, i=i: x[i : i + 1], batch)
            grad = grad_fn(params, Data(*one))
            norm = float(optax.tree.norm(grad))
            num_clipped += norm > problem.l2_clip_norm
            scale = min(1.0, problem.l2_clip_norm / norm)
            total = jax.tree.map(
                lambda t, g, s=scale: t + s * np.asarray(g), total, grad
            )
    assert num_clipped == problem.batch_size // 2, "the clip norm should split them"
    return total


@pytest.mark.parametrize("name", CLIPPING)
def test_methods_clip_alike(name, problem, expected):
    found = measuring.clipped_gradient(name, problem)
    assert measuring.relative_error(found, expected) < 1e-5


@pytest.mark.parametrize("name", ["bookkeeping_quarters", "reweight_quarters"])
@pytest.mark.parametrize("batch_size", [1, 3, 5])
def test_quarters_of_batches_that_four_does_not_divide(name, batch_size):
    cell = CellSpec("mlp:hidden_sizes=4", (8, 8, 1), batch_size)
    problem = benchmark_problems.make_problem(cell, noise_multiplier=0.0)
    l2_clip_norm, expected = measuring.reference(problem)
    problem = dataclasses.replace(problem, l2_clip_norm=l2_clip_norm)
    found = measuring.clipped_gradient(name, problem)
    assert measuring.relative_error(found, expected) < 1e-5


def test_quarters_hold_the_activations_of_a_quarter():
    """And a larger batch takes no less memory, divisible or not, but for some bytes."""
    cell = CellSpec("cnn:channels=3-4:hidden_size=8", (16, 16, 1), 64)
    problem = benchmark_problems.abstract_problem(cell, noise_multiplier=0.0)

    def temp_bytes(name, batch_size):
        resized = benchmark_problems.with_batch_size(problem, batch_size)
        return measuring.compile_program(METHODS[name].step(resized)).temp_bytes

    whole = temp_bytes("bookkeeping", 64)
    assert temp_bytes("bookkeeping_quarters", 64) < whole / 2
    sizes = [temp_bytes("bookkeeping_quarters", n) for n in (60, 61, 64, 67)]
    assert all(b > 0.99 * a for a, b in itertools.pairwise(sizes))


@pytest.mark.parametrize("name", ["auto", "multi_loss", "one_by_one_loop"])
def test_a_step_moves_by_the_clipped_mean(name, problem, expected, monkeypatch):
    mean = jax.tree.map(lambda total: total / problem.batch_size, expected)
    check_move(name, problem, mean, monkeypatch)


@pytest.mark.parametrize("name", ["nonprivate", "noise_only"])
def test_a_step_without_clipping_moves_by_the_mean(name, problem, monkeypatch):
    gradient = jax.grad(problem.loss)(problem.params, problem.batch)
    check_move(name, problem, gradient, monkeypatch)


def check_move(name, problem, gradient, monkeypatch):
    monkeypatch.setattr(benchmark_methods, "LEARNING_RATE", 1.0)
    program = METHODS[name].step(problem)
    step = program.assemble(measuring.compile_program(program).parts)
    before = jax.tree.map(np.asarray, problem.params)
    after = step(program.init(problem.params)).params
    moved = jax.tree.map(lambda b, a: b - np.asarray(a), before, after)
    leaves = (jax.tree.leaves(moved), jax.tree.leaves(gradient))
    for found, wanted in zip(*leaves, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)


def test_shapes_are_enough_to_compile(problem):
    shapes = benchmark_problems.with_batch_size(problem, 8)
    shapes = dataclasses.replace(shapes, params=jax.eval_shape(lambda: problem.params))
    small, large = (
        measuring.compile_program(METHODS["multi_loss"].step(p)).total_bytes
        for p in (problem, shapes)
    )
    # Four more gradients.
    num_parameters = sum(leaf.size for leaf in jax.tree.leaves(problem.params))
    assert large - small >= 4 * 4 * num_parameters
