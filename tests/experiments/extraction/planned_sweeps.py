"""Plans of sweeps of a golden model over windows that are made up."""

import numpy as np

from experiments.extraction import sweep_config, sweep_plan
from tests.experiments.extraction import known_windows
from tests.experiments.extraction.known_windows import GOLDEN


def random_windows(**num_by_length):
    random = np.random.default_rng(0)
    return {
        int(name[1:]): random.integers(
            2, known_windows.VOCABULARY_SIZE, (n, int(name[1:]))
        )
        for name, n in num_by_length.items()
    }


def plan(
    folder, windows, model=GOLDEN / "gpt2", manifest=None, tokenizer=None, **values
):
    """`SweepPlan` of one model and windows by length; None: those in `folder`."""
    windows_folder = folder / "windows"
    if windows is not None:
        known_windows.write(windows_folder, windows, tokenizer, **(manifest or {}))
    config = sweep_config.make(
        models=(str(model),), windows=str(windows_folder), **values
    )
    return sweep_plan.make_plan(sweep_config.parse(config))
