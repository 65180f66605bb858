"""Measures the methods on one model and batch: compiles them, checks them, times them.

What fails, fails alone: its result says why, and the other methods go on.
"""

import contextlib
import dataclasses
import random
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from experiments.dp import timing
from experiments.dp.benchmark_config import BenchmarkConfig
from experiments.dp.benchmark_methods import METHODS, NON_PRIVATE, Problem, Program
from experiments.dp.timing import Spread, TimedStep
from experiments.errors import one_line

# Shares no code with the others.
REFERENCE = "one_by_one_scan"
# Largest relative error of the gradient of any parameter; float32 leaves about 1e-6.
TOLERANCE = 1e-4


@dataclasses.dataclass(frozen=True)
class Result:
    """One method on one model and batch. None stands for what was not measured.

    Ratios are to the non-private step; see `timing.paired_ratio`.

    Attributes:
      method: Its name.
      failure: Why it failed; empty if it did not.
      relative_error: Largest L2 error of the clipped gradient of any parameter, over
        that gradient's norm, against the method `REFERENCE`.
      rounds: Number of rounds timed.
      steps_per_round: Steps in a row in each of them.
      step_seconds: Time of a step.
      step_ratio: The same as a ratio.
      lower_seconds: Median time of tracing and lowering.
      lower_ratio: The same as a ratio.
      compile_seconds: Median time of compiling what was lowered.
      compile_ratio: The same as a ratio.
      temp_bytes: Temporary memory of the compiled step; None for a loop of calls.
      temp_ratio: The same as a ratio.
    """

    method: str
    failure: str = ""
    relative_error: float | None = None
    rounds: int | None = None
    steps_per_round: int | None = None
    step_seconds: Spread | None = None
    step_ratio: Spread | None = None
    lower_seconds: float | None = None
    lower_ratio: float | None = None
    compile_seconds: float | None = None
    compile_ratio: float | None = None
    temp_bytes: int | None = None
    temp_ratio: float | None = None


@dataclasses.dataclass(frozen=True)
class Compilation:
    """A compiled program.

    Attributes:
      parts: The executables.
      lower_seconds: Time of tracing and lowering all parts.
      compile_seconds: Time of compiling them.
      temp_bytes: Temporary memory; None if there are several parts.
    """

    parts: Mapping[str, Any]
    lower_seconds: float
    compile_seconds: float
    temp_bytes: int | None


class Failures(dict[str, str]):
    """Reasons by method."""

    @contextlib.contextmanager
    def recorded(self, name: str) -> Iterator[None]:
        """Turns an exception into the reason of `name`."""
        try:
            yield
        except Exception as error:
            # Whatever a compiler or an allocator raises.
            self[name] = describe(error)


def num_measurements(config: BenchmarkConfig) -> int:
    """How often `measure` calls `on_measured` if nothing fails."""
    per_method = config.compile_repetitions + 2
    return sum(per_method + config.rounds(name) for name in config.all_methods)


def measure(
    problem: Problem, config: BenchmarkConfig, on_measured: Callable[[str], None]
) -> list[Result]:
    """Measures the non-private step and the methods of `config` on `problem`.

    Args:
      problem: The model and the batch.
      config: How often to measure what.
      on_measured: Called with what was just done, for a progress bar.
    """
    names = config.all_methods
    failures = Failures()
    compilations = _compile_all(problem, config, failures, on_measured)
    errors = _check_all(problem, names, failures, on_measured)
    steps = {}
    for name in names:
        if name not in failures:
            with failures.recorded(name):
                steps[name] = _warmed_up(problem, config, name, compilations[name][-1])
        on_measured(f"{name}: warm")
    seconds = _interleaved(steps, failures, on_measured)
    return [
        _result(name, failures, errors, compilations, steps, seconds) for name in names
    ]


def clipped_gradient(method: str, problem: Problem) -> list[np.ndarray]:
    """A method's sum of clipped gradients, an array for each parameter.

    Products are in full float32, also on accelerators that round them to less by
    default, so that methods that differ differ by a defect.
    """
    make_clipped_sum = METHODS[method].clipped_sum
    if make_clipped_sum is None:
        raise ValueError(f"method={method!r} clips nothing")
    with jax.default_matmul_precision("highest"):
        clipped_sum = make_clipped_sum(problem.loss, problem.l2_clip_norm)
        total = clipped_sum(problem.params, problem.batch)
    return [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(total)]


def relative_error(found: list[np.ndarray], expected: list[np.ndarray]) -> float:
    """The largest L2 error of any array, over the norm of the expected one.

    Example:
      >>> relative_error([np.ones(3), np.array([3.0])], [np.ones(3), np.array([4.0])])
      0.25
    """
    errors = [
        np.linalg.norm(f - e) / max(float(np.linalg.norm(e)), 1e-30)
        for f, e in zip(found, expected, strict=True)
    ]
    return float(np.max(errors))


def compile_program(program: Program) -> Compilation:
    """Traces, lowers and compiles a program, from nothing."""
    jax.clear_caches()
    parts, lower_seconds, compile_seconds = {}, 0.0, 0.0
    for name, part in program.parts.items():
        start = time.perf_counter()
        lowered = part.fun.lower(*part.args)
        lowered_at = time.perf_counter()
        parts[name] = lowered.compile()
        compile_seconds += time.perf_counter() - lowered_at
        lower_seconds += lowered_at - start
    memory = [executable.memory_analysis() for executable in parts.values()]
    has_total = len(memory) == 1 and memory[0] is not None
    temp_bytes = memory[0].temp_size_in_bytes if has_total else None
    return Compilation(parts, lower_seconds, compile_seconds, temp_bytes)


def describe(error: BaseException) -> str:
    """One line about an exception."""
    message = one_line(error, limit=200) if isinstance(error, Exception) else ""
    return f"{type(error).__name__}: {message}"


def free_bytes() -> int | None:
    """Memory that the first device can still allocate; None if unknown."""
    statistics = jax.devices()[0].memory_stats()
    if statistics and "bytes_limit" in statistics:
        return statistics["bytes_limit"] - statistics["bytes_in_use"]
    with contextlib.suppress(OSError, StopIteration), open("/proc/meminfo") as file:
        line = next(line for line in file if line.startswith("MemAvailable:"))
        return 1024 * int(line.split()[1])
    return None


def _compile_all(
    problem: Problem,
    config: BenchmarkConfig,
    failures: Failures,
    on_measured: Callable[[str], None],
) -> dict[str, list[Compilation]]:
    names = config.all_methods
    compilations: dict[str, list[Compilation]] = {name: [] for name in names}
    # The first compilation of a process also starts the compiler.
    with contextlib.suppress(Exception):
        compile_program(METHODS[NON_PRIVATE].program(problem))
    generator = random.Random(0)
    for _ in range(config.compile_repetitions):
        for name in generator.sample(names, len(names)):
            if name not in failures:
                with failures.recorded(name):
                    done = compile_program(METHODS[name].program(problem))
                    compilations[name].append(done)
            on_measured(f"{name}: compiled")
    return compilations


def _check_all(
    problem: Problem,
    names: tuple[str, ...],
    failures: Failures,
    on_measured: Callable[[str], None],
) -> dict[str, float]:
    """The relative error of each method that clips."""
    expected = clipped_gradient(REFERENCE, problem)
    errors: dict[str, float] = {}
    for name in names:
        if METHODS[name].clipped_sum is not None and name not in failures:
            with failures.recorded(name):
                found = clipped_gradient(name, problem)
                errors[name] = relative_error(found, expected)
                _require_agreement(errors[name])
        on_measured(f"{name}: checked")
    return errors


def _require_agreement(error: float) -> None:
    if not error <= TOLERANCE:
        raise ArithmeticError(
            f"its clipped gradient differs by {error:.1e} from the one computed one "
            "example at a time, so it was not timed"
        )


def _warmed_up(
    problem: Problem, config: BenchmarkConfig, name: str, compilation: Compilation
) -> TimedStep:
    # A CPU's allocator does not fail: the system ends the process instead.
    free, needed = free_bytes(), compilation.temp_bytes or 0
    if free is not None and needed > free:
        raise MemoryError(
            f"the step needs {needed / 1e9:.1f} GB of temporary memory and "
            f"{free / 1e9:.1f} GB are free"
        )
    program = METHODS[name].program(problem)
    return timing.warmed_up(
        program.assemble(compilation.parts),
        program.init(),
        rounds=config.rounds(name),
        round_seconds=config.round_seconds,
    )


def _interleaved(
    steps: dict[str, TimedStep],
    failures: Failures,
    on_measured: Callable[[str], None],
) -> dict[str, np.ndarray]:
    while steps:
        try:
            return timing.interleaved(steps, on_measured)
        except timing.StepFailed as error:
            failures[error.name] = describe(error.__cause__ or error)
            del steps[error.name]
    return {}


def _result(
    name: str,
    failures: Failures,
    errors: Mapping[str, float],
    compilations: Mapping[str, list[Compilation]],
    steps: Mapping[str, TimedStep],
    seconds: Mapping[str, np.ndarray],
) -> Result:
    if name in failures:
        return Result(name, failures[name], errors.get(name))
    mine, baseline = compilations[name], compilations[NON_PRIVATE]
    has_baseline = NON_PRIVATE not in failures

    def compared(attribute: str) -> tuple[float, float | None]:
        values, baseline_values = (
            np.array([getattr(c, attribute) for c in group])
            for group in (mine, baseline)
        )
        ratio = timing.paired_ratio(values, baseline_values) if has_baseline else None
        return timing.spread(values).median, ratio and ratio.median

    temp_bytes, baseline_bytes = mine[-1].temp_bytes, None
    if has_baseline:
        baseline_bytes = baseline[-1].temp_bytes
    return Result(
        name,
        "",
        errors.get(name),
        steps[name].rounds,
        steps[name].steps_per_round,
        timing.spread(seconds[name]),
        timing.paired_ratio(seconds[name], seconds[NON_PRIVATE])
        if has_baseline
        else None,
        *compared("lower_seconds"),
        *compared("compile_seconds"),
        temp_bytes,
        temp_bytes / baseline_bytes if temp_bytes and baseline_bytes else None,
    )
