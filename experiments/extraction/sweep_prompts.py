"""What language models are asked to continue: windows, cut into prompt and suffix."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import polars

from experiments.errors import UsageError
from experiments.extraction.sweep_config import BOS, SweepConfig
from experiments.extraction.verdicts import SUFFIX_LENGTH


@dataclasses.dataclass(frozen=True, eq=False)
class Prompts:
    """Windows of one length, and where they are cut into prompt and suffix.

    Attributes:
      length: Of the windows, in tokens.
      contexts: Lengths of the prompts, ascending; one pass of a model serves them all.
      windows: Their rows, as `sweep_windows.choose` gives them.
      first_token: Put before each window, for prompts that would be empty; None else.
    """

    length: int
    contexts: tuple[int, ...]
    windows: polars.DataFrame
    first_token: int | None

    @property
    def name(self) -> str:
        """Distinguishes the prompts of one sweep."""
        return f"{self.length}" if self.first_token is None else f"{self.length}-bos"

    @property
    def model_contexts(self) -> tuple[int, ...]:
        """Tokens that the model sees before the suffix, for each of the contexts."""
        return self.contexts if self.first_token is None else (1,)

    @property
    def num_positions(self) -> int:
        """Tokens that are fed to the model: the last suffix token is not one."""
        return max(self.model_contexts) + SUFFIX_LENGTH - 1

    def read(self, tokens_NxL: np.ndarray) -> np.ndarray:
        """Of the tokens of some windows those that a model reads and predicts, i32."""
        if self.first_token is not None:
            tokens_NxL = np.insert(tokens_NxL, 0, self.first_token, axis=1)
        return np.ascontiguousarray(tokens_NxL[:, : self.num_positions + 1], np.int32)


def make(
    config: SweepConfig, by_length: Mapping[int, polars.DataFrame], eos_id: int | None
) -> tuple[tuple[Prompts, ...], tuple[str, ...]]:
    """Cuts windows as the config says.

    Args:
      config: Of the sweep.
      by_length: Windows, from `sweep_windows.choose`.
      eos_id: The separator of the corpus, if there is one.

    Returns:
      Prompts by length, and what is left out, a line each.

    Raises:
      UsageError: No window is long enough, or there is no separator to prompt with.
    """
    prompts: list[Prompts] = []
    num_short = num_empty = 0
    for length, rows in by_length.items():
        longest = length - SUFFIX_LENGTH
        wanted = sorted(config.contexts) or [longest]
        contexts = [context for context in wanted if 0 <= context <= longest]
        if not contexts:
            num_short += len(rows)
        if 0 in contexts and config.empty_prompt == BOS:
            prompts.append(Prompts(length, (0,), rows, _separator(eos_id)))
        elif 0 in contexts:
            num_empty += len(rows)
        prompted = tuple(context for context in contexts if context)
        if prompted:
            prompts.append(Prompts(length, prompted, rows, None))
    _check_contexts(config, prompts, list(by_length))
    notes = []
    if num_short:
        notes.append(
            f"{num_short:,} windows are left out: they are shorter than a prompt and a "
            f"suffix of {SUFFIX_LENGTH} tokens"
        )
    if num_empty:
        notes.append(
            f"{num_empty:,} windows are left out of context 0: their prompts are "
            "empty; --config.empty_prompt=bos would prompt with the separator"
        )
    return tuple(prompts), tuple(notes)


def _separator(eos_id: int | None) -> int:
    if eos_id is None:
        raise UsageError(
            "config.empty_prompt='bos' needs the separator of the corpus, and the "
            "evaluation set has none: set --config.empty_prompt=skip"
        )
    return eos_id


def _check_contexts(
    config: SweepConfig, prompts: Sequence[Prompts], lengths: list[int]
) -> None:
    """Every context that was asked for has windows, and there is some prompt."""
    longest = max(lengths, default=0) - SUFFIX_LENGTH
    unused = [context for context in config.contexts if context > longest]
    if unused:
        raise UsageError(
            f"config.contexts has {unused[0]}, but no window in {config.windows!r} has "
            f"so many tokens and a suffix of {SUFFIX_LENGTH} (they have {lengths}): "
            "lower --config.contexts, or build longer windows"
        )
    if not prompts:
        raise UsageError(
            f"config.windows={config.windows!r} has windows of {lengths} tokens, "
            f"none with a prompt before its suffix of {SUFFIX_LENGTH}: build longer "
            "windows, or set --config.empty_prompt=bos to prompt with the separator"
        )
