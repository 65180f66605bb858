"""Whether a model fills the blanks of one part of the windows."""

import dataclasses

from experiments.extraction import answers, infilling
from experiments.extraction.answers import Answer
from experiments.extraction.asking import Asker, Progress
from experiments.extraction.sweep_blanks import BlankedWindows
from experiments.extraction.sweep_config import SweepConfig
from experiments.extraction.sweep_plan import Part
from experiments.models.t5_config import T5Config


def answer(asker: Asker, part: Part, config: SweepConfig, progress: Progress) -> Answer:
    """Asks a T5 about the windows of `part`.

    Args:
      asker: The model.
      part: Windows of which some tokens are dropped.
      config: Of the sweep.
      progress: Called with the number of records that are done since the last call.

    Raises:
      RunError: Logits are not finite.
    """
    asked, architecture = part.question, part.model.config
    assert isinstance(asked, BlankedWindows)
    assert isinstance(architecture, T5Config)
    batch = infilling.make_blanks(
        part.tokens(),
        part.windows["window_id"].to_numpy(),
        seed=config.seed,
        masking=asked.masking,
        sentinels=architecture.sentinels,
        eos_id=architecture.eos_id,
        pad_id=architecture.pad_id,
    )
    scores = asker.blanks(batch, progress)
    finite_N = infilling.finite(scores, batch.num_targets_N)
    answers.check_finite(finite_N[:, None], part)
    judged = infilling.judge(scores, batch.num_targets_N)
    columns = {f.name: getattr(judged, f.name) for f in dataclasses.fields(judged)}
    columns["num_targets"] = batch.num_targets_N
    found = {name: values_N[:, None] for name, values_N in columns.items()}
    return Answer(answers.rows(part, config, found))
