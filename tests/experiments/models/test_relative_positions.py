import math
import pathlib

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from experiments import models
from experiments.models.relative_positions import buckets

GOLDEN = pathlib.Path(__file__).parent / "golden"


@pytest.mark.parametrize("name", ["t5_v1_1", "t5_first"])
@pytest.mark.parametrize("stack", ["encoder", "decoder"])
def test_buckets_of_the_reference(name, stack):
    """At all distances up to 300, in tables of 32 and of 20 rows."""
    config = models.load(GOLDEN / name)[0].config
    expected = np.load(GOLDEN / name / "expected.npz")
    found = buckets(
        expected["distances"],
        bidirectional=stack == "encoder",
        num_buckets=config.num_buckets,
        max_distance=config.max_distance,
    )
    np.testing.assert_array_equal(found, expected[f"{stack}_buckets"])
    assert found.dtype == np.int32
    assert expected["distances"].min() == -300


@hypothesis.given(
    num_buckets=st.integers(4, 70), more=st.integers(1, 300), two_sided=st.booleans()
)
def test_buckets_are_ordered_and_within_the_table(num_buckets, more, two_sided):
    max_distance = num_buckets // 2 + more
    options = {"num_buckets": num_buckets, "max_distance": max_distance}
    distances = np.arange(0, 2 * max_distance)
    before = buckets(-distances, bidirectional=two_sided, **options)
    after = buckets(distances, bidirectional=two_sided, **options)
    num_sided = num_buckets // 2 if two_sided else num_buckets
    assert (np.diff(before) >= 0).all()
    # From `max_distance` on, it is the last bucket.
    assert before[0] == 0
    assert (before[max_distance:] == num_sided - 1).all()
    assert before.max() == num_sided - 1
    np.testing.assert_array_equal(
        after[1:], before[1:] + num_sided if two_sided else 0 * before[1:]
    )
    # The formula in the docstring, where floating point is not near an integer.
    m = num_sided // 2
    for distance in range(m, max_distance):
        exact = (num_sided - m) * math.log(distance / m) / math.log(max_distance / m)
        if abs(exact - round(exact)) > 1e-9:
            assert before[distance] == m + min(num_sided - m - 1, math.floor(exact))
