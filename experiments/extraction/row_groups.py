"""A batch processed a few rows at a time, inside one compiled program."""

from collections.abc import Callable
from typing import Any

import jax

# Activations of about so many tokens stay in a CPU's caches: a teacher-forced pass of a
# 124M-parameter GPT-2 over 32 rows of 99 tokens took 12 % less time by eights than at
# once. An accelerator is the faster the more it gets at once.
_TOKENS_ON_CPU = 1024


def rows_at_once(batch_size: int, tokens_per_row: int, platform: str) -> int:
    """How many rows to process at once; a divisor of `batch_size`.

    Example:
      >>> rows_at_once(32, tokens_per_row=99, platform="cpu")
      8
      >>> rows_at_once(32, tokens_per_row=99, platform="gpu")
      32
    """
    if platform != "cpu":
        return batch_size
    fitting = max(1, _TOKENS_ON_CPU // tokens_per_row)
    return largest_divisor(batch_size, fitting)


def largest_divisor(number: int, limit: int) -> int:
    """The largest divisor of `number` that is at most `limit`.

    Example:
      >>> largest_divisor(50, 41)
      25
    """
    return max(n for n in range(1, min(number, limit) + 1) if number % n == 0)


def map_rows(
    function: Callable[..., Any], num_rows: int, *arrays_BxT: jax.Array
) -> Any:
    """`function(*arrays_BxT)`, computed from `num_rows` rows after another.

    Args:
      function: From arrays of N rows to a tree of arrays of N rows; a scalar in it has
        to be the same whatever the rows are.
      num_rows: A divisor of B.
      *arrays_BxT: At least one, each with B rows.

    Example:
      >>> import numpy as np
      >>> map_rows(lambda x_Nx1: x_Nx1 + 1, 2, np.zeros((6, 1))).shape
      (6, 1)
    """
    batch_size = arrays_BxT[0].shape[0]
    if num_rows == batch_size:
        return function(*arrays_BxT)
    grouped = [
        x.reshape(batch_size // num_rows, num_rows, *x.shape[1:]) for x in arrays_BxT
    ]
    results = jax.lax.map(lambda group: function(*group), grouped)

    def merged(leaf: jax.Array) -> jax.Array:
        if leaf.ndim == 1:
            return leaf[0]
        return leaf.reshape(batch_size, *leaf.shape[2:])

    return jax.tree.map(merged, results)


def take_rows(tree: Any, rows_N: jax.Array) -> Any:
    """The rows `rows_N` of every array in `tree`; scalars as they are.

    Example:
      >>> import numpy as np
      >>> take_rows((np.array([4, 5, 6]), np.array(9)), np.array([2, 0]))
      (array([6, 4]), array(9))
    """
    return jax.tree.map(lambda x: x[rows_N] if x.ndim else x, tree)
