"""One update of a language model: loss, gradient, optimizer."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

PyTree = Any
# (params, batch) -> the sum of the losses, f32[], and how many they are, f32[].
Loss = Callable[[PyTree, PyTree], tuple[jax.Array, jax.Array]]

BETAS = (0.9, 0.95)
FINAL_LEARNING_RATE = 0.1


class LmState(NamedTuple):
    """Everything an update changes.

    Attributes:
      params: The model's variables.
      opt_state: The optimizer's state; the number of updates made lives in it.
      loss_sum: f32[], of the losses since the last row of metrics. It is kept with the
        rest so that a run that is continued writes the same row.
    """

    params: PyTree
    opt_state: optax.OptState
    loss_sum: jax.Array


def init_state(params: PyTree, optimizer: optax.GradientTransformation) -> LmState:
    """The state before the first step."""
    return LmState(params, jax.jit(optimizer.init)(params), jnp.zeros(()))


def learning_rates(peak: float, warmup_steps: int, num_steps: int) -> optax.Schedule:
    """From (almost) nothing to `peak` along a line, then to a tenth along a cosine.

    Example:
      >>> schedule = learning_rates(1.0, warmup_steps=3, num_steps=103)
      >>> [round(float(schedule(step)), 3) for step in (0, 1, 2, 3, 53, 102, 103)]
      [0.25, 0.5, 0.75, 1.0, 0.55, 0.1, 0.1]
    """
    return optax.warmup_cosine_decay_schedule(
        # The first step moves already.
        init_value=peak / (warmup_steps + 1),
        peak_value=peak,
        warmup_steps=warmup_steps,
        decay_steps=num_steps,
        end_value=FINAL_LEARNING_RATE * peak,
    )


def adamw(
    learning_rate: optax.Schedule, *, weight_decay: float, gradient_clip_norm: float
) -> optax.GradientTransformation:
    """AdamW (Loshchilov & Hutter 2019) on gradients of bounded L2 norm.

    Weights decay in matrices and embedding tables alone: a bias or a norm's scale has
    no reason to be near zero.
    """
    return optax.chain(
        optax.clip_by_global_norm(gradient_clip_norm),
        optax.adamw(
            learning_rate,
            *BETAS,
            weight_decay=weight_decay,
            mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim >= 2, params),
        ),
    )


def default_microbatch_size(
    batch_size: int, sequence_length: int, platform: str
) -> int:
    """How many sequences to process at once.

    The activations of about 512 tokens stay in a CPU's caches, where those of a whole
    batch would go to memory and back; accelerators want all the work at once.

    Example:
      >>> default_microbatch_size(16, sequence_length=256, platform="cpu")
      2
      >>> default_microbatch_size(16, sequence_length=256, platform="gpu")
      16
    """
    if platform != "cpu":
        return batch_size
    most = max(1, 512 // sequence_length)
    return max(n for n in range(1, batch_size + 1) if n <= most and batch_size % n == 0)


def loss_and_gradient(
    loss: Loss, params: PyTree, batch: PyTree, microbatch_size: int
) -> tuple[jax.Array, PyTree]:
    """The mean loss of a batch and its gradient, from one part of it at a time.

    Args:
      loss: Gives the sum of the losses on a batch, and how many they are.
      params: The model's variables.
      batch: Arrays whose first axis is B.
      microbatch_size: M, a divisor of B.

    Returns:
      f32[], and a tree like `params`.
    """

    def parts(array: jax.Array) -> jax.Array:
        return array.reshape(-1, microbatch_size, *array.shape[1:])

    def add(total: PyTree, part: PyTree) -> tuple[PyTree, None]:
        found = jax.value_and_grad(loss, has_aux=True)(params, part)
        return jax.tree.map(jnp.add, total, found), None

    zeros = ((jnp.zeros(()), jnp.zeros(())), jax.tree.map(jnp.zeros_like, params))
    total, _ = jax.lax.scan(add, zeros, jax.tree.map(parts, batch))
    (loss_sum, number), grads = total
    return jax.tree.map(lambda leaf: leaf / number, (loss_sum, grads))


def make_step(
    loss: Loss, optimizer: optax.GradientTransformation, microbatch_size: int
) -> jax.stages.Wrapped:
    """Returns the jitted update `(state, batch) -> state`; it donates `state`."""

    def step(state: LmState, batch: PyTree) -> LmState:
        mean, grads = loss_and_gradient(loss, state.params, batch, microbatch_size)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        # A gradient that is not finite ruins the parameters whatever the loss was.
        finite = jnp.isfinite(optax.tree.norm(grads))
        return LmState(
            optax.apply_updates(state.params, updates),
            opt_state,
            state.loss_sum + jnp.where(finite, mean, jnp.nan),
        )

    return jax.jit(step, donate_argnames="state")
