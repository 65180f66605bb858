"""At least float32: the precision that norms, weights and noise are computed in.

By explicit casts alone, so that it holds under strict dtype promotion too.
"""

from typing import Any

import jax
import jax.numpy as jnp


def wide_dtype(*dtypes: Any) -> Any:
    """The widest of some floating point or complex dtypes, at least 32 bits a number.

    Example:
      >>> wide_dtype(jnp.bfloat16, jnp.float16).name
      'float32'
    """
    return max(
        (jnp.dtype(dtype) for dtype in (jnp.float32, *dtypes)),
        key=lambda dtype: (jnp.finfo(dtype).bits, dtype.itemsize),
    )


def widened(value: Any) -> Any:
    """The value in its `wide_dtype` if it is real floating point, else as it is."""
    dtype = jnp.result_type(value)
    if not jnp.issubdtype(dtype, jnp.floating):
        return value
    return jnp.asarray(value, wide_dtype(dtype))


def tiny(dtype: Any) -> float:
    """The smallest normal number: what a square that underflows loses at most."""
    return float(jnp.finfo(dtype).tiny)


def is_narrow(aval: jax.typing.ArrayLike | Any) -> bool:
    """Whether a value is floating point of fewer than 32 bits."""
    dtype = getattr(aval, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        return False
    return jnp.finfo(dtype).bits < 32
