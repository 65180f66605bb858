"""One loaded model, asked about windows in batches of one shape.

There is one compiled program for each function and shape of its inputs. A last batch
that is not full is filled up with its own rows again.
"""

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from experiments.extraction import decoding, early_rejection, verdicts
from experiments.extraction.verdicts import Scores

Progress = Callable[[int], object]
"""Called with the number of windows that are done since it was last called."""


class Asker:
    """What one model says about windows.

    The methods take windows tokens_NxT i32 with the prompt first. Matrix products have
    the precision of the caller's `jax.default_matmul_precision`.

    Attributes:
      compile_seconds: What tracing and compiling took so far.
    """

    def __init__(self, model: Any, params: Any, batch_size: int):
        """Compiles nothing yet.

        Args:
          model: A causal language model of `experiments.models`.
          params: Its parameters.
          batch_size: B, of every program.
        """
        self.compile_seconds = 0.0
        self._model, self._params = model, params
        self._batch_size = batch_size
        self._programs: dict[Any, Callable[..., Any]] = {}

    @property
    def num_programs(self) -> int:
        """How many programs were compiled so far."""
        return len(self._programs)

    def scores(
        self,
        tokens_NxT: np.ndarray,
        contexts: tuple[int, ...],
        progress: Progress = lambda _: None,
    ) -> Scores:
        """Scores of the suffixes after each of K contexts, [N, K, 50]."""
        batches = []
        for num_rows, tokens_BxT in _batches(tokens_NxT, self._batch_size):
            scores = self._run(verdicts.score, tokens_BxT, contexts=contexts)
            batches.append(
                jax.tree.map(lambda x, n=num_rows: np.asarray(x)[:n], scores)
            )
            progress(num_rows)
        return jax.tree.map(lambda *xs: np.concatenate(xs), *batches)

    def generate(
        self,
        tokens_NxT: np.ndarray,
        context: int,
        progress: Progress = lambda _: None,
    ) -> np.ndarray:
        """What greedy decoding makes of the first `context` tokens, i32[N, 50].

        From where logits are NaN on, it is the vocabulary's size, which is no id.
        """
        batches = []
        prompts_NxC = tokens_NxT[:, :context]
        for num_rows, prompts_BxC in _batches(prompts_NxC, self._batch_size):
            generated_Bx50 = self._run(decoding.generate, prompts_BxC)
            batches.append(np.asarray(generated_Bx50)[:num_rows])
            progress(num_rows)
        return np.concatenate(batches)

    def extractable(
        self,
        tokens_NxT: np.ndarray,
        context: int,
        near_tie: float,
        progress: Progress = lambda _: None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Whether the suffixes are extractable, for less than `scores`.

        Args:
          tokens_NxT: Windows.
          context: Length of the prompt.
          near_tie: Where the least margin is not beyond this, `scores` decides.
          progress: See `Progress`.

        Returns:
          bool[N], whether the suffix is extractable, and bool[N], whether the logits
          are finite.
        """
        margins = []
        for num_rows, tokens_BxT in _batches(tokens_NxT, self._batch_size):
            margin_B = self._least_margins(tokens_BxT, num_rows, context, near_tie)
            margins.append(margin_B[:num_rows])
            progress(num_rows)
        margin_N = np.concatenate(margins)
        extracted_N, finite_N = margin_N > 0, np.ones(len(margin_N), bool)
        # Those with a NaN are among them.
        unsure_U = np.flatnonzero(~(np.abs(margin_N) > near_tie))
        if len(unsure_U):
            scores = self.scores(tokens_NxT[unsure_U], (context,))
            extracted_N[unsure_U] = verdicts.judge(scores).extracted[:, 0]
            finite_N[unsure_U] = verdicts.finite(scores)[:, 0]
        return extracted_N, finite_N

    def _least_margins(
        self, tokens_BxT: np.ndarray, num_rows: int, context: int, near_tie: float
    ) -> np.ndarray:
        """Least margin over the suffix; of rejected rows, over its first tokens."""
        scores, cache = self._run(
            early_rejection.score_first, tokens_BxT, context=context
        )
        margin_B = early_rejection.least_margin(scores)
        left = np.flatnonzero(~(margin_B[:num_rows] < -near_tie)).astype(np.int32)
        # In small groups, few of whose rows are there only to fill the last one.
        group = max(1, self._batch_size // 8)
        for num_left, rows_G in _batches(left, group):
            rest = self._run(
                early_rejection.score_rest, tokens_BxT, cache, rows_G, context=context
            )
            rows = rows_G[:num_left]
            least = early_rejection.least_margin(rest)[:num_left]
            margin_B[rows] = np.minimum(margin_B[rows], least)
        return margin_B

    def _run(self, function: Callable[..., Any], *arrays: Any, **static: Any) -> Any:
        """`function(model, params, *arrays, **static)`, compiled at the first call."""
        shapes = tuple(x.shape for x in jax.tree.leaves(arrays))
        key = (function, shapes, tuple(static.items()))
        if key not in self._programs:
            start = time.perf_counter()
            program = functools.partial(function, self._model, **static)
            self._programs[key] = (
                jax.jit(program).lower(self._params, *arrays).compile()
            )
            self.compile_seconds += time.perf_counter() - start
        return self._programs[key](self._params, *arrays)


def _batches(rows: np.ndarray, size: int) -> Iterator[tuple[int, np.ndarray]]:
    """Batches of `size` rows, and how many of them count."""
    for start in range(0, len(rows), size):
        batch = rows[start : start + size]
        yield len(batch), np.resize(batch, (size, *rows.shape[1:]))
