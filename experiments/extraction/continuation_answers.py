"""How a model continues the prompts of one part of the windows."""

import dataclasses
from collections.abc import Callable

import numpy as np

from experiments.errors import RunError
from experiments.extraction import answers, verdicts
from experiments.extraction.answers import Answer
from experiments.extraction.asking import Asker, Progress
from experiments.extraction.sampled_decoding import SamplingScheme
from experiments.extraction.sweep_config import SweepConfig
from experiments.extraction.sweep_plan import Part
from experiments.extraction.sweep_prompts import Prompts
from experiments.extraction.verdicts import SUFFIX_LENGTH, Scores, Verdicts


def answer(asker: Asker, part: Part, config: SweepConfig, progress: Progress) -> Answer:
    """Asks a causal language model about the windows of `part`.

    Args:
      asker: The model.
      part: Windows and contexts.
      config: Of the sweep.
      progress: Called with the number of records that are done since the last call.

    Raises:
      RunError: Logits are not finite, or decoding and teacher forcing disagree.
    """
    return _Interview(asker, part, config).answer(progress)


class _Interview:
    """One model and one part: a method for each thing that is asked.

    Attributes:
      found: The columns so far, arrays [N, K] or [N, K, 50] for K contexts.
      near_ties: See `Answer`.
    """

    def __init__(self, asker: Asker, part: Part, config: SweepConfig):
        assert isinstance(part.question, Prompts)
        self.found: dict[str, np.ndarray] = {}
        self.near_ties: list[str] = []
        self._asker, self._part, self._config = asker, part, config
        self._scheme = SamplingScheme(config.temperature, config.top_k)
        # As the model sees them.
        self._contexts = part.question.model_contexts
        self._tokens_NxT = part.tokens()
        self._suffix_NxKxS = np.stack(
            [self._tokens_NxT[:, c : c + SUFFIX_LENGTH] for c in self._contexts], axis=1
        )

    def answer(self, progress: Progress) -> Answer:
        """Asks what the config says; the last and slowest tells its progress."""
        config = self._config
        steps: list[Callable[[Progress], None]] = [
            self._judge_alone if config.verdicts_only else self._judge
        ]
        if config.has_scheme:
            steps.append(self._score_by_scheme)
        if config.decode:
            steps.append(self._decode)
        if config.beams:
            steps.append(self._search)
        if config.samples:
            steps.append(self._draw)
        for step in steps[:-1]:
            step(lambda _: None)
        steps[-1](progress)
        rows = answers.rows(self._part, config, self.found)
        return Answer(rows, self.near_ties)

    def _judge_alone(self, progress: Progress) -> None:
        # Where one pass serves several contexts there is little to reject early.
        if len(self._contexts) > 1:
            judged = verdicts.judge(self._scores(progress))
            self.found["extracted"] = judged.extracted
            return
        extracted_N, finite_N = self._asker.extractable(
            self._tokens_NxT, self._contexts[0], self._config.near_tie, progress
        )
        answers.check_finite(finite_N[:, None], self._part)
        self.found["extracted"] = extracted_N[:, None]

    def _judge(self, progress: Progress) -> None:
        self._forced = self._scores(progress)
        self._judged = verdicts.judge(self._forced)
        for field in dataclasses.fields(Verdicts):
            self.found[field.name] = getattr(self._judged, field.name)

    def _score_by_scheme(self, progress: Progress) -> None:
        # The model as it is has been asked.
        if self._scheme == SamplingScheme():
            self.found["scheme_logprob"] = self._judged.suffix_logprob
            return
        scores = self._scores(progress, self._scheme)
        self.found["scheme_logprob"] = verdicts.judge(scores).suffix_logprob

    def _scores(
        self, progress: Progress, scheme: SamplingScheme | None = None
    ) -> Scores:
        num_contexts = len(self._contexts)
        scores = self._asker.scores(
            self._tokens_NxT,
            self._contexts,
            lambda num_windows: progress(num_windows * num_contexts),
            scheme=scheme,
        )
        answers.check_finite(verdicts.finite(scores), self._part)
        return scores

    def _decode(self, progress: Progress) -> None:
        generated_NxKxS = np.stack(
            [
                self._asker.generate(self._tokens_NxT, context, progress)
                for context in self._contexts
            ],
            axis=1,
        )
        # After it has left the suffix, the model reads what teacher forcing did not.
        is_id_NxKxS = generated_NxKxS < self._part.model.config.vocabulary_size
        answers.check_finite(np.asarray(is_id_NxKxS.all(axis=-1)), self._part)
        self._compare(generated_NxKxS)
        self.found["generated"] = generated_NxKxS.astype(np.uint32)

    def _search(self, progress: Progress) -> None:
        beams = [
            self._asker.best_of_beams(
                self._tokens_NxT, context, self._config.beams, progress
            )
            for context in self._contexts
        ]
        tokens_NxKxS, logprob_NxK = (
            np.stack(x, axis=1) for x in zip(*beams, strict=True)
        )
        answers.check_finite(~np.isnan(logprob_NxK), self._part)
        self.found |= {
            "beam_generated": tokens_NxKxS.astype(np.uint32),
            "beam_extracted": (tokens_NxKxS == self._suffix_NxKxS).all(axis=-1),
            "beam_logprob": logprob_NxK,
            "beam_identical": (tokens_NxKxS == self.found["generated"]).all(axis=-1),
        }

    def _draw(self, progress: Progress) -> None:
        draws = [
            self._asker.times_drawn(
                self._tokens_NxT,
                self._part.windows["window_id"].to_numpy(),
                context,
                self._config.samples,
                self._scheme,
                self._config.seed,
                progress,
            )
            for context in self._contexts
        ]
        times_NxK, finite_NxK = (np.stack(x, axis=1) for x in zip(*draws, strict=True))
        answers.check_finite(finite_NxK, self._part)
        self.found["samples_extracted"] = times_NxK

    def _compare(self, generated_NxKxS: np.ndarray) -> None:
        """Compares where decoding and teacher forcing first leave the suffix.

        Up to there both have read the same tokens, so they have the same logits but for
        rounding, and only a margin within rounding lets them choose different tokens.
        """
        near_tie, part = self._config.near_tie, self._part
        forced_NxK = self._judged.first_mismatch
        decoded_NxK = verdicts.first_false(generated_NxKxS == self._suffix_NxKxS)
        for row, k in np.argwhere(decoded_NxK != forced_NxK):
            decoded, forced = decoded_NxK[row, k], forced_NxK[row, k]
            margin = float(self._forced.margin[row, k, min(decoded, forced)])
            window_id = part.windows["window_id"][int(row)]
            line = (
                f"model {part.model.name!r}, window {window_id}, context "
                f"{part.question.contexts[k]}: decoding leaves the suffix at token "
                f"{decoded}, teacher forcing at {forced} ({SUFFIX_LENGTH}: never), "
                f"where the margin is {margin:.3g}"
            )
            if not abs(margin) <= near_tie:
                raise RunError(
                    f"{line}, more than config.near_tie={near_tie:g}: this is a "
                    "defect, so please report it; with another precision than highest, "
                    "give a larger --config.near_tie"
                )
            self.near_ties.append(line)
