"""The training steps that the benchmark compares.

Each is one update of plain SGD on the same batch. The non-private one takes the mean
gradient; the private ones take a sum of clipped gradients, which `dpjax.privatize`
turns into a noisy mean, and differ in where that sum comes from.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import jax_privacy
import numpy as np
import optax

import dpjax
from dpjax import clipping
from experiments.dp.steps import Data, TrainState

PyTree = Any
ClippedSum = Callable[[PyTree, Data], PyTree]

NON_PRIVATE = "nonprivate"
# Lee & Kifer 2021 give their speed-up over this one, their nxBP.
ONE_BY_ONE = "one_by_one_loop"
# So small that what a step meets does not change while it is timed.
LEARNING_RATE = 1e-4


@dataclasses.dataclass(frozen=True)
class Problem:
    """What every method computes.

    To compile a step, the shapes of parameters and batch (`jax.ShapeDtypeStruct`) are
    enough.

    Attributes:
      losses: Maps parameters and B examples to losses_B.
      params: The parameters.
      batch: The examples.
      l2_clip_norm: The bound on each example's gradient.
      noise_multiplier: Of the private steps; 0 leaves the noise out.
    """

    losses: Callable[[PyTree, Data], jax.Array]
    params: PyTree
    batch: Data
    l2_clip_norm: float
    noise_multiplier: float

    @property
    def batch_size(self) -> int:
        """Number of examples."""
        return self.batch.labels_N.shape[0]

    def loss(self, params: PyTree, batch: Data) -> jax.Array:
        """The mean of `losses`."""
        return self.losses(params, batch).mean()


@dataclasses.dataclass(frozen=True)
class Part:
    """A function that is compiled as a whole, and arguments like those it will get.

    `fun` is a `jax.jit` of its own, so compiling it finds nothing in JAX's caches.
    """

    fun: Any
    args: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Program:
    """A function before compilation.

    Attributes:
      parts: What is compiled, by name.
      init: Maps the parameters to the first argument.
      assemble: Makes the function from the compiled parts.
    """

    parts: Mapping[str, Part]
    init: Callable[[PyTree], Any]
    assemble: Callable[[Mapping[str, Callable[..., Any]]], Callable[[Any], Any]]


@dataclasses.dataclass(frozen=True)
class Method:
    """One of the steps that are compared.

    Attributes:
      step: The step, from `TrainState` to `TrainState`; it donates its argument.
      clipped_sum: What the step takes from the examples, from parameters to the sum of
        clipped gradients; None for a step that clips nothing.
    """

    step: Callable[[Problem], Program]
    clipped_sum: Callable[[Problem], Program] | None


def _non_private_step(problem: Problem) -> Program:
    """The ordinary training step."""
    optimizer = optax.sgd(LEARNING_RATE)

    def step(state: TrainState, batch: Data) -> TrainState:
        return _updated(optimizer, state, jax.grad(problem.loss)(state.params, batch))

    return _whole_step(problem, optimizer, step)


def _noise_only_step(problem: Problem) -> Program:
    """The ordinary gradient, with noise: what the noise alone costs."""
    optimizer = _private_optimizer(problem)

    def step(state: TrainState, batch: Data) -> TrainState:
        def sum_of_losses(params: PyTree) -> jax.Array:
            return problem.losses(params, batch).sum()

        return _updated(optimizer, state, jax.grad(sum_of_losses)(state.params))

    return _whole_step(problem, optimizer, step)


def _clipped_sum_one_by_one(problem: Problem) -> ClippedSum:
    """One example after another inside one compiled function.

    The sum is carried along: `jax.lax.map` would keep all gradients to the end, and is
    the same loop otherwise.
    """

    def clipped_sum(params: PyTree, batch: Data) -> PyTree:
        return sum_and_norms_one_by_one(
            problem.loss, params, batch, problem.l2_clip_norm
        )[0]

    return clipped_sum


def sum_and_norms_one_by_one(
    loss: Callable[[PyTree, Data], jax.Array],
    params: PyTree,
    batch: Data,
    l2_clip_norm: float | jax.Array,
) -> tuple[PyTree, jax.Array]:
    """Returns the sum of the clipped gradients and their norms_B before clipping.

    It shares no code with `dpjax`.
    """

    def body(total: PyTree, i: jax.Array) -> tuple[PyTree, jax.Array]:
        return _add_clipped(loss, l2_clip_norm, total, params, batch, i)

    zeros = jax.tree.map(jnp.zeros_like, params)
    return jax.lax.scan(body, zeros, jnp.arange(batch.labels_N.shape[0]))


def _add_clipped(
    loss: Callable[[PyTree, Data], jax.Array],
    l2_clip_norm: float | jax.Array,
    total: PyTree,
    params: PyTree,
    batch: Data,
    i: jax.Array,
) -> tuple[PyTree, jax.Array]:
    """Adds the clipped gradient of example number i; returns its norm as well."""
    example = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, i, 1), batch)
    gradient = jax.grad(loss)(params, example)
    norm = optax.tree.norm(gradient)
    factor = _clip_factors(norm, l2_clip_norm)
    return jax.tree.map(lambda t, g: t + factor * g, total, gradient), norm


def _clip_factors(norms: jax.Array, l2_clip_norm: float | jax.Array) -> jax.Array:
    return jnp.where(norms > l2_clip_norm, l2_clip_norm / norms, 1.0)


def _clipped_sum_by_multi_loss(problem: Problem) -> ClippedSum:
    """The multiLoss of Lee & Kifer 2021, in one compiled function.

    One forward pass of the whole batch, then a backward pass of the whole batch for
    each example's own loss. All B gradients are held, and clipped at the end.
    """

    def clipped_sum(params: PyTree, batch: Data) -> PyTree:
        losses_B, pullback = jax.vjp(lambda p: problem.losses(p, batch), params)
        indices_B = jnp.arange(losses_B.size)

        def gradient(i: jax.Array) -> PyTree:
            return pullback((indices_B == i).astype(losses_B.dtype))[0]

        gradients = jax.lax.map(gradient, indices_B)
        norms_B = jax.vmap(optax.tree.norm)(gradients)
        factors_B = _clip_factors(norms_B, problem.l2_clip_norm)
        return jax.tree.map(lambda g: jnp.tensordot(factors_B, g, 1), gradients)

    return clipped_sum


def _clipped_sum_by_dpjax(method: clipping.Method, problem: Problem) -> ClippedSum:
    return dpjax.clipped_grad(
        problem.loss, l2_clip_norm=problem.l2_clip_norm, method=method
    )


def _clipped_sum_in_quarters(method: clipping.Method, problem: Problem) -> ClippedSum:
    """Four microbatches of B / 4 examples, one after another, for less memory.

    Where 4 does not divide B, the last microbatch is filled up with padding examples,
    so that memory grows steadily with B, which the search for the largest batch needs.
    """
    size = -(-problem.batch_size // 4)
    grad_fn = dpjax.clipped_grad(
        problem.loss,
        l2_clip_norm=problem.l2_clip_norm,
        microbatch_size=size,
        method=method,
    )
    num_padding = -problem.batch_size % size
    if num_padding == 0:
        return grad_fn

    def clipped_sum(params: PyTree, batch: Data) -> PyTree:
        def padded(x: jax.Array) -> jax.Array:
            return jnp.pad(x, [(0, num_padding)] + [(0, 0)] * (x.ndim - 1))

        is_padding_B = jnp.arange(problem.batch_size + num_padding)
        is_padding_B = is_padding_B >= problem.batch_size
        batch = jax.tree.map(padded, batch)
        return grad_fn(params, batch, is_padding_example=is_padding_B)

    return clipped_sum


def _clipped_sum_by_jax_privacy(problem: Problem) -> ClippedSum:
    return jax_privacy.clipped_grad(problem.loss, l2_clip_norm=problem.l2_clip_norm)


def _clipped_sum_by_loop(problem: Problem) -> Program:
    """The nxBP of Lee & Kifer 2021: B calls of a compiled function."""
    params, batch = problem.params, problem.batch

    def zeros_like(params: PyTree) -> PyTree:
        return jax.tree.map(jnp.zeros_like, params)

    def add(total: PyTree, params: PyTree, batch: Data, i: jax.Array) -> PyTree:
        return _add_clipped(
            problem.loss, problem.l2_clip_norm, total, params, batch, i
        )[0]

    def assemble(parts: Mapping[str, Callable[..., Any]]) -> Callable[[PyTree], PyTree]:
        def clipped_sum(params: PyTree) -> PyTree:
            total = parts["zeros_like"](params)
            for i in range(problem.batch_size):
                total = parts["add"](total, params, batch, np.int32(i))
            return total

        return clipped_sum

    parts = {
        "zeros_like": Part(jax.jit(zeros_like), (params,)),
        "add": Part(
            jax.jit(add, donate_argnums=0), (params, params, batch, np.int32(0))
        ),
    }
    return Program(parts, lambda params: params, assemble)


def _step_by_loop(problem: Problem) -> Program:
    """The clipped sum of the loop, and the update by one more call."""
    loop = _clipped_sum_by_loop(problem)
    optimizer = _private_optimizer(problem)
    init = _init(optimizer)

    def update(state: TrainState, total: PyTree) -> TrainState:
        return _updated(optimizer, state, total)

    def assemble(
        parts: Mapping[str, Callable[..., Any]],
    ) -> Callable[[TrainState], TrainState]:
        clipped_sum = loop.assemble(parts)
        return lambda state: parts["update"](state, clipped_sum(state.params))

    args = (jax.eval_shape(init, problem.params), problem.params)
    update_part = Part(jax.jit(update, donate_argnums=0), args)
    return Program({**loop.parts, "update": update_part}, init, assemble)


def _private_step(
    clipped_sum_of: Callable[[Problem], ClippedSum], problem: Problem
) -> Program:
    optimizer = _private_optimizer(problem)
    clipped_sum = clipped_sum_of(problem)

    def step(state: TrainState, batch: Data) -> TrainState:
        return _updated(optimizer, state, clipped_sum(state.params, batch))

    return _whole_step(problem, optimizer, step)


def _whole_step(
    problem: Problem,
    optimizer: optax.GradientTransformation,
    step: Callable[[TrainState, Data], TrainState],
) -> Program:
    init = _init(optimizer)
    state = jax.eval_shape(init, problem.params)
    return _whole(problem, jax.jit(step, donate_argnums=0), init, state)


def _whole_clipped_sum(
    clipped_sum_of: Callable[[Problem], ClippedSum], problem: Problem
) -> Program:
    clipped_sum = jax.jit(clipped_sum_of(problem))
    return _whole(problem, clipped_sum, lambda params: params, problem.params)


def _whole(
    problem: Problem, fun: Any, init: Callable[[PyTree], Any], first: Any
) -> Program:
    """A program of one part, which takes the batch as well."""
    return Program(
        {"whole": Part(fun, (first, problem.batch))},
        init,
        lambda parts: lambda argument: parts["whole"](argument, problem.batch),
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
    optimizer: optax.GradientTransformation,
) -> Callable[[PyTree], TrainState]:
    @jax.jit
    def init(params: PyTree) -> TrainState:
        return TrainState(jax.tree.map(jnp.copy, params), optimizer.init(params))

    return init


def _updated(
    optimizer: optax.GradientTransformation, state: TrainState, gradients: PyTree
) -> TrainState:
    updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
    return TrainState(optax.apply_updates(state.params, updates), opt_state)


def _compiled_whole(clipped_sum: Callable[[Problem], ClippedSum]) -> Method:
    return Method(
        functools.partial(_private_step, clipped_sum),
        functools.partial(_whole_clipped_sum, clipped_sum),
    )


def _by_dpjax(method: clipping.Method) -> Method:
    return _compiled_whole(functools.partial(_clipped_sum_by_dpjax, method))


def _in_quarters(method: clipping.Method) -> Method:
    return _compiled_whole(functools.partial(_clipped_sum_in_quarters, method))


_WHOLE: dict[str, Method] = {
    NON_PRIVATE: Method(_non_private_step, None),
    "noise_only": Method(_noise_only_step, None),
    "auto": _by_dpjax("auto"),
    "bookkeeping": _by_dpjax("bookkeeping"),
    "reweight": _by_dpjax("reweight"),
    "vmap": _by_dpjax("vmap"),
    "jax_privacy": _compiled_whole(_clipped_sum_by_jax_privacy),
    "multi_loss": _compiled_whole(_clipped_sum_by_multi_loss),
    ONE_BY_ONE: Method(_step_by_loop, _clipped_sum_by_loop),
    "one_by_one_scan": _compiled_whole(_clipped_sum_one_by_one),
}
DEFAULT_METHODS = tuple(_WHOLE)
METHODS: dict[str, Method] = {
    **_WHOLE,
    # These trade time for memory, so they are compared where memory is.
    "bookkeeping_quarters": _in_quarters("bookkeeping"),
    "reweight_quarters": _in_quarters("reweight"),
}
