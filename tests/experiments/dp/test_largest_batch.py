import hypothesis
import hypothesis.strategies as st
import pytest

from experiments.dp.largest_batch import RESOLUTION, largest_batch

MOST = 10**6


def search(bytes_for, budget, start=16, most=MOST):
    asked = {}

    def counted(batch_size):
        assert 1 <= batch_size <= most
        assert batch_size not in asked, "compiled twice"
        asked[batch_size] = bytes_for(batch_size)
        return asked[batch_size]

    return largest_batch(counted, budget, start=start, most=most), asked


def check(found, asked, budget, most=MOST):
    if found:
        assert asked[found] <= budget
    if found < most:
        above = min(n for n in asked if n > found)
        assert asked[above] > budget
        assert above - found <= max(1, int(found * RESOLUTION))


@pytest.mark.parametrize("start", [1, 16, 1000, 10**5])
@pytest.mark.parametrize(("fixed", "slope"), [(0, 1), (10**6, 3), (5, 10**4)])
def test_affine_memory_takes_few_compilations(start, fixed, slope):
    budget = fixed + slope * 5000 + slope // 2
    found, asked = search(lambda n: fixed + slope * n, budget, start)
    check(found, asked, budget)
    assert 5000 / (1 + 2 * RESOLUTION) <= found <= 5000
    assert len(asked) <= 6


@hypothesis.given(
    steps=st.lists(st.integers(0, 10**6), min_size=1, max_size=40),
    budget=st.integers(0, 10**7),
    start=st.integers(1, 2000),
    most=st.integers(1, 2000),
)
def test_any_memory_that_does_not_decrease(steps, budget, start, most):
    def bytes_for(batch_size):
        # Constant, then a jump, then affine, and so on.
        return sum(steps[i % len(steps)] for i in range(0, batch_size, 7))

    found, asked = search(bytes_for, budget, start, most)
    check(found, asked, budget, most)
    assert len(asked) <= 4 * 12 + 4


def test_nothing_fits():
    assert search(lambda n: 10 + n, 10)[0] == 0


def test_everything_fits():
    found, asked = search(lambda n: n, MOST)
    assert found == MOST
    assert len(asked) <= 8
    assert search(lambda n: 0, 0)[0] == MOST


def test_the_end_of_the_search_is_itself_asked_about():
    found, asked = search(lambda n: n, 100, start=50, most=101)
    assert found == 100
    assert set(asked) >= {100, 101}
