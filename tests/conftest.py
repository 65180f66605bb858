"""Settings that every test runs under, and the reference that methods are held to.

Strict JAX, two devices on the CPU; float64 per-example gradients.
"""

import os
from collections.abc import Callable
from typing import Any, NamedTuple

# Before JAX starts: sharded programs are tested on two fake devices.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
)
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["MPLBACKEND"] = "agg"

import hypothesis
import jax
import numpy as np
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")

# Compilation dominates the first example, so a deadline would only measure that.
hypothesis.settings.register_profile("dpjax", deadline=None, print_blob=True)
hypothesis.settings.load_profile("dpjax")


class Reference(NamedTuple):
    """Per-example gradients in float64, and what follows from them.

    Attributes:
      norms_B: L2 norm of each example's gradient over all parameters.
      clip_norm: between the least norm and the largest: some examples are clipped.
      clipped_sum: sum over the batch of the gradients clipped to `clip_norm`.
    """

    norms_B: np.ndarray
    clip_norm: float
    clipped_sum: Any


def _to_float64(leaf: Any) -> np.ndarray:
    array = np.asarray(leaf)
    return array.astype(np.float64) if array.dtype == np.float32 else array


def _flat_BxN(grads_B: Any) -> np.ndarray:
    leaves = jax.tree.leaves(grads_B)
    return np.concatenate([leaf.reshape(leaf.shape[0], -1) for leaf in leaves], axis=1)


@pytest.fixture(scope="session")
def float64_reference() -> Callable[..., Reference]:
    """The function `(fun, params, batch) -> Reference`; `fun` sees batches of one."""

    def compute(fun: Callable[..., Any], params: Any, batch: Any) -> Reference:
        with jax.enable_x64(True):
            params, batch = jax.tree.map(_to_float64, (params, batch))

            def gradient(params: Any, example: Any) -> Any:
                return jax.grad(fun)(params, *jax.tree.map(lambda x: x[None], example))

            per_example = jax.jit(
                jax.vmap(gradient, in_axes=(None, 0)),
                compiler_options={"xla_backend_optimization_level": 0},
            )
            grads_B = jax.device_get(per_example(params, batch))
        norms_B = np.linalg.norm(_flat_BxN(grads_B), axis=1)
        clip_norm = float((norms_B.min() + norms_B.max()) / 2)
        factors_B = np.minimum(1.0, clip_norm / np.maximum(norms_B, 1e-300))
        clipped_sum = jax.tree.map(
            lambda g: np.tensordot(factors_B, g, axes=1), grads_B
        )
        return Reference(norms_B, clip_norm, clipped_sum)

    return compute


@pytest.fixture(scope="session")
def assert_clipped_sum() -> Callable[..., None]:
    """The check `(clipped_sum, reference, tolerance)`, over the tree and leaf by leaf.

    A leaf that is small beside the rest could be wrong altogether and not show in the
    norm of the tree, hence the second part.
    """

    def check(clipped_sum: Any, reference: Reference, tolerance: float) -> None:
        expected = reference.clipped_sum
        assert jax.tree.structure(clipped_sum) == jax.tree.structure(expected)
        total = np.sqrt(sum(np.sum(leaf**2) for leaf in jax.tree.leaves(expected)))
        error = 0.0
        paths = jax.tree_util.tree_leaves_with_path(expected)
        for (path, wanted), got in zip(
            paths, jax.tree.leaves(clipped_sum), strict=True
        ):
            assert got.shape == wanted.shape
            difference = np.linalg.norm(np.asarray(got, np.float64) - wanted)
            allowed = 10 * tolerance * np.linalg.norm(wanted) + 0.1 * tolerance * total
            assert difference <= allowed, jax.tree_util.keystr(path)
            error += difference**2
        assert np.sqrt(error) <= tolerance * total

    return check
