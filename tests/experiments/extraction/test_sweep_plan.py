import functools

import pytest

from tests.experiments.extraction import planned_sweeps
from tests.experiments.extraction.planned_sweeps import random_windows


@pytest.fixture
def plan(tmp_path):
    """`(windows_by_length, **config) -> SweepPlan` for the golden GPT-2."""
    return functools.partial(planned_sweeps.plan, tmp_path)


def test_parts_cover_everything_once(plan):
    made = plan(random_windows(L60=70, L70=33), batch_size=2)
    parts = made.parts(made.models[0])
    assert [(p.question.length, p.start, p.stop) for p in parts] == [
        (60, 0, 32),
        (60, 32, 64),
        (60, 64, 70),
        (70, 0, 32),
        (70, 32, 33),
    ]
    assert len({part.name for part in parts}) == 5
