"""Sides: what a value depends on, through calls, loops and what has no derivative."""

import jax
import jax.numpy as jnp
import pytest

from dpjax import sides
from dpjax.sides import Side

CONSTANT, PARAMETER, DATA = Side


def _sides(fun, *given):
    """The sides of the outputs of a function of scalars of the given sides."""
    closed = jax.make_jaxpr(fun)(*[1.0] * len(given))
    return sides.of_outputs(closed.jaxpr, given)


@pytest.mark.parametrize(
    ("fun", "expected"),
    [
        (lambda w, x: w * 2, PARAMETER),
        (lambda w, x: x * 2, DATA),
        (lambda w, x: w * x, DATA),
        (lambda w, x: jnp.sin(jnp.ones(2)), CONSTANT),
        (lambda w, x: 1.0, CONSTANT),
        (lambda w, x: jax.jit(jnp.sin)(w), PARAMETER),
        (lambda w, x: jax.checkpoint(jnp.sin)(w), PARAMETER),
        (lambda w, x: jax.lax.stop_gradient(w), CONSTANT),
        (lambda w, x: jnp.sign(w) + jnp.floor(w), CONSTANT),
        (lambda w, x: w > 0, CONSTANT),
        (lambda w, x: w.astype(jnp.int32), CONSTANT),
        (lambda w, x: (w > 0).astype(jnp.float32), CONSTANT),
        (lambda w, x: jnp.where(w > 0, w, 0.0), PARAMETER),
        # Of the example, what has no derivative still depends on it.
        (lambda w, x: x > 0, DATA),
        (lambda w, x: jax.lax.stop_gradient(x), DATA),
        (lambda w, x: jax.lax.stop_gradient(w * x), DATA),
    ],
)
def test_side_of_a_value(fun, expected):
    assert _sides(fun, PARAMETER, DATA) == [expected]


def test_what_is_carried_takes_the_largest_side():
    def shifted(w, x):
        def step(carry, _):
            a, b, c, d = carry
            return (b, c, x, d), a

        carry, outs = jax.lax.scan(step, (w, w, 1.0, w), None, length=2)
        return *carry, outs

    # It takes three rounds for the example to reach the first.
    assert _sides(shifted, PARAMETER, DATA) == [DATA, DATA, DATA, PARAMETER, DATA]


def test_a_loop_that_puts_a_parameter_into_its_state():
    def fun(w, x):
        return jax.lax.scan(lambda h, _: (w, (h, h > 0)), 1.0, None, length=2)

    last, before, flag = _sides(fun, PARAMETER, DATA)
    assert (last, before, flag) == (PARAMETER, PARAMETER, CONSTANT)
