"""Times beam search beside searches and decoding that keep a whole cache per beam.

    python -m experiments.extraction.benchmark_beam_search \\
        --model=gpt_neox:layers=4:width=192:heads=6 --out=/tmp/benchmark

Three ways take turns on the same prompts, of each length in --contexts:

- beam search as `experiments.extraction.beam_search` does it: beams share the keys and
  values of their prompt, and have caches for what they generated alone;
- the same search with a cache of its own for each beam, prompt and all: the prompt is
  read once per beam, and whole caches change places;
- greedy decoding of as many copies of each prompt, each with its cache: no search at
  all, and so a bound for any that keeps whole caches.

Weights are random: what a search costs depends on shapes alone. Ratios are medians over
rounds of the ratio in a round. For numbers to rely on, let nothing else run on the
machine.
"""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tqdm
from absl import flags

from experiments import command_line, machine, models, run_folder, timing
from experiments.errors import UsageError
from experiments.extraction import beam_search, decoding, row_groups
from experiments.extraction.beam_search import Beams
from experiments.extraction.verdicts import SUFFIX_LENGTH

RESULT = "benchmark.json"
SHARED, WHOLE, GREEDY = (
    "prompts shared",
    "a whole cache per beam",
    "greedy decoding of as many copies",
)


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is timed.

    Attributes:
      model: A spec of a language model, which gets random weights.
      vocabulary_size: Entries in its vocabulary.
      contexts: Tokens of a prompt, one measurement each.
      num_prompts: Prompts in one call.
      num_beams: Beams of each prompt.
      rounds: Times that each way is timed.
    """

    model: str = "gpt_neox:layers=4:width=192:heads=6"
    vocabulary_size: int = 2048
    contexts: tuple[int, ...] = (50, 100, 250, 450)
    num_prompts: int = 2
    num_beams: int = 100
    rounds: int = 5


def main() -> None:
    """Runs the benchmark; the last line of output names the folder."""
    values: Any = flags.FLAGS
    names = [field.name for field in dataclasses.fields(Settings)]
    given = {name: values[name].value for name in names}
    try:
        given["contexts"] = tuple(int(part) for part in values.contexts)
        if not given["contexts"] or min(given["contexts"]) < 1:
            raise ValueError
    except ValueError as error:
        raise UsageError(
            f"contexts={','.join(values.contexts)!r}, expected integers >= 1 with "
            "commas between them: change --contexts"
        ) from error
    settings = Settings(**given)
    beam_search.check_num_beams(settings.num_beams, settings.vocabulary_size)
    if not values.out:
        raise UsageError("--out is missing: give --out=FOLDER")
    folder = pathlib.Path(values.out).expanduser().resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise UsageError(f"out={values.out!r} is not empty: give another --out")
    result = measure(settings)
    run_folder.write_atomically(folder / RESULT, json.dumps(result, indent=2) + "\n")
    print(_table(result))
    print(f"Benchmark: {folder}")


def measure(settings: Settings) -> dict[str, Any]:
    """Times all ways.

    Returns:
      Settings, and for each context the median of the seconds for one call of each way
      and of its ratio to the search with shared prompts in the same round.
    """
    model = models.build_language_model(
        settings.model,
        settings.vocabulary_size,
        max(settings.contexts) + SUFFIX_LENGTH,
    )
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    load_average = machine.load_average()
    with jax.default_matmul_precision("highest"):
        cells = [
            _measure_context(model, params, settings, context)
            for context in tqdm.tqdm(settings.contexts, "Contexts", unit="context")
        ]
    return {
        **dataclasses.asdict(settings),
        "machine": machine.describe(),
        "load_average": load_average,
        "cells": cells,
    }


def _measure_context(
    model: Any, params: Any, settings: Settings, context: int
) -> dict[str, Any]:
    num_beams = settings.num_beams
    shape_PxC = (settings.num_prompts, context)
    generator = np.random.default_rng(context)
    prompts_PxC = generator.integers(
        settings.vocabulary_size, size=shape_PxC, dtype=np.int32
    )

    def greedy(params: Any, prompts_PxC: jax.Array) -> jax.Array:
        copies_RxC = jnp.repeat(prompts_PxC, num_beams, axis=0)
        return decoding.generate(model, params, copies_RxC)

    ways: dict[str, Callable[..., Any]] = {
        SHARED: functools.partial(beam_search.search, model, num_beams=num_beams),
        WHOLE: functools.partial(search_with_whole_caches, model, num_beams=num_beams),
        GREEDY: greedy,
    }
    steps = {
        name: _step(jax.jit(way), params, prompts_PxC, settings.rounds)
        for name, way in ways.items()
    }
    for step in steps.values():
        step.seconds_per_step()
    seconds_R = timing.interleaved(steps)
    return {
        "context": context,
        "seconds": {name: timing.spread(s).median for name, s in seconds_R.items()},
        "times_shared": {
            name: timing.paired_ratio(s, seconds_R[SHARED]).median
            for name, s in seconds_R.items()
        },
    }


def _step(
    way: Callable[..., Any], params: Any, prompts_PxC: np.ndarray, rounds: int
) -> timing.TimedStep:
    return timing.TimedStep(
        lambda _: way(params, prompts_PxC), None, rounds, steps_per_round=1
    )


def search_with_whole_caches(
    model: Any,
    params: Any,
    prompts_PxC: jax.Array,
    *,
    num_beams: int,
    num_tokens: int = SUFFIX_LENGTH,
) -> Beams:
    """What `beam_search.search` finds, with a cache of its own for each beam.

    Args:
      model: A causal language model of `experiments.models`.
      params: Its parameters.
      prompts_PxC: i32.
      num_beams: N, at most the vocabulary's size.
      num_tokens: T.
    """
    num_prompts, context = prompts_PxC.shape
    first_row_Px1 = num_beams * jnp.arange(num_prompts)[:, None]
    cache = model.init_cache(num_prompts * num_beams, context + num_tokens - 1)
    hidden_RxCxD, cache = model.apply(
        params, jnp.repeat(prompts_PxC, num_beams, axis=0), cache, method="extend"
    )
    # At first all beams are the same: only one of them has successors.
    scores_PxN = jnp.where(jnp.arange(num_beams)[None] > 0, -jnp.inf, 0.0)
    scores_PxN = jnp.broadcast_to(scores_PxN, (num_prompts, num_beams))

    def successors(
        hidden_RxSxD: jax.Array, scores_PxN: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        logits_Rx1xV = model.apply(params, hidden_RxSxD[:, -1:], method="logits")
        logits_PxNxV = logits_Rx1xV.reshape(num_prompts, num_beams, -1)
        candidates_PxNxV = scores_PxN[..., None] + jax.nn.log_softmax(logits_PxNxV)
        scores_PxN, index_PxN = jax.lax.optimization_barrier(
            jax.lax.top_k(candidates_PxNxV.reshape(num_prompts, -1), num_beams)
        )
        return scores_PxN, *jnp.divmod(index_PxN, logits_PxNxV.shape[-1])

    def step(carry: Any, place: jax.Array) -> tuple[Any, None]:
        cache, tokens_PxNxT, scores_PxN = carry
        hidden_Rx1xD, cache = model.apply(
            params,
            jnp.take(tokens_PxNxT, place - 1, axis=2).reshape(-1, 1),
            cache,
            method="extend",
        )
        scores_PxN, parent_PxN, token_PxN = successors(hidden_Rx1xD, scores_PxN)
        cache = row_groups.take_rows(cache, (first_row_Px1 + parent_PxN).reshape(-1))
        tokens_PxNxT = jnp.take_along_axis(tokens_PxNxT, parent_PxN[..., None], axis=1)
        return (cache, tokens_PxNxT.at[:, :, place].set(token_PxN), scores_PxN), None

    scores_PxN, _, token_PxN = successors(hidden_RxCxD, scores_PxN)
    tokens_PxNxT = jnp.zeros((num_prompts, num_beams, num_tokens), jnp.int32)
    carry = (cache, tokens_PxNxT.at[:, :, 0].set(token_PxN), scores_PxN)
    (_, tokens_PxNxT, scores_PxN), _ = jax.lax.scan(
        step, carry, jnp.arange(1, num_tokens)
    )
    return Beams(tokens_PxNxT, scores_PxN)


def _table(result: dict[str, Any]) -> str:
    """Prompts per second of our way, and how much longer the others take; Markdown."""
    lines = [f"| context | prompts/s | {WHOLE} | {GREEDY} |", "|---|---|---|---|"]
    for cell in result["cells"]:
        rate = result["num_prompts"] / cell["seconds"][SHARED]
        ratios = cell["times_shared"]
        lines.append(
            f"| {cell['context']} | {rate:,.2f} | {ratios[WHOLE]:.1f}x longer | "
            f"{ratios[GREEDY]:.1f}x longer |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    defaults = Settings()
    flags.DEFINE_string("model", defaults.model, "A spec of a language model.")
    flags.DEFINE_integer(
        "vocabulary_size", defaults.vocabulary_size, "Its vocabulary.", lower_bound=2
    )
    flags.DEFINE_list(
        "contexts",
        [str(context) for context in defaults.contexts],
        "Tokens of a prompt, one measurement each, with commas between them.",
    )
    flags.DEFINE_integer(
        "num_prompts", defaults.num_prompts, "Prompts in one call.", lower_bound=1
    )
    flags.DEFINE_integer(
        "num_beams", defaults.num_beams, "Beams of each prompt.", lower_bound=1
    )
    flags.DEFINE_integer(
        "rounds", defaults.rounds, "Times that each way is timed.", lower_bound=1
    )
    flags.DEFINE_string("out", "", "The folder to write; it must be new or empty.")
    command_line.run(main, config_keys=[])
