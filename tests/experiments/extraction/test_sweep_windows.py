import functools

import pytest

from tests.experiments.extraction import planned_sweeps
from tests.experiments.extraction.planned_sweeps import random_windows


@pytest.fixture
def plan(tmp_path):
    """`(windows_by_length, **config) -> SweepPlan` for the golden GPT-2."""
    return functools.partial(planned_sweeps.plan, tmp_path)


def test_some_windows_of_each_bucket(plan):
    # Buckets take turns, so each of three has ten windows.
    made = plan(random_windows(L60=30, L70=30), windows_per_bucket=4)
    few = {p.length: set(p.windows["window_id"]) for p in made.questions}
    for asked_windows in made.questions:
        counts = asked_windows.windows["bucket"].value_counts()
        assert sorted(counts.rows()) == [(0, 4), (1, 4), (2, 4)]
        assert asked_windows.windows["window_id"].is_sorted()
    again = plan(None, windows_per_bucket=4)
    assert {p.length: set(p.windows["window_id"]) for p in again.questions} == few
    other = plan(None, windows_per_bucket=4, seed=1)
    assert {p.length: set(p.windows["window_id"]) for p in other.questions} != few
    more = plan(None, windows_per_bucket=7)
    assert all(few[p.length] < set(p.windows["window_id"]) for p in more.questions)
    assert (
        sum(len(p.windows) for p in plan(None, windows_per_bucket=99).questions) == 60
    )
