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

from experiments.extraction import (
    beam_search,
    decoding,
    early_rejection,
    infilling,
    sampled_decoding,
    verdicts,
)
from experiments.extraction.sampled_decoding import SamplingScheme
from experiments.extraction.verdicts import SUFFIX_LENGTH, Scores

# Of one prompt. More draws are made in several turns, which bounds the memory.
_DRAWS_AT_ONCE = 128

Progress = Callable[[int], object]
"""Called with the number of windows that are done since it was last called."""


class Asker:
    """What one model says about windows.

    Of a causal language model; `blanks` is of a T5. The methods take windows tokens_NxT
    i32 with the prompt first. Matrix products have the precision of the caller's
    `jax.default_matmul_precision`.

    Attributes:
      compile_seconds: What tracing and compiling took so far.
    """

    def __init__(self, model: Any, params: Any, batch_size: int):
        """Compiles nothing yet.

        Args:
          model: A language model of `experiments.models`.
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
        *,
        scheme: SamplingScheme | None = None,
    ) -> Scores:
        """Scores of the suffixes after each of K contexts, [N, K, 50].

        Args:
          tokens_NxT: Windows.
          contexts: Lengths of the prompts.
          progress: See `Progress`.
          scheme: Scores are those of drawing by it; None: of the model as it is.
        """

        def score(tokens_BxT: np.ndarray) -> Scores:
            if scheme is None:
                return self._run(verdicts.score, tokens_BxT, contexts=contexts)
            return self._run(
                sampled_decoding.score, tokens_BxT, contexts=contexts, scheme=scheme
            )

        return self._in_batches(score, progress, tokens_NxT)

    def blanks(
        self, batch: infilling.Batch, progress: Progress = lambda _: None
    ) -> Scores:
        """Scores of the targets of N windows with blanks, [N, T]; not all count."""
        return self._in_batches(
            functools.partial(self._run, infilling.score),
            progress,
            batch.inputs_NxS,
            batch.num_inputs_N,
            batch.targets_NxT,
        )

    def generate(
        self,
        tokens_NxT: np.ndarray,
        context: int,
        progress: Progress = lambda _: None,
    ) -> np.ndarray:
        """What greedy decoding makes of the first `context` tokens, i32[N, 50].

        From where logits are NaN on, it is the vocabulary's size, which is no id.
        """
        generate = functools.partial(self._run, decoding.generate)
        return self._in_batches(generate, progress, tokens_NxT[:, :context])

    def best_of_beams(
        self,
        tokens_NxT: np.ndarray,
        context: int,
        num_beams: int,
        progress: Progress = lambda _: None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """The most likely continuations that a beam search finds.

        Args:
          tokens_NxT: Windows.
          context: Length of the prompt.
          num_beams: How many continuations are followed.
          progress: See `Progress`.

        Returns:
          i32[N, 50], and f32[N], the natural log of their probability, NaN where logits
          are not finite.
        """

        def search(prompts_BxC: np.ndarray) -> tuple[jax.Array, jax.Array]:
            beams = self._run(
                beam_search.search, prompts_BxC, num_beams=num_beams, num_returned=1
            )
            return beams.tokens_PxNxT[:, 0], beams.scores_PxN[:, 0]

        return self._in_batches(search, progress, tokens_NxT[:, :context])

    def times_drawn(
        self,
        tokens_NxT: np.ndarray,
        window_ids_N: np.ndarray,
        context: int,
        num_draws: int,
        scheme: SamplingScheme,
        seed: int,
        progress: Progress = lambda _: None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """How often the suffix comes, of so many continuations drawn at random.

        Args:
          tokens_NxT: Windows.
          window_ids_N: Of the windows, which decide with seed and context what is
            drawn.
          context: Length of the prompt.
          num_draws: Of each window.
          scheme: How tokens are drawn.
          seed: An integer >= 0.
          progress: See `Progress`.

        Returns:
          i32[N], and bool[N], whether the logits are finite.
        """
        turns = -(-num_draws // _DRAWS_AT_ONCE)
        # Turns are of one size; the last may make some draws that do not count.
        at_once = -(-num_draws // turns)
        vocabulary_size = self._model.config.vocabulary_size

        def draw(
            tokens_BxT: np.ndarray, window_ids_B: np.ndarray
        ) -> tuple[np.ndarray, np.ndarray]:
            prompts_BxC, rest_BxR = np.split(tokens_BxT, [context], axis=1)
            suffix_Bx1xS = rest_BxR[:, None, :SUFFIX_LENGTH]
            times_B = np.zeros(len(tokens_BxT), np.int32)
            is_finite_B = np.ones(len(tokens_BxT), bool)
            for turn in range(turns):
                trials_M = np.arange(turn * at_once, (turn + 1) * at_once)
                keys_BxM = sampled_decoding.draw_keys(
                    seed, context, window_ids_B, trials_M
                )
                drawn_BxMxS = np.asarray(
                    self._run(
                        sampled_decoding.sample, prompts_BxC, keys_BxM, scheme=scheme
                    )
                )
                is_true_BxM = (drawn_BxMxS == suffix_Bx1xS).all(axis=-1)
                times_B += is_true_BxM[:, trials_M < num_draws].sum(axis=1)
                is_finite_B &= (drawn_BxMxS < vocabulary_size).all(axis=(1, 2))
            return times_B, is_finite_B

        return self._in_batches(draw, progress, tokens_NxT, window_ids_N)

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

    def _in_batches(
        self, function: Callable[..., Any], progress: Progress, *rows: np.ndarray
    ) -> Any:
        """`function(*rows)`, from a batch after another; trees of arrays [N, ...]."""
        batches = []
        for num_rows, index_B in _batches(np.arange(len(rows[0])), self._batch_size):
            result = function(*(x[index_B] for x in rows))
            batches.append(
                jax.tree.map(lambda x, n=num_rows: np.asarray(x)[:n], result)
            )
            progress(num_rows)
        return jax.tree.map(lambda *xs: np.concatenate(xs), *batches)

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
