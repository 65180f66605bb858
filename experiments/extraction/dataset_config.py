"""What an evaluation set is to hold: the flags of build_dataset, checked."""

import dataclasses
import re
from typing import Any

from experiments.errors import UsageError
from experiments.extraction import buckets
from experiments.extraction.buckets import Bucket

LENGTHS = tuple(range(50, 501, 50))
BY_COUNT, UNIFORM = SAMPLES = ("by_count", "uniform")
DEFAULT_EDGES = "2^(n/4)"


@dataclasses.dataclass(frozen=True)
class DatasetConfig:
    """One evaluation set.

    Attributes:
      out: The folder.
      corpus: A SPEC of `experiments.extraction.corpus`.
      lengths: Of the windows, in tokens, rising.
      sample: `by_count`: distinct windows by how often they occur; `uniform`: windows
        at random positions.
      per_bucket: Windows per length and bucket, by count.
      num_windows: Windows per length, uniform.
      edges: Of the buckets; None is the grid 2^(n/4).
      one_per_repeat: At most one window of each maximal repeat, by count.
      seed: An integer >= 0.
      eos_id: The separator, if the corpus does not name it.
      tokenizer: See `corpus.load`.
      verify: Count the chosen windows a second time, in another way.
    """

    out: str
    corpus: str = "stdlib"
    lengths: tuple[int, ...] = LENGTHS
    sample: str = BY_COUNT
    per_bucket: int = 1000
    num_windows: int = 100_000
    edges: tuple[int, ...] | None = None
    one_per_repeat: bool = False
    seed: int = 0
    eos_id: int | None = None
    tokenizer: str = ""
    verify: bool = False

    def record(self) -> dict[str, Any]:
        """What decides which windows are chosen, as the manifest says it."""
        by_count = self.sample == BY_COUNT
        return {
            "corpus": self.corpus,
            "seed": self.seed,
            "lengths": list(self.lengths),
            "sample": self.sample,
            "per_bucket": self.per_bucket if by_count else None,
            "windows_per_length": None if by_count else self.num_windows,
            "one_per_repeat": self.one_per_repeat,
            "edges": DEFAULT_EDGES if self.edges is None else list(self.edges),
        }

    def bucket_list(self, max_count: int) -> list[Bucket]:
        """The buckets: those given, or those that hold counts up to `max_count`."""
        if self.edges is None:
            return buckets.quarter_powers(max_count)
        return buckets.from_edges(self.edges)


def parse(flags: dict[str, Any]) -> DatasetConfig:
    """Checks the flags.

    Args:
      flags: The keys of `DatasetConfig`; `lengths` and `edges` as text, and None for
        what was not given.

    Raises:
      UsageError: Names the flag, its value, what was expected and the remedy.

    Example:
      >>> parse({"out": "windows", "lengths": "100,50", "edges": None}).lengths
      (50, 100)
    """
    given = {name: value for name, value in flags.items() if value is not None}
    for name in ("lengths", "edges"):
        if name in given:
            given[name] = _integers(name, given[name])
    if not given.get("out"):
        raise UsageError("--out is missing: give --out=FOLDER")
    config = DatasetConfig(**given)
    for name in ("per_bucket", "num_windows", "seed"):
        least = 0 if name == "seed" else 1
        if getattr(config, name) < least:
            raise UsageError(
                f"{name}={getattr(config, name)}, expected an integer >= {least}: "
                f"change --{name}"
            )
    other_sample = {BY_COUNT: _FOR_UNIFORM, UNIFORM: _FOR_BY_COUNT}[config.sample]
    for name in other_sample:
        if given.get(name):
            raise UsageError(
                f"--{name} has no meaning with sample={config.sample}: leave one of "
                f"--{name} and --sample out"
            )
    config.bucket_list(max_count=1)
    if len(set(config.lengths)) < len(config.lengths) or min(config.lengths) < 1:
        raise UsageError(
            f"lengths={','.join(map(str, config.lengths))}, expected integers >= 1, "
            "each once: give --lengths=50,100,150"
        )
    return dataclasses.replace(config, lengths=tuple(sorted(config.lengths)))


_FOR_BY_COUNT = ("per_bucket", "edges", "one_per_repeat")
_FOR_UNIFORM = ("num_windows",)


def _integers(name: str, text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", text):
        raise UsageError(
            f"{name}={text!r}, expected integers with commas between them: give "
            f"--{name}=50,100,150"
        )
    return tuple(int(part) for part in text.split(","))
