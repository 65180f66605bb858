"""The models and random batches that a benchmark measures steps on.

What a step costs depends on shapes and not on what the pictures show, so no data set is
loaded.
"""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.dp.benchmark_cells import CellSpec
from experiments.dp.benchmark_methods import Problem
from experiments.dp.steps import Data
from experiments.models import registry

PyTree = Any

# As many as MNIST and CIFAR-10 have, and as IMDB has.
NUM_CLASSES = {"image": 10, "tokens": 2}


def build_model(cell: CellSpec) -> nn.Module:
    """The model of a cell.

    Raises:
      UsageError: No such model, or it does not fit the shape.
    """
    num_classes = NUM_CLASSES[registry.input_kind(cell.model)]
    return registry.build(cell.model, cell.input_shape, num_classes)


def abstract_problem(cell: CellSpec, noise_multiplier: float) -> Problem:
    """The shapes of a problem, which are enough to compile its steps.

    Args:
      cell: The model, the shape of its inputs, and the batch size.
      noise_multiplier: Of the private steps.

    Example:
      >>> cell = CellSpec("mlp", (28, 28, 1), batch_size=32)
      >>> problem = abstract_problem(cell, noise_multiplier=1.0)
      >>> problem.batch.inputs_N.shape
      (32, 28, 28, 1)
      >>> registry.num_parameters(problem.params)
      136074
    """
    model = build_model(cell)

    def losses(params: PyTree, batch: Data) -> jax.Array:
        logits_BxV: Any = model.apply(params, batch.inputs_N)
        return optax.softmax_cross_entropy_with_integer_labels(
            logits_BxV, batch.labels_N
        )

    batch = jax.eval_shape(lambda: _random_batch(cell, 1))
    params = jax.eval_shape(model.init, jax.random.key(0), batch.inputs_N)
    abstract = Problem(losses, params, batch, 1.0, noise_multiplier)
    return with_batch_size(abstract, cell.batch_size)


def with_batch_size(problem: Problem, batch_size: int) -> Problem:
    """The shapes of the same problem with another number of examples."""
    batch = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((batch_size, *x.shape[1:]), x.dtype),
        problem.batch,
    )
    return dataclasses.replace(problem, batch=batch)


def make_problem(cell: CellSpec, noise_multiplier: float) -> Problem:
    """`abstract_problem` with its parameters and a random batch."""
    model = build_model(cell)
    batch = _random_batch(cell, cell.batch_size)
    params = jax.jit(model.init)(jax.random.key(0), batch.inputs_N[:1])
    abstract = abstract_problem(cell, noise_multiplier)
    return dataclasses.replace(abstract, params=params, batch=batch)


def _random_batch(cell: CellSpec, batch_size: int) -> Data:
    """Images in [0, 1) or token ids of the model's vocabulary, with random labels."""
    rng = np.random.default_rng(0)
    shape = (batch_size, *cell.input_shape)
    kind = registry.input_kind(cell.model)
    if kind == "image":
        inputs_N = rng.random(shape, np.float32)
    else:
        model: Any = build_model(cell)
        # 0 is padding: every example has its full length.
        inputs_N = rng.integers(1, model.vocabulary_size, shape, np.int32)
    labels_N = rng.integers(0, NUM_CLASSES[kind], batch_size, np.int32)
    return Data(jnp.asarray(inputs_N), jnp.asarray(labels_N))
