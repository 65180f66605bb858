import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.extraction import row_groups


@given(number=st.integers(1, 300), limit=st.integers(1, 400))
def test_largest_divisor(number, limit):
    divisors = [n for n in range(1, number + 1) if number % n == 0 and n <= limit]
    assert row_groups.largest_divisor(number, limit) == max(divisors)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 6])
def test_groups_make_no_difference(num_rows):
    x_BxT = jnp.arange(6 * 4.0).reshape(6, 4)
    y_Bx1 = jnp.arange(6)[:, None]

    def function(x_NxT, y_Nx1):
        assert x_NxT.shape == (num_rows, 4)
        return {"sum": x_NxT + y_Nx1, "last": x_NxT[:, -1:]}, jnp.asarray(7)

    tree, scalar = row_groups.map_rows(function, num_rows, x_BxT, y_Bx1)
    np.testing.assert_array_equal(tree["sum"], x_BxT + y_Bx1)
    np.testing.assert_array_equal(tree["last"], x_BxT[:, -1:])
    assert scalar.shape == ()
    assert scalar == 7


def test_a_long_row_goes_alone():
    assert row_groups.rows_at_once(32, tokens_per_row=5_000, platform="cpu") == 1
    assert row_groups.rows_at_once(7, tokens_per_row=200, platform="cpu") == 1
    assert row_groups.rows_at_once(7, tokens_per_row=10, platform="cpu") == 7
    assert row_groups.rows_at_once(32, tokens_per_row=5_000, platform="tpu") == 32
