"""Times build_dataset on a synthetic corpus: the whole program, and its peak memory.

    python -m experiments.extraction.benchmark_dataset --out=/tmp/benchmark

The corpus has Zipf-distributed ids and repeats planted in it: one passage of 60 to
2,000 tokens for every 8,000 tokens, with 1 to 500 copies. Windows of ten lengths are
drawn, 1,000 per bucket. The folder holds the corpus, the evaluation set and
benchmark.json. For numbers to rely on, let nothing else run on the machine.
"""

import json
import pathlib
import resource
import subprocess
import sys
import time
from typing import Any

import numpy as np
from absl import flags

from experiments import command_line, machine, run_folder
from experiments.errors import RunError, UsageError
from experiments.extraction import dataset_config

EOS_ID = 0
RESULT = "benchmark.json"
_VOCABULARY_SIZE = 40_000
_MIN_TOKENS = 10_000


def main() -> None:
    """Runs the benchmark; the last line of output names the folder."""
    out: Any = flags.FLAGS["out"].value
    num_tokens: Any = flags.FLAGS["num_tokens"].value
    if not out:
        raise UsageError("--out is missing: give --out=FOLDER")
    if num_tokens < _MIN_TOKENS:
        raise UsageError(
            f"num_tokens={num_tokens}, expected at least {_MIN_TOKENS}: raise "
            "--num_tokens"
        )
    folder = pathlib.Path(out).expanduser().resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise UsageError(f"out={out!r} is not empty: give another --out")
    result = measure(folder, num_tokens)
    run_folder.write_atomically(folder / RESULT, json.dumps(result, indent=2) + "\n")
    print(
        f"{num_tokens:,} tokens: {result['seconds']:.1f} s "
        f"({result['cpu_seconds']:.1f} s of processor time), peak memory "
        f"{result['peak_memory_bytes'] / 1e9:.2f} GB"
    )
    print(f"Benchmark: {folder}")


def measure(folder: pathlib.Path, num_tokens: int) -> dict[str, Any]:
    """Builds a corpus and its evaluation set in `folder`.

    Returns:
      What the program took from its start to its end: seconds on the clock, seconds of
      processor time (which other programs sway less), bytes; and the machine.

    Raises:
      RunError: The program failed.
    """
    np.save(folder / "tokens.npy", corpus(num_tokens, seed=0))
    command = [
        *(sys.executable, "-m", "experiments.extraction.build_dataset"),
        f"--corpus=tokens:{folder / 'tokens.npy'}",
        f"--eos_id={EOS_ID}",
        f"--out={folder / 'windows'}",
    ]
    started = time.perf_counter()
    exit_code = subprocess.run(command, check=False).returncode
    seconds = time.perf_counter() - started
    if exit_code:
        raise RunError(f"build_dataset failed with exit code {exit_code}: see above")
    # Linux counts in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "num_tokens": num_tokens,
        "lengths": dataset_config.LENGTHS,
        "seconds": seconds,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "peak_memory_bytes": unit * usage.ru_maxrss,
        "load_average": machine.load_average(),
        "machine": machine.describe(),
    }


def corpus(num_tokens: int, seed: int) -> np.ndarray:
    """uint16[num_tokens] of Zipf-distributed ids with planted repeats."""
    rng = np.random.default_rng(seed)
    ids = np.minimum(rng.zipf(1.3, num_tokens), _VOCABULARY_SIZE - 1)
    tokens_N = ids.astype(np.uint16)
    for _ in range(num_tokens // 8_000):
        length = int(rng.integers(60, 2_000))
        starts = rng.integers(0, num_tokens - length, 500)
        passage = tokens_N[starts[0] : starts[0] + length].copy()
        copies = int(np.exp(rng.uniform(0, np.log(500))))
        for start in starts[1 : 1 + copies]:
            tokens_N[start : start + length] = passage
    tokens_N[rng.integers(0, num_tokens, num_tokens // 1_700)] = EOS_ID
    return tokens_N


if __name__ == "__main__":
    flags.DEFINE_string("out", None, "The folder; new, or empty.")
    flags.DEFINE_integer("num_tokens", 50_000_000, "The size of the corpus.")
    command_line.run(main, config_keys=())
