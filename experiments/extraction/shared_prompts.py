"""Many continuations of each prompt, in memory that does not grow with the prompts.

Continuations share the keys and values of their prompt, and have a cache of their own
for what they generated alone. With 100 continuations, a whole cache for each would need
a hundred times the memory of greedy decoding. What is left is bounded by taking few
prompts at a time.
"""

from collections.abc import Callable
from typing import Any

import jax
from absl import logging

from experiments.extraction import row_groups
from experiments.models.decoder_config import DecoderConfig

# For the prompts that are continued at once. A single one may need more.
_BYTES_AT_ONCE = 2**31


def map_prompts(
    function: Callable[..., Any],
    config: DecoderConfig,
    prompts_PxC: jax.Array,
    *arrays_PxN: jax.Array,
    num_continuations: int,
    num_tokens: int,
) -> Any:
    """`function(prompts_PxC, *arrays_PxN)`, a few prompts after another.

    Args:
      function: From arrays of any number of rows to a tree of arrays of so many rows.
      config: Of the model.
      prompts_PxC: i32.
      *arrays_PxN: More arrays of P rows.
      num_continuations: Of each prompt.
      num_tokens: Of each continuation.
    """
    num_prompts, context = prompts_PxC.shape
    num_bytes = bytes_per_prompt(config, context, num_continuations, num_tokens)
    fitting = row_groups.rows_at_once(
        num_prompts, max(context, num_continuations), jax.default_backend()
    )
    num_rows = row_groups.largest_divisor(
        num_prompts, min(fitting, max(1, _BYTES_AT_ONCE // num_bytes))
    )
    # Once for each program, since this runs when it is traced.
    logging.info(
        "%d continuations of %d tokens: %d of %d prompts at once, about %.0f MiB",
        num_continuations,
        context,
        num_rows,
        num_prompts,
        num_rows * num_bytes / 2**20,
    )
    return row_groups.map_rows(function, num_rows, prompts_PxC, *arrays_PxN)


def bytes_per_prompt(
    config: DecoderConfig, context: int, num_continuations: int, num_tokens: int
) -> int:
    """About the memory for one prompt and its continuations, weights apart.

    Example:
      >>> from experiments.models.decoder_config import gpt_j
      >>> config = gpt_j(50_400, 2_048, layers=28, width=4_096, heads=16)
      >>> f"{bytes_per_prompt(config, 450, 100, num_tokens=50) / 2**30:.1f} GiB"
      '8.8 GiB'
    """
    # Keys and values, of the prompt once, and of continuations before and after they
    # are put in another order.
    tokens_held = context + 2 * num_continuations * (num_tokens - 1)
    cache = 2 * config.num_layers * config.width * tokens_held
    # Attention's scores and weights, in one layer at a time; logits and their like.
    pairs = max(context * context, num_continuations * (context + num_tokens))
    logits = 2 * num_continuations * config.vocabulary_size
    return 4 * (cache + 2 * config.num_heads * pairs + logits)
