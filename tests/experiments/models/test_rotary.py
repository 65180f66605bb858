import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.models.rotary import rotate, rotation


def by_hand(x_K, position, rotary_dim, base, rotary):
    """One head at one position, pair by pair, in float64."""
    x_K, half = np.array(x_K, np.float64), rotary_dim // 2
    out_K = x_K.copy()
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if rotary == "interleaved" else (i, i + half)
        angle = position * base ** (-2 * i / rotary_dim)
        out_K[a] = x_K[a] * np.cos(angle) - x_K[b] * np.sin(angle)
        out_K[b] = x_K[b] * np.cos(angle) + x_K[a] * np.sin(angle)
    return out_K


@pytest.mark.parametrize("rotary", ["interleaved", "half_split"])
@pytest.mark.parametrize("rotary_dim", [2, 6, 8])
def test_by_hand(rotary, rotary_dim):
    x_BxSxHxK = jax.random.normal(jax.random.key(0), (2, 3, 2, 8))
    positions_S = np.array([0, 7, 2047])
    turn = rotation(jnp.asarray(positions_S), rotary_dim, 500.0)
    found = np.asarray(rotate(x_BxSxHxK, turn, rotary))
    for b, s, h in np.ndindex(2, 3, 2):
        expected = by_hand(
            x_BxSxHxK[b, s, h], positions_S[s], rotary_dim, 500.0, rotary
        )
        # At position 2,047 a float32 angle is known to about 1e-4.
        np.testing.assert_allclose(found[b, s, h], expected, atol=1e-3)
        if positions_S[s] < 10:
            np.testing.assert_allclose(found[b, s, h], expected, atol=2e-6)


@pytest.mark.parametrize("rotary", ["interleaved", "half_split"])
def test_scores_depend_on_the_distance_alone(rotary):
    q_K, k_K = jax.random.normal(jax.random.key(0), (2, 8))

    def score(query_position, key_position):
        q, k = (
            rotate(x[None, None, None], rotation(jnp.array([p]), 8, 1e4), rotary)
            for x, p in ((q_K, query_position), (k_K, key_position))
        )
        return float(jnp.vdot(q, k))

    assert score(5, 2) == pytest.approx(score(103, 100), abs=1e-4)
    assert abs(score(5, 2) - score(5, 4)) > 0.01
