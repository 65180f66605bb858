import numpy as np
import pytest

from experiments import timing
from experiments.timing import TimedStep


def counting_step(rounds, steps_per_round=1, fails_at=None):
    def step(count):
        if count == fails_at:
            raise MemoryError("out of memory")
        return count + 1

    return TimedStep(step, 0, rounds, steps_per_round)


@pytest.mark.parametrize(("rounds", "of"), [(1, 1), (1, 7), (3, 7), (5, 31), (31, 31)])
def test_sits_out_rounds_at_even_distances(rounds, of):
    steps = {"often": counting_step(of), "rarely": counting_step(rounds)}
    seconds = timing.interleaved(steps)
    assert {len(s) for s in seconds.values()} == {of}
    assert not np.isnan(seconds["often"]).any()
    taken = np.flatnonzero(~np.isnan(seconds["rarely"]))
    assert len(taken) == rounds
    distances = np.diff(taken)
    assert rounds == 1 or distances.max() - distances.min() <= 1


def test_steps_continue_from_their_own_state():
    steps = {"one": counting_step(4), "three": counting_step(4, steps_per_round=3)}
    seen = []
    timing.interleaved(steps, seen.append)
    assert steps["one"].state == 4
    assert steps["three"].state == 12
    assert sorted(seen) == ["one"] * 4 + ["three"] * 4


def test_the_order_changes_from_round_to_round():
    seen = []
    timing.interleaved({name: counting_step(20) for name in "abc"}, seen.append)
    rounds = [tuple(seen[i : i + 3]) for i in range(0, 60, 3)]
    assert all(sorted(r) == ["a", "b", "c"] for r in rounds)
    assert len(set(rounds)) > 1


def test_names_the_step_that_failed():
    steps = {"fine": counting_step(5), "broken": counting_step(5, fails_at=2)}
    with pytest.raises(timing.StepFailed) as error:
        timing.interleaved(steps)
    assert error.value.name == "broken"
    assert isinstance(error.value.__cause__, MemoryError)


def test_warming_up_fits_the_steps_to_the_round(monkeypatch):
    # A clock that advances by 10 ms whenever it is read: a block then lasts 10 ms.
    monkeypatch.setattr(
        timing.time, "perf_counter", iter(np.arange(0, 9, 0.01)).__next__
    )
    step = timing.warmed_up(lambda n: n + 1, 0, rounds=3, round_seconds=0.095)
    assert step.steps_per_round == 10
    assert step.rounds == 3
    assert step.state >= 2
    longer = timing.warmed_up(lambda n: n, 0, rounds=3, round_seconds=0.001)
    assert longer.steps_per_round == 1


def test_a_ratio_pairs_the_times_of_a_round():
    # The machine is ten times slower in the second half: the ratio of medians is off.
    baseline = np.array([1.0, 1.0, 1.0, 10.0, 10.0])
    seconds = np.array([2.0, np.nan, np.nan, 20.0, 20.0])
    assert np.nanmedian(seconds) / np.median(baseline) == 20
    assert timing.paired_ratio(seconds, baseline) == (2, 2, 2)


def test_a_step_much_longer_than_a_round_is_warmed_up_by_one():
    step = counting_step(3).step
    assert timing.warmed_up(step, 0, rounds=3, round_seconds=1e-12).state == 1
