"""The training steps that the benchmark compares.

Each is one update of plain SGD on the same batch. The non-private one takes the mean
gradient; the private ones take a sum of clipped gradients, which `dpjax.privatize`
turns into a noisy mean, and differ in where that sum comes from.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import jax_privacy
import numpy as np
import optax

import dpjax
from dpjax import clipping
from experiments.dp.steps import Data, TrainState
from experiments.models import registry

PyTree = Any
Loss = Callable[[PyTree, Data], jax.Array]
ClippedSum = Callable[[PyTree, Data], PyTree]

NON_PRIVATE = "nonprivate"
NUM_CLASSES = 10
# So small that what a step meets does not change while it is timed.
LEARNING_RATE = 1e-4


@dataclasses.dataclass(frozen=True)
class Problem:
    """What every method computes.

    Attributes:
      loss: Mean cross-entropy in nats of a batch.
      params: The parameters.
      batch: The examples.
      l2_clip_norm: The median of the gradients' norms, so that half are clipped.
      noise_multiplier: Of the private steps; 0 leaves the noise out.
    """

    loss: Loss
    params: PyTree
    batch: Data
    l2_clip_norm: float
    noise_multiplier: float

    @property
    def batch_size(self) -> int:
        """Number of examples."""
        return len(self.batch.labels_N)


@dataclasses.dataclass(frozen=True)
class Part:
    """A function that is compiled as a whole, and arguments like those of the step.

    `fun` is a `jax.jit` of its own, so compiling it finds nothing in JAX's caches.
    """

    fun: Any
    args: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Program:
    """A step before compilation.

    Attributes:
      parts: What is compiled, by name.
      init: Makes the first state, with buffers of its own.
      assemble: Makes the step from the compiled parts; it donates the state.
    """

    parts: Mapping[str, Part]
    init: Callable[[], TrainState]
    assemble: Callable[
        [Mapping[str, Callable[..., Any]]], Callable[[TrainState], TrainState]
    ]


@dataclasses.dataclass(frozen=True)
class Method:
    """One of the steps that are compared.

    Attributes:
      program: Makes the step.
      clipped_sum: Makes the step's function from parameters and batch to the sum of
        clipped gradients; None for a step that clips nothing.
    """

    program: Callable[[Problem], Program]
    clipped_sum: Callable[[Loss, float], ClippedSum] | None


def make_problem(model: nn.Module, batch: Data, noise_multiplier: float) -> Problem:
    """Puts a problem together from a classifier and labelled images."""

    def loss(params: PyTree, batch: Data) -> jax.Array:
        logits_BxV: Any = model.apply(params, batch.inputs_N)
        return optax.softmax_cross_entropy_with_integer_labels(
            logits_BxV, batch.labels_N
        ).mean()

    params = jax.jit(model.init)(jax.random.key(0), batch.inputs_N[:1])

    @jax.jit
    def grad_norms(params: PyTree, batch: Data) -> jax.Array:
        def grad_norm(i: jax.Array) -> jax.Array:
            return optax.tree.norm(jax.grad(loss)(params, _example(batch, i)))

        return jax.lax.map(grad_norm, jnp.arange(len(batch.labels_N)))

    norms_B = np.asarray(grad_norms(params, batch))
    l2_clip_norm = float(np.median(norms_B))
    return Problem(loss, params, batch, l2_clip_norm, noise_multiplier)


def random_batch(image_shape: tuple[int, ...], batch_size: int) -> Data:
    """Random images in [0, 1) with random labels; a step's time depends on neither."""
    rng = np.random.default_rng(0)
    images_NxHxWxC = rng.random((batch_size, *image_shape), np.float32)
    labels_N = rng.integers(0, NUM_CLASSES, batch_size, np.int32)
    return Data(jnp.asarray(images_NxHxWxC), jnp.asarray(labels_N))


def build_model(name: str, image_shape: tuple[int, ...]) -> nn.Module:
    """The classifier called `name`; raises `UsageError` as `registry.build` does."""
    return registry.build(name, image_shape, NUM_CLASSES)


def _non_private_program(problem: Problem) -> Program:
    """The ordinary training step."""
    optimizer = optax.sgd(LEARNING_RATE)

    def step(state: TrainState, batch: Data) -> TrainState:
        return _updated(optimizer, state, jax.grad(problem.loss)(state.params, batch))

    return _whole_step(problem, optimizer, step)


def clipped_sum_one_by_one(loss: Loss, l2_clip_norm: float) -> ClippedSum:
    """One example after another inside one compiled function.

    It is also what the other methods are checked against, since it shares no code with
    them. The sum is carried along: `jax.lax.map` would keep all gradients to the end.
    """
    add = _add_clipped(loss, l2_clip_norm)

    def clipped_sum(params: PyTree, batch: Data) -> PyTree:
        def body(total: PyTree, i: jax.Array) -> tuple[PyTree, None]:
            return add(total, params, batch, i), None

        zeros = jax.tree.map(jnp.zeros_like, params)
        return jax.lax.scan(body, zeros, jnp.arange(len(batch.labels_N)))[0]

    return clipped_sum


def _add_clipped(loss: Loss, l2_clip_norm: float) -> Callable[..., PyTree]:
    def add(total: PyTree, params: PyTree, batch: Data, i: jax.Array) -> PyTree:
        gradient = jax.grad(loss)(params, _example(batch, i))
        norm = optax.tree.norm(gradient)
        factor = jnp.where(norm > l2_clip_norm, l2_clip_norm / norm, 1.0)
        return jax.tree.map(lambda t, g: t + factor * g, total, gradient)

    return add


def _clipped_sum_by_dpjax(
    method: clipping.Method, loss: Loss, l2_clip_norm: float
) -> ClippedSum:
    return dpjax.clipped_grad(loss, l2_clip_norm=l2_clip_norm, method=method)


def _clipped_sum_by_jax_privacy(loss: Loss, l2_clip_norm: float) -> ClippedSum:
    return jax_privacy.clipped_grad(loss, l2_clip_norm=l2_clip_norm)


def _clipped_sum_by_loop(loss: Loss, l2_clip_norm: float) -> ClippedSum:
    add = jax.jit(_add_clipped(loss, l2_clip_norm), donate_argnums=0)
    zeros_like = jax.jit(_zeros_like)
    return lambda params, batch: _loop(zeros_like, add, params, batch)


def _zeros_like(params: PyTree) -> PyTree:
    return jax.tree.map(jnp.zeros_like, params)


def _loop(
    zeros_like: Callable[..., PyTree],
    add: Callable[..., PyTree],
    params: PyTree,
    batch: Data,
) -> PyTree:
    total = zeros_like(params)
    for i in range(len(batch.labels_N)):
        total = add(total, params, batch, np.int32(i))
    return total


def _loop_program(problem: Problem) -> Program:
    """The nxBP of Lee & Kifer 2021: B calls of a compiled function, and the update."""
    optimizer = _private_optimizer(problem)
    add = _add_clipped(problem.loss, problem.l2_clip_norm)

    def update(state: TrainState, total: PyTree) -> TrainState:
        return _updated(optimizer, state, total)

    params, batch = problem.params, problem.batch
    init = _init(problem, optimizer)
    parts = {
        # A function of its own, like the others.
        "zeros_like": Part(jax.jit(lambda params: _zeros_like(params)), (params,)),
        "add": Part(
            jax.jit(add, donate_argnums=0), (params, params, batch, np.int32(0))
        ),
        "update": Part(
            jax.jit(update, donate_argnums=0), (jax.eval_shape(init), params)
        ),
    }

    def assemble(
        parts: Mapping[str, Callable[..., Any]],
    ) -> Callable[[TrainState], TrainState]:
        def step(state: TrainState) -> TrainState:
            total = _loop(parts["zeros_like"], parts["add"], state.params, batch)
            return parts["update"](state, total)

        return step

    return Program(parts, init, assemble)


def _noise_only_program(problem: Problem) -> Program:
    """The ordinary gradient, with noise: what the noise alone costs."""
    optimizer = _private_optimizer(problem)

    def step(state: TrainState, batch: Data) -> TrainState:
        def sum_of_losses(params: PyTree) -> jax.Array:
            return problem.batch_size * problem.loss(params, batch)

        return _updated(optimizer, state, jax.grad(sum_of_losses)(state.params))

    return _whole_step(problem, optimizer, step)


def _private_program(
    clipped_sum_of: Callable[[Loss, float], ClippedSum], problem: Problem
) -> Program:
    optimizer = _private_optimizer(problem)
    clipped_sum = clipped_sum_of(problem.loss, problem.l2_clip_norm)

    def step(state: TrainState, batch: Data) -> TrainState:
        return _updated(optimizer, state, clipped_sum(state.params, batch))

    return _whole_step(problem, optimizer, step)


def _whole_step(
    problem: Problem,
    optimizer: optax.GradientTransformation,
    step: Callable[[TrainState, Data], TrainState],
) -> Program:
    init = _init(problem, optimizer)
    args = (jax.eval_shape(init), problem.batch)
    return Program(
        {"step": Part(jax.jit(step, donate_argnums=0), args)},
        init,
        lambda parts: lambda state: parts["step"](state, problem.batch),
    )


def _private_optimizer(problem: Problem) -> optax.GradientTransformation:
    return optax.chain(
        dpjax.privatize(
            problem.noise_multiplier,
            problem.l2_clip_norm,
            problem.batch_size,
            # The images are random, so a known key does no harm.
            jax.random.key(1),
        ),
        optax.sgd(LEARNING_RATE),
    )


def _init(
    problem: Problem, optimizer: optax.GradientTransformation
) -> Callable[[], TrainState]:
    @jax.jit
    def init(params: PyTree) -> TrainState:
        return TrainState(jax.tree.map(jnp.copy, params), optimizer.init(params))

    return lambda: init(problem.params)


def _updated(
    optimizer: optax.GradientTransformation, state: TrainState, gradients: PyTree
) -> TrainState:
    updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
    return TrainState(optax.apply_updates(state.params, updates), opt_state)


def _example(batch: Data, i: jax.Array) -> Data:
    """Example number i, as a batch of one."""
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, i, 1), batch)


def _compiled_whole(clipped_sum: Callable[[Loss, float], ClippedSum]) -> Method:
    return Method(
        functools.partial(_private_program, clipped_sum),
        lambda loss, l2_clip_norm: jax.jit(clipped_sum(loss, l2_clip_norm)),
    )


def _by_dpjax(method: clipping.Method) -> Method:
    return _compiled_whole(functools.partial(_clipped_sum_by_dpjax, method))


METHODS: dict[str, Method] = {
    NON_PRIVATE: Method(_non_private_program, None),
    "noise_only": Method(_noise_only_program, None),
    "auto": _by_dpjax("auto"),
    "bookkeeping": _by_dpjax("bookkeeping"),
    "reweight": _by_dpjax("reweight"),
    "vmap": _by_dpjax("vmap"),
    "jax_privacy": _compiled_whole(_clipped_sum_by_jax_privacy),
    "one_by_one_loop": Method(_loop_program, _clipped_sum_by_loop),
    "one_by_one_scan": _compiled_whole(clipped_sum_one_by_one),
}
