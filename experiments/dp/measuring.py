"""Measures the methods on one model and batch: compiles them, checks them, times them.

What fails, fails alone: its result says why, and the other methods go on.
"""

import contextlib
import dataclasses
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import timing
from experiments.dp import benchmark_problems, largest_batch
from experiments.dp.benchmark_cells import CellSpec
from experiments.dp.benchmark_config import COMPILE_TIME, MEMORY, BenchmarkConfig
from experiments.dp.benchmark_methods import (
    METHODS,
    NON_PRIVATE,
    ONE_BY_ONE,
    Part,
    Problem,
    Program,
    sum_and_norms_one_by_one,
)
from experiments.dp.steps import Data
from experiments.errors import one_line
from experiments.timing import Spread, TimedStep

PyTree = Any

# Largest relative error of the gradient of any parameter; float32 leaves about 1e-6.
TOLERANCE = 1e-4
# Where a search for the largest batch ends.
MOST_EXAMPLES = 2**20


@dataclasses.dataclass(frozen=True)
class Result:
    """One method on one model and batch. None stands for what was not measured.

    Ratios are to the non-private step; see `timing.paired_ratio`.

    Attributes:
      method: Its name.
      failure: Why it failed; empty if it did not.
      relative_error: Largest L2 error of the clipped gradient of any parameter, over
        that gradient's norm, against gradients that were clipped one at a time.
      rounds: Number of rounds timed.
      steps_per_round: Steps in a row in each of them.
      step_seconds: Time of a step.
      step_ratio: The same as a ratio.
      speedup: Time of `ONE_BY_ONE` over this method's time, in the same rounds.
      lower_seconds: Median time of tracing and lowering.
      lower_ratio: The same as a ratio.
      compile_seconds: Median time of compiling what was lowered.
      compile_ratio: The same as a ratio.
      temp_bytes: Temporary memory of the compiled step.
      temp_ratio: The same as a ratio.
      total_bytes: Temporary memory, arguments and results of the compiled step.
      largest_batch: The most examples whose step fits the memory budget, to within
        `largest_batch.RESOLUTION`.
      largest_batch_ratio: The same as a ratio.
    """

    method: str
    failure: str = ""
    relative_error: float | None = None
    rounds: int | None = None
    steps_per_round: int | None = None
    step_seconds: Spread | None = None
    step_ratio: Spread | None = None
    speedup: Spread | None = None
    lower_seconds: float | None = None
    lower_ratio: float | None = None
    compile_seconds: float | None = None
    compile_ratio: float | None = None
    temp_bytes: int | None = None
    temp_ratio: float | None = None
    total_bytes: int | None = None
    largest_batch: int | None = None
    largest_batch_ratio: float | None = None


@dataclasses.dataclass(frozen=True)
class Compilation:
    """A compiled program.

    The memory is that of the part that takes most; what the allocator or a library adds
    is not in it.

    Attributes:
      parts: The executables.
      lower_seconds: Time of tracing and lowering all parts.
      compile_seconds: Time of compiling them.
      temp_bytes: Temporary memory.
      total_bytes: The same with arguments and results, donated ones counted once.
    """

    parts: Mapping[str, Any]
    lower_seconds: float
    compile_seconds: float
    temp_bytes: int
    total_bytes: int


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


def num_measurements(config: BenchmarkConfig, cell: CellSpec) -> int:
    """How often `measure` calls `on_measured` if nothing fails."""
    names = config.methods_of(cell)
    if config.figure == MEMORY:
        return len(names)
    compilations = config.compile_repetitions * len(names)
    if config.figure == COMPILE_TIME:
        return compilations
    checks = int(config.check) * len(names)
    return compilations + checks + sum(1 + config.rounds(name) for name in names)


def measure(
    cell: CellSpec, config: BenchmarkConfig, on_measured: Callable[[str], None]
) -> list[Result]:
    """Measures the non-private step and the methods of `config` on `cell`.

    Args:
      cell: The model and the batch.
      config: What to measure, and how often.
      on_measured: Called with what was just done, for a progress bar.
    """
    names = config.methods_of(cell)
    problem = benchmark_problems.abstract_problem(cell, config.noise_multiplier)
    if config.figure == MEMORY:
        return _measure_memory(problem, config, names, on_measured)
    if config.figure == COMPILE_TIME:
        failures = Failures()
        compilations = _compile_all(problem, config, names, failures, on_measured)
        return [_result(name, failures, compilations) for name in names]
    return _measure_time(cell, config, names, on_measured)


def _measure_time(
    cell: CellSpec,
    config: BenchmarkConfig,
    names: Sequence[str],
    on_measured: Callable[[str], None],
) -> list[Result]:
    failures = Failures()
    problem = benchmark_problems.make_problem(cell, config.noise_multiplier)
    errors: dict[str, float] = {}
    if config.check:
        problem, errors = _check_all(problem, names, failures, on_measured)
    compilations = _compile_all(problem, config, names, failures, on_measured)
    steps = {}
    for name in names:
        if name not in failures:
            with failures.recorded(name):
                steps[name] = _warmed_up(problem, config, name, compilations[name][-1])
        on_measured(f"{name}: warm")
    seconds = _interleaved(steps, failures, on_measured)
    return [
        dataclasses.replace(
            _result(name, failures, compilations),
            relative_error=errors.get(name),
            **_times(name, steps, seconds),
        )
        for name in names
    ]


def _measure_memory(
    problem: Problem,
    config: BenchmarkConfig,
    names: Sequence[str],
    on_measured: Callable[[str], None],
) -> list[Result]:
    failures, found = Failures(), {}
    for name in names:
        with failures.recorded(name):
            found[name] = _memory_of(METHODS[name].step, problem, config)
        on_measured(f"{name}: largest batch")
    return [_memory_result(name, failures, found) for name in names]


def _memory_of(
    make_step: Callable[[Problem], Program], problem: Problem, config: BenchmarkConfig
) -> tuple[Compilation, int]:
    """The compiled step, and the largest batch within the budget."""

    def compiled(batch_size: int) -> Compilation:
        resized = benchmark_problems.with_batch_size(problem, batch_size)
        return _compile(make_step(resized).parts, _quick_options())

    here = compiled(problem.batch_size)
    known = {problem.batch_size: here.total_bytes}

    def total_bytes(batch_size: int) -> int:
        if batch_size not in known:
            known[batch_size] = compiled(batch_size).total_bytes
        return known[batch_size]

    largest = largest_batch.largest_batch(
        total_bytes,
        1e9 * config.memory_budget_gb,
        start=problem.batch_size,
        most=MOST_EXAMPLES,
    )
    return here, largest


def compile_program(program: Program) -> Compilation:
    """Traces, lowers and compiles a program, from nothing."""
    return _compile(program.parts, compiler_options={})


def _compile(
    parts: Mapping[str, Part], compiler_options: dict[str, Any]
) -> Compilation:
    jax.clear_caches()
    executables, lower_seconds, compile_seconds = {}, 0.0, 0.0
    for name, part in parts.items():
        start = time.perf_counter()
        lowered = part.fun.lower(*part.args)
        lowered_at = time.perf_counter()
        executables[name] = lowered.compile(compiler_options=compiler_options)
        compile_seconds += time.perf_counter() - lowered_at
        lower_seconds += lowered_at - start
    memory = [executable.memory_analysis() for executable in executables.values()]
    temp_bytes = max(m.temp_size_in_bytes for m in memory)
    total_bytes = max(
        m.temp_size_in_bytes
        + m.argument_size_in_bytes
        + m.output_size_in_bytes
        - m.alias_size_in_bytes
        for m in memory
    )
    return Compilation(
        executables, lower_seconds, compile_seconds, temp_bytes, total_bytes
    )


def _quick_options() -> dict[str, Any]:
    """To compile programs that are never run: on a CPU, in half the time.

    They use the same memory, since LLVM comes in after memory is assigned.
    """
    on_cpu = jax.devices()[0].platform == "cpu"
    return {"xla_backend_optimization_level": 0} if on_cpu else {}


def start_compiler() -> None:
    """Compiles something: the first compilation of a process takes longer."""
    jax.jit(lambda x: jnp.tanh(x @ x)).lower(jnp.ones((8, 8))).compile()


def clipped_gradient(method: str, problem: Problem) -> PyTree:
    """A method's sum of clipped gradients.

    Products are in full float32, also on accelerators that round them to less by
    default, so that methods that differ differ by a defect.

    Raises:
      MemoryError: It would need more memory than is free.
    """
    make_program = METHODS[method].clipped_sum
    if make_program is None:
        raise ValueError(f"method={method!r} clips nothing")
    with jax.default_matmul_precision("highest"):
        program = make_program(problem)
        compilation = compile_program(program)
    _require_memory(compilation)
    return program.assemble(compilation.parts)(program.init(problem.params))


def reference(problem: Problem) -> tuple[float, PyTree]:
    """The median of the gradients' norms, and the sum of gradients clipped to it.

    Both come from gradients that are computed one at a time, in code of its own.

    Raises:
      MemoryError: It would need more memory than is free.
    """

    def both(params: PyTree, batch: Data, l2_clip_norm: jax.Array) -> Any:
        return sum_and_norms_one_by_one(problem.loss, params, batch, l2_clip_norm)

    arguments = (problem.params, problem.batch)
    part = Part(jax.jit(both), (*arguments, jnp.float32(1)))
    with jax.default_matmul_precision("highest"):
        compilation = _compile({"both": part}, {})
    _require_memory(compilation)
    compiled = compilation.parts["both"]
    _, norms_B = compiled(*arguments, jnp.float32(1))
    l2_clip_norm = np.median(np.asarray(norms_B))
    total, _ = compiled(*arguments, l2_clip_norm)
    return float(l2_clip_norm), total


def relative_error(found: PyTree, expected: PyTree) -> float:
    """The largest L2 error of any array, over the norm of the expected one.

    Example:
      >>> relative_error([np.ones(3), np.array([3.0])], [np.ones(3), np.array([4.0])])
      0.25
    """
    errors = []
    for f, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        wanted = np.asarray(e, np.float64)
        size = max(float(np.linalg.norm(wanted)), 1e-30)
        errors.append(np.linalg.norm(np.asarray(f, np.float64) - wanted) / size)
    return float(np.max(errors))


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


def _require_memory(compilation: Compilation) -> None:
    # A CPU's allocator does not fail: the system ends the process instead.
    free = free_bytes()
    if free is not None and compilation.total_bytes > free:
        raise MemoryError(
            f"the step needs {compilation.total_bytes / 1e9:.1f} GB of memory and "
            f"{free / 1e9:.1f} GB are free"
        )


def _check_all(
    problem: Problem,
    names: Sequence[str],
    failures: Failures,
    on_measured: Callable[[str], None],
) -> tuple[Problem, dict[str, float]]:
    """The problem with the median norm, and the error of each method that clips."""
    errors: dict[str, float] = {}
    try:
        l2_clip_norm, expected = reference(problem)
    except Exception as error:
        for name in names:
            failures[name] = f"nothing to check against: {describe(error)}"
            on_measured(f"{name}: not checked")
        return problem, errors
    problem = dataclasses.replace(problem, l2_clip_norm=l2_clip_norm)
    for name in names:
        if METHODS[name].clipped_sum is not None:
            with failures.recorded(name):
                found = clipped_gradient(name, problem)
                errors[name] = relative_error(found, expected)
                _require_agreement(errors[name])
        on_measured(f"{name}: checked")
    return problem, errors


def _require_agreement(error: float) -> None:
    if not error <= TOLERANCE:
        raise ArithmeticError(
            f"its clipped gradient differs by {error:.1e} from the one computed one "
            "example at a time, so it was not timed"
        )


def _compile_all(
    problem: Problem,
    config: BenchmarkConfig,
    names: Sequence[str],
    failures: Failures,
    on_measured: Callable[[str], None],
) -> dict[str, list[Compilation]]:
    """Compiles the methods in turns, as often as the config says."""
    compilations: dict[str, list[Compilation]] = {name: [] for name in names}
    generator = random.Random(0)
    for _ in range(config.compile_repetitions):
        for name in generator.sample(names, len(names)):
            if name not in failures:
                with failures.recorded(name):
                    done = compile_program(METHODS[name].step(problem))
                    compilations[name].append(done)
            on_measured(f"{name}: compiled")
    return compilations


def _warmed_up(
    problem: Problem, config: BenchmarkConfig, name: str, compilation: Compilation
) -> TimedStep:
    _require_memory(compilation)
    program = METHODS[name].step(problem)
    return timing.warmed_up(
        program.assemble(compilation.parts),
        program.init(problem.params),
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


def _times(
    name: str, steps: Mapping[str, TimedStep], seconds: Mapping[str, np.ndarray]
) -> dict[str, Any]:
    """The fields of a `Result` that say how long a step takes."""
    if name not in seconds:
        return {}

    def ratio(over: str, under: str) -> Spread | None:
        if over not in seconds or under not in seconds:
            return None
        return timing.paired_ratio(seconds[over], seconds[under])

    return {
        "rounds": steps[name].rounds,
        "steps_per_round": steps[name].steps_per_round,
        "step_seconds": timing.spread(seconds[name]),
        "step_ratio": ratio(name, NON_PRIVATE),
        "speedup": ratio(ONE_BY_ONE, name),
    }


def _result(
    name: str,
    failures: Failures,
    compilations: Mapping[str, list[Compilation]],
) -> Result:
    """What compiling has shown."""
    if name in failures:
        return Result(name, failures[name])
    mine, baseline = compilations[name], compilations[NON_PRIVATE]
    has_baseline = NON_PRIVATE not in failures

    def compared(attribute: str) -> tuple[float, float | None]:
        values, baseline_values = (
            np.array([getattr(c, attribute) for c in group])
            for group in (mine, baseline)
        )
        ratio = timing.paired_ratio(values, baseline_values) if has_baseline else None
        return timing.spread(values).median, ratio and ratio.median

    lower_seconds, lower_ratio = compared("lower_seconds")
    compile_seconds, compile_ratio = compared("compile_seconds")
    return Result(
        name,
        lower_seconds=lower_seconds,
        lower_ratio=lower_ratio,
        compile_seconds=compile_seconds,
        compile_ratio=compile_ratio,
        **_memory_fields(mine[-1], baseline[-1] if has_baseline else None),
    )


def _memory_result(
    name: str, failures: Failures, found: Mapping[str, tuple[Compilation, int]]
) -> Result:
    if name in failures:
        return Result(name, failures[name])
    compilation, largest = found[name]
    baseline, baseline_largest = found.get(NON_PRIVATE, (None, 0))
    return Result(
        name,
        largest_batch=largest,
        largest_batch_ratio=largest / baseline_largest if baseline_largest else None,
        **_memory_fields(compilation, baseline),
    )


def _memory_fields(mine: Compilation, baseline: Compilation | None) -> dict[str, Any]:
    ratio = None
    if baseline is not None and baseline.temp_bytes > 0:
        ratio = mine.temp_bytes / baseline.temp_bytes
    return {
        "temp_bytes": mine.temp_bytes,
        "temp_ratio": ratio,
        "total_bytes": mine.total_bytes,
    }
