"""From prompts to records: what one model answers to one part of the windows."""

import dataclasses
from typing import Any

import numpy as np
import polars

from experiments.errors import RunError
from experiments.extraction import records, verdicts
from experiments.extraction.asking import Asker, Progress
from experiments.extraction.sweep_config import SweepConfig
from experiments.extraction.sweep_plan import Part
from experiments.extraction.verdicts import SUFFIX_LENGTH, Scores, Verdicts


@dataclasses.dataclass(frozen=True)
class Answer:
    """The records of a part.

    Attributes:
      rows: By context, and then by window.
      near_ties: A line for each suffix that decoding leaves at another token than
        teacher forcing, by no more than `near_tie`.
    """

    rows: polars.DataFrame
    near_ties: list[str]


def answer(asker: Asker, part: Part, config: SweepConfig, progress: Progress) -> Answer:
    """Asks one model about the windows of `part`.

    Args:
      asker: The model.
      part: Windows and contexts.
      config: Of the sweep.
      progress: Called with the number of records that are done since the last call.

    Raises:
      RunError: Logits are not finite, or decoding and teacher forcing disagree.
    """
    tokens_NxT = part.tokens()
    contexts = part.prompts.model_contexts
    # Where one pass serves several contexts there is little to reject early.
    if config.verdicts_only and len(contexts) == 1:
        extracted_N, finite_N = asker.extractable(
            tokens_NxT, contexts[0], config.near_tie, progress
        )
        _check_finite(finite_N[:, None], part)
        return Answer(_rows(part, {"extracted": extracted_N[:, None]}), [])

    def scored(num_windows: int) -> None:
        if not config.decode:
            progress(num_windows * len(contexts))

    scores = asker.scores(tokens_NxT, contexts, scored)
    _check_finite(verdicts.finite(scores), part)
    judged = verdicts.judge(scores)
    if config.verdicts_only:
        return Answer(_rows(part, {"extracted": judged.extracted}), [])
    columns = {f.name: getattr(judged, f.name) for f in dataclasses.fields(judged)}
    if not config.decode:
        return Answer(_rows(part, columns), [])
    generated_NxKxS = np.stack(
        [asker.generate(tokens_NxT, context, progress) for context in contexts], axis=1
    )
    near_ties = _compare(generated_NxKxS, tokens_NxT, scores, judged, part, config)
    columns["generated"] = generated_NxKxS.astype(np.uint32)
    return Answer(_rows(part, columns), near_ties)


def _rows(part: Part, answers: dict[str, np.ndarray]) -> polars.DataFrame:
    """Records from arrays [N, K] or [N, K, 50]; other columns are null."""
    windows = part.windows
    schema = records.COLUMNS | (records.GENERATED if "generated" in answers else {})
    frames = []
    for k, context in enumerate(part.prompts.contexts):
        columns: dict[str, Any] = dict.fromkeys(schema)
        columns |= {
            "window_id": windows["window_id"],
            "model": part.model.name,
            "params": part.model.params,
            "length": windows["length"],
            "context": context,
            "count": windows["count"],
            "bucket": windows["bucket"],
            "whitespace": windows["whitespace"],
            "entropy": windows["entropy"],
        }
        columns |= {name: values[:, k] for name, values in answers.items()}
        frames.append(polars.DataFrame(columns).cast(polars.Schema(schema)))
    return polars.concat(frames)


def _check_finite(finite_NxK: np.ndarray, part: Part) -> None:
    if finite_NxK.all():
        return
    row, k = np.argwhere(~finite_NxK)[0]
    raise RunError(
        f"model {part.model.name!r} gives logits that are not finite for window "
        f"{part.windows['window_id'][int(row)]} (context {part.prompts.contexts[k]}): "
        "its weights are damaged or overflow float32, so copy its folder again, or "
        "leave it out"
    )


def _compare(
    generated_NxKxS: np.ndarray,
    tokens_NxT: np.ndarray,
    scores: Scores,
    judged: Verdicts,
    part: Part,
    config: SweepConfig,
) -> list[str]:
    """Compares where decoding and teacher forcing first leave the suffix.

    Up to there both have read the same tokens, so they have the same logits but for
    rounding, and only a margin within rounding lets them choose different tokens.
    """
    contexts = part.prompts.model_contexts
    suffix_NxKxS = np.stack(
        [tokens_NxT[:, c : c + SUFFIX_LENGTH] for c in contexts], axis=1
    )
    mismatch_NxK = verdicts.first_false(generated_NxKxS == suffix_NxKxS)
    lines = []
    for row, k in np.argwhere(mismatch_NxK != judged.first_mismatch):
        decoded, forced = mismatch_NxK[row, k], judged.first_mismatch[row, k]
        margin = float(scores.margin[row, k, min(decoded, forced)])
        line = (
            f"model {part.model.name!r}, window {part.windows['window_id'][int(row)]}, "
            f"context {part.prompts.contexts[k]}: decoding leaves the suffix at token "
            f"{decoded}, teacher forcing at {forced} ({SUFFIX_LENGTH}: never), where "
            f"the margin is {margin:.3g}"
        )
        if not abs(margin) <= config.near_tie:
            raise RunError(
                f"{line}, more than config.near_tie={config.near_tie:g}: this is a "
                "defect, so please report it; with another precision than highest, "
                "give a larger --config.near_tie"
            )
        lines.append(line)
    return lines
