"""What a sweep asks each of its models."""

from experiments.extraction import sweep_blanks, sweep_prompts, sweep_windows
from experiments.extraction.evaluation_set import EvaluationSet
from experiments.extraction.sweep_blanks import BlankedWindows
from experiments.extraction.sweep_config import SweepConfig
from experiments.extraction.sweep_prompts import Prompts

Question = Prompts | BlankedWindows


def make(
    config: SweepConfig, windows: EvaluationSet
) -> tuple[tuple[Question, ...], tuple[str, ...]]:
    """What is asked, by length, and what is left out, a line each.

    Raises:
      UsageError: There is nothing to ask.
      RunError: The tokenizer of the evaluation set is damaged.
    """
    by_length = sweep_windows.choose(windows.windows, config)
    if config.masking:
        return sweep_blanks.make(config, by_length), ()
    return sweep_prompts.make(config, by_length, windows.manifest.get("eos_id"))
