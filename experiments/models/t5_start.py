"""Where the training of a small T5 starts, so that it learns to fill blanks.

To fill a blank, the encoder has to bring its neighbours to the blank's sentinel, and
the decoder, reading the same sentinel, has to find it among the inputs. Each helps only
once the other is there. From random parameters, models of a few million parameters
learn instead which tokens a text has, wherever they are, and stay there for thousands
of steps. Started with a little of both, they go on to learn the text. What is learned
is up to training, and the architecture is that of T5 v1.1.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.models import relative_positions
from experiments.models.t5_config import T5Config

# The first heads of the encoder start with an eye on one neighbour each.
_DISTANCES = (-1, 1, -2, 2)
# Added to a score, so that the neighbour outweighs a few hundred other inputs.
_NEIGHBOUR_SCORE = 6.0
# Times 1/sqrt(head_dim), the scale of queries at random.
_SHARPNESS = 3.0


def with_lookup(variables: Mapping[str, Any], config: T5Config) -> dict[str, Any]:
    """Variables of a T5 that start to look at neighbours and to find equal tokens.

    The queries of cross-attention become its keys, scaled: an input then has the
    largest score where it is what the decoder has just read. The position biases of
    the first four heads of the encoder favour the distances -1, 1, -2 and 2.

    Args:
      variables: As `T5.init` returns them.
      config: Of the model.

    Returns:
      Variables of the same shapes.
    """
    params = dict(variables["params"])
    params["decoder"] = {
        name: _finding_equals(layer, config) if name.startswith("layers_") else layer
        for name, layer in params["decoder"].items()
    }
    params["encoder"] = {
        **params["encoder"],
        "position_bias": {
            "embedding": _favouring_neighbours(
                params["encoder"]["position_bias"]["embedding"], config
            )
        },
    }
    return {**variables, "params": params}


def _finding_equals(layer: Mapping[str, Any], config: T5Config) -> dict[str, Any]:
    attention = layer["cross_attention"]
    scale = _SHARPNESS * config.head_dim**-0.5
    query = {"kernel": scale * attention["key"]["kernel"]}
    return {**layer, "cross_attention": {**attention, "query": query}}


def _favouring_neighbours(bias_NxH: jax.Array, config: T5Config) -> jax.Array:
    distances = np.array(_DISTANCES[: config.num_heads])
    buckets = relative_positions.buckets(
        distances,
        bidirectional=True,
        num_buckets=config.num_buckets,
        max_distance=config.max_distance,
    )
    heads = jnp.arange(len(distances))
    return bias_NxH.at[buckets, heads].add(_NEIGHBOUR_SCORE)
