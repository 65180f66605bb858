"""Times verdicts and decoding, beside Hugging Face `generate` on the same weights.

    python -m experiments.extraction.benchmark_sweep \\
        --model=gpt2:layers=12:width=768:heads=12 --out=/tmp/benchmark \\
        --transformers_python=/path/to/an/environment/bin/python

What a verdict costs depends on the shapes, and on how many windows have to be read to
their end, so the model has random weights. A share of the windows (--extractable) ends
with what the model itself generates, the others with random tokens. All ways are timed
in turns on the same windows; ratios are medians over rounds of the ratio in a round.

--transformers_python names an interpreter with torch and transformers; without it only
our own ways are timed. The folder holds the model, the prompts and benchmark.json. For
numbers to rely on, let nothing else run on the machine.
"""

import contextlib
import dataclasses
import json
import pathlib
import subprocess
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from experiments import command_line, machine, models, run_folder, timing
from experiments.errors import RunError, UsageError
from experiments.extraction.asking import Asker
from experiments.extraction.verdicts import SUFFIX_LENGTH

RESULT, MODEL, PROMPTS = "benchmark.json", "model", "prompts.npy"
TRANSFORMERS = "transformers generate"
ALL_COLUMNS, VERDICTS_ONLY, DECODING = "all columns", "verdicts only", "decoding"
_NEAR_TIE = 1e-3


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is timed.

    Attributes:
      model: A spec of a language model, which gets random weights.
      vocabulary_size: Entries in its vocabulary.
      batch_size: Windows at once.
      context: Tokens of a prompt.
      extractable: Share of windows that end as the model would have it.
      rounds: Times that each way is timed.
      transformers_python: An interpreter to compare with; empty: none.
    """

    model: str = "gpt2:layers=12:width=768:heads=12"
    vocabulary_size: int = 50257
    batch_size: int = 32
    context: int = 50
    extractable: float = 0.3
    rounds: int = 5
    transformers_python: str = ""


def main() -> None:
    """Runs the benchmark; the last line of output names the folder."""
    values: Any = flags.FLAGS
    names = [field.name for field in dataclasses.fields(Settings)]
    settings = Settings(**{name: values[name].value for name in names})
    if not values.out:
        raise UsageError("--out is missing: give --out=FOLDER")
    if not 0 <= settings.extractable <= 1:
        raise UsageError(
            f"extractable={settings.extractable}, expected a share from 0 to 1: "
            "change --extractable"
        )
    folder = pathlib.Path(values.out).expanduser().resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise UsageError(f"out={values.out!r} is not empty: give another --out")
    result = measure(folder, settings)
    run_folder.write_atomically(folder / RESULT, json.dumps(result, indent=2) + "\n")
    print(_table(result))
    print(f"Benchmark: {folder}")


def measure(folder: pathlib.Path, settings: Settings) -> dict[str, Any]:
    """Times all ways, in a folder that is empty.

    Returns:
      Settings, and for each way the median of the seconds for one batch and of its
      ratio to that of transformers in the same round.
    """
    context = settings.context
    model = models.build_language_model(
        settings.model, settings.vocabulary_size, context + SUFFIX_LENGTH
    )
    params = _confident(
        jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    )
    models.save(folder / MODEL, model, params)
    with (
        jax.default_matmul_precision("highest"),
        contextlib.ExitStack() as stack,
    ):
        asker = Asker(model, params, settings.batch_size)
        tokens_BxT = _windows(asker, settings)
        ways: dict[str, Callable[[], Any]] = {
            ALL_COLUMNS: lambda: asker.scores(tokens_BxT, (context,)),
            VERDICTS_ONLY: lambda: asker.extractable(tokens_BxT, context, _NEAR_TIE),
            DECODING: lambda: asker.generate(tokens_BxT, context),
        }
        reference = None
        if settings.transformers_python:
            reference = _Transformers(
                folder, tokens_BxT[:, :context], settings.transformers_python, stack
            )
            agreement = (reference.generated_BxS == ways[DECODING]()).all(axis=1).mean()
            ways[TRANSFORMERS] = reference.generate
        load_average = machine.load_average()
        seconds_R = _timed(ways, settings.rounds)
    recorded = dataclasses.asdict(settings)
    del recorded["transformers_python"]
    result = {
        **recorded,
        "machine": machine.describe(),
        "load_average": load_average,
        "seconds": {name: timing.spread(s).median for name, s in seconds_R.items()},
    }
    if reference is None:
        return result
    return result | {
        "versions_of_transformers": reference.versions,
        "share_of_equal_generations": float(agreement),
        "times_faster_than_transformers": {
            name: timing.paired_ratio(seconds_R[TRANSFORMERS], s).median
            for name, s in seconds_R.items()
        },
    }


def _confident(params: Any) -> Any:
    """Larger logits: those of random weights lie so close that many nearly tie."""
    norm = jax.tree.map(lambda leaf: 30 * leaf, params["params"]["final_norm"])
    return {"params": params["params"] | {"final_norm": norm}}


def _windows(asker: Asker, settings: Settings) -> np.ndarray:
    """i32[B, context + 50], of which a share ends as the model would have it."""
    generator = np.random.default_rng(0)
    shape_BxT = (settings.batch_size, settings.context + SUFFIX_LENGTH)
    tokens_BxT = generator.integers(
        settings.vocabulary_size, size=shape_BxT, dtype=np.int32
    )
    num_extractable = round(settings.extractable * settings.batch_size)
    generated_BxS = asker.generate(tokens_BxT, settings.context)
    tokens_BxT[:num_extractable, settings.context :] = generated_BxS[:num_extractable]
    return tokens_BxT


def _timed(ways: dict[str, Callable[[], Any]], rounds: int) -> dict[str, np.ndarray]:
    steps = {name: _step(way, rounds) for name, way in ways.items()}
    for step in steps.values():
        step.seconds_per_step()
    return timing.interleaved(steps)


def _step(way: Callable[[], Any], rounds: int) -> timing.TimedStep:
    return timing.TimedStep(lambda _: way(), None, rounds, steps_per_round=1)


class _Transformers:
    """transformers in an interpreter of its own, which waits for orders."""

    def __init__(
        self,
        folder: pathlib.Path,
        prompts_BxC: np.ndarray,
        python: str,
        stack: contextlib.ExitStack,
    ):
        np.save(folder / PROMPTS, prompts_BxC)
        script = pathlib.Path(__file__).with_name("transformers_generate.py")
        # Isolated, or the folder of the script would hide modules of Python's own.
        command = [pathlib.Path(python).expanduser(), "-I", script]
        command += [folder / MODEL, folder / PROMPTS, SUFFIX_LENGTH]
        try:
            process = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        except OSError as error:
            raise UsageError(
                f"transformers_python={python!r} does not start ({error.strerror}): "
                "name an interpreter"
            ) from error
        # Leaving it closes the other's input, which ends it, and waits.
        self._process = stack.enter_context(process)
        self.versions = self._answer()
        self.generated_BxS = np.load(folder / f"{PROMPTS}.generated.npy")

    def generate(self) -> None:
        """Generates once for all prompts."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RunError(
                "transformers stopped: see its message above, and install torch and "
                "transformers for --transformers_python"
            )
        return line.strip()


def _table(result: dict[str, Any]) -> str:
    """Windows and tokens per second, in Markdown."""
    faster = result.get("times_faster_than_transformers", {})
    lines = ["| way | windows/s | tokens/s | times transformers |", "|---|---|---|---|"]
    for name, seconds in result["seconds"].items():
        rate = result["batch_size"] / seconds
        generates = name in (DECODING, TRANSFORMERS)
        tokens = f"{rate * SUFFIX_LENGTH:,.0f}" if generates else ""
        ratio = f"{faster[name]:.2f}" if name in faster else ""
        lines.append(f"| {name} | {rate:,.1f} | {tokens} | {ratio} |")
    return "\n".join(lines)


if __name__ == "__main__":
    defaults = Settings()
    flags.DEFINE_string("model", defaults.model, "A spec of a language model.")
    flags.DEFINE_integer(
        "vocabulary_size", defaults.vocabulary_size, "Its vocabulary.", lower_bound=2
    )
    flags.DEFINE_integer(
        "batch_size", defaults.batch_size, "Windows at once.", lower_bound=1
    )
    flags.DEFINE_integer(
        "context", defaults.context, "Tokens of a prompt.", lower_bound=1
    )
    flags.DEFINE_float(
        "extractable", defaults.extractable, "Share of windows that are extractable."
    )
    flags.DEFINE_integer(
        "rounds", defaults.rounds, "Times that each way is timed.", lower_bound=1
    )
    flags.DEFINE_string(
        "transformers_python",
        defaults.transformers_python,
        "An interpreter with torch and transformers, to compare with.",
    )
    flags.DEFINE_string("out", "", "The folder to write; it must be new or empty.")
    command_line.run(main, config_keys=[])
