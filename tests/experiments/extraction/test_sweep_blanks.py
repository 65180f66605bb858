import numpy as np
import polars
import pytest

from experiments.errors import UsageError
from experiments.extraction import infilling, sweep_blanks
from experiments.extraction.sweep_config import SweepConfig
from experiments.models.sentinels import Sentinels


def windows_of(length):
    return polars.DataFrame({"tokens": [[0] * length, [1] * length]})


@pytest.mark.parametrize("masking", ["iid", "spans"])
def test_what_is_kept_and_what_is_read(masking):
    config = SweepConfig(masking=masking)
    asked = sweep_blanks.make(config, {20: windows_of(20), 200: windows_of(200)})
    assert [(a.length, a.contexts, a.masking) for a in asked] == [
        (20, (17,), masking),
        (200, (170,), masking),
    ]
    assert len({a.name for a in asked}) == 2
    for windows in asked:
        batch = infilling.make_blanks(
            np.zeros((40, windows.length), np.int32),
            range(40),
            seed=0,
            masking=masking,
            sentinels=Sentinels(299, 100),
            eos_id=1,
            pad_id=0,
        )
        most = (batch.num_inputs_N + batch.num_targets_N).max()
        assert most <= windows.num_positions <= windows.length * 1.4


def test_no_window_to_ask_about():
    with pytest.raises(UsageError, match="'nothing' holds no window: build another"):
        sweep_blanks.make(SweepConfig(windows="nothing", masking="iid"), {})
