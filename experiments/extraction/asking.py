"""One loaded model, asked about windows of one length, in batches of one shape.

Every program is compiled before the first batch, for exactly the batch it will get: a
last batch that is not full is filled up with its own first rows.
"""

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.extraction import decoding, verdicts
from experiments.extraction.sweep_plan import Prompts
from experiments.extraction.verdicts import Verdicts

Program = Callable[[Any, np.ndarray], Any]


class Asker:
    """What one model says about one set of prompts.

    Attributes:
      compile_seconds: What compiling took.
    """

    def __init__(
        self,
        model: Any,
        params: Any,
        prompts: Prompts,
        *,
        batch_size: int,
        decode: bool,
    ):
        """Compiles, with the matmul precision of the caller's context.

        Args:
          model: A causal language model of `experiments.models`.
          params: Its parameters.
          prompts: Their windows have N rows of T tokens in what follows.
          batch_size: B.
          decode: Whether `generate` will be called.
        """
        self._params = params
        self._batch_size = batch_size
        contexts = prompts.model_contexts
        shape_BxT = (batch_size, prompts.num_positions + 1)
        start = time.perf_counter()
        self._score = _compiled(
            functools.partial(verdicts.score, model, contexts=contexts),
            params,
            shape_BxT,
        )
        self._generate = [
            _compiled(functools.partial(_continued, model, context), params, shape_BxT)
            for context in (contexts if decode else ())
        ]
        self.compile_seconds = time.perf_counter() - start

    def verdicts(self, tokens_NxT: np.ndarray) -> Verdicts:
        """Verdicts of shape [N, K], for K contexts."""
        parts = [
            jax.tree.map(
                lambda x, n=num_rows: np.asarray(x)[:n],
                self._score(self._params, tokens_BxT),
            )
            for num_rows, tokens_BxT in self._batches(tokens_NxT)
        ]
        return verdicts.judge(jax.tree.map(lambda *x: np.concatenate(x), *parts))

    def generate(self, tokens_NxT: np.ndarray) -> np.ndarray:
        """The tokens that greedy decoding gives, i32[N, K, 50]."""
        generated = [
            np.stack(
                [np.asarray(f(self._params, tokens_BxT)) for f in self._generate], 1
            )[:num_rows]
            for num_rows, tokens_BxT in self._batches(tokens_NxT)
        ]
        return np.concatenate(generated)

    def _batches(self, tokens_NxT: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Full batches, and how many of their rows count."""
        for start in range(0, len(tokens_NxT), self._batch_size):
            rows = tokens_NxT[start : start + self._batch_size]
            yield len(rows), np.resize(rows, (self._batch_size, rows.shape[1]))


def _continued(
    model: Any, context: int, params: Any, tokens_BxT: jax.Array
) -> jax.Array:
    return decoding.generate(model, params, tokens_BxT[:, :context])


def _compiled(
    function: Callable[..., Any], params: Any, shape_BxT: tuple[int, int]
) -> Program:
    tokens_BxT = jax.ShapeDtypeStruct(shape_BxT, jnp.int32)
    return jax.jit(function).lower(params, tokens_BxT).compile()
