"""The compiled parts of private training: clip and sum, noise and update, evaluate."""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpjax import clipped_grad
from dpjax.methods import Method
from dpjax.transforms import privatize

PyTree = Any


class TrainState(NamedTuple):
    """Everything an update changes.

    Attributes:
      params: The model's variables.
      opt_state: The optimizer's state; the noise key lives in it.
    """

    params: PyTree
    opt_state: optax.OptState


class ClippedSums(NamedTuple):
    """Sums over examples of one logical batch, padding left out.

    Only `grads` is made private later. The other fields are diagnostics that epsilon
    does not cover.

    Attributes:
      grads: Clipped per-example gradients, like the parameters.
      loss: f32[], cross-entropy in nats.
      num_correct: i32[], right predictions.
      num_clipped: i32[], gradients longer than the clip norm.
      num_examples: i32[].
    """

    grads: PyTree
    loss: jax.Array
    num_correct: jax.Array
    num_clipped: jax.Array
    num_examples: jax.Array


class Data(NamedTuple):
    """Labelled examples on the device.

    Attributes:
      inputs_N: Images f32[N, H, W, C] or token ids i32[N, T].
      labels_N: i32[N].
    """

    inputs_N: jax.Array
    labels_N: jax.Array


class PrivateStep:
    """One private update, for batches of any size, compiled for one physical shape.

    A batch that fits the physical shape takes one call of one compiled function. A
    larger one adds its further parts up first; noise is added once, to the whole sum,
    and the divisor is the expected batch size whatever was drawn.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: optax.GradientTransformation,
        noise_key: jax.Array,
        *,
        l2_clip_norm: float,
        noise_multiplier: float,
        expected_batch_size: float,
        method: Method = "auto",
    ):
        """Puts the clipping, the noise and the divisor together.

        Args:
          model: Maps inputs_B to logits_BxV.
          optimizer: Applied to the noisy mean gradient.
          noise_key: Secret; keeps its place in the optimizer state.
          l2_clip_norm: Bound on the L2 norm of each example's gradient.
          noise_multiplier: Standard deviation of the noise over the sensitivity.
          expected_batch_size: Sampling probability times number of examples.
          method: See `dpjax.clipped_grad`.
        """
        clip, sensitivity = _make_clipped_sums(model, l2_clip_norm, method)
        self._optimizer = optax.chain(
            privatize(noise_multiplier, sensitivity, expected_batch_size, noise_key),
            optimizer,
        )

        def accumulate(
            sums: ClippedSums, params: PyTree, data: Data, indices_B: jax.Array
        ) -> ClippedSums:
            return jax.tree.map(jnp.add, sums, clip(params, data, indices_B))

        def update(
            state: TrainState, sums: ClippedSums, data: Data, indices_B: jax.Array
        ) -> tuple[TrainState, ClippedSums]:
            sums = accumulate(sums, state.params, data, indices_B)
            updates, opt_state = self._optimizer.update(
                sums.grads, state.opt_state, state.params
            )
            params = optax.apply_updates(state.params, updates)
            return TrainState(params, opt_state), sums._replace(grads=None)

        self.accumulate = jax.jit(accumulate)
        self.update = jax.jit(update, donate_argnames="state")

    def init(self, params: PyTree) -> TrainState:
        """The state before the first step; `params` are donated with it."""
        # Compiled, it gets a copy of the noise key, which donation may then destroy.
        return TrainState(params, jax.jit(self._optimizer.init)(params))

    def __call__(
        self, state: TrainState, data: Data, parts: list[np.ndarray]
    ) -> tuple[TrainState, ClippedSums]:
        """Updates `state`, which is donated.

        Args:
          state: Before the step.
          data: The training set.
          parts: The batch as `physical_batches` cuts it; never empty.

        Returns:
          The new state, and the sums without their gradients.
        """
        sums = zero_sums(state.params)
        for indices_B in parts[:-1]:
            sums = self.accumulate(sums, state.params, data, indices_B)
        return self.update(state, sums, data, parts[-1])


def _make_clipped_sums(
    model: nn.Module, l2_clip_norm: float, method: Method
) -> tuple[Callable[[PyTree, Data, jax.Array], ClippedSums], float]:
    """Returns `f(params, data, indices_B)`, -1 being padding, and its sensitivity."""

    def loss_fn(params: PyTree, batch: Data) -> tuple[jax.Array, jax.Array]:
        logits_BxV: Any = model.apply(params, batch.inputs_N)
        losses_B = optax.softmax_cross_entropy_with_integer_labels(
            logits_BxV, batch.labels_N
        )
        return losses_B.sum(), logits_BxV

    grad_fn = clipped_grad(
        loss_fn,
        has_aux=True,
        l2_clip_norm=l2_clip_norm,
        return_values=True,
        return_grad_norms=True,
        method=method,
    )

    def clipped_sums(params: PyTree, data: Data, indices_B: jax.Array) -> ClippedSums:
        is_real_B = indices_B >= 0
        # Padding rows read example 0 here; clipped_grad and the sums leave them out.
        rows_B = jnp.maximum(indices_B, 0)
        batch = Data(data.inputs_N[rows_B], data.labels_N[rows_B])
        grads, aux = grad_fn(params, batch, is_padding_example=~is_real_B)
        predictions_B = jnp.argmax(aux.aux.reshape(len(rows_B), -1), axis=-1)
        return ClippedSums(
            grads,
            loss=jnp.sum(jnp.where(is_real_B, aux.values, 0.0)),
            num_correct=jnp.sum(is_real_B & (predictions_B == batch.labels_N)),
            num_clipped=jnp.sum(is_real_B & (aux.grad_norms > l2_clip_norm)),
            num_examples=jnp.sum(is_real_B),
        )

    return clipped_sums, grad_fn.sensitivity()


@jax.jit
def zero_sums(params: PyTree) -> ClippedSums:
    """The sums of an empty batch."""
    zero = jnp.zeros((), jnp.int32)
    grads = jax.tree.map(jnp.zeros_like, params)
    return ClippedSums(grads, jnp.zeros(()), zero, zero, zero)


def make_evaluate(
    model: nn.Module, batch_size: int = 500
) -> Callable[[PyTree, Data], float]:
    """Returns `f(params, data) -> accuracy` in [0, 1], in batches of one shape."""

    @jax.jit
    def num_correct(params: PyTree, data: Data, indices_B: jax.Array) -> jax.Array:
        is_real_B = indices_B >= 0
        rows_B = jnp.maximum(indices_B, 0)
        logits_BxV: Any = model.apply(params, data.inputs_N[rows_B])
        is_right_B = jnp.argmax(logits_BxV, axis=-1) == data.labels_N[rows_B]
        return jnp.sum(is_real_B & is_right_B)

    def evaluate(params: PyTree, data: Data) -> float:
        num_examples = len(data.labels_N)
        size = min(batch_size, num_examples)
        total = 0
        for start in range(0, num_examples, size):
            indices_B = np.arange(start, start + size, dtype=np.int32)
            indices_B[indices_B >= num_examples] = -1
            total += int(num_correct(params, data, indices_B))
        return total / num_examples

    return evaluate
