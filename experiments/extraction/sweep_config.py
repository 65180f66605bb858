"""The keys of a sweep's config: their types, defaults and limits."""

import dataclasses
import math
from typing import Any

import ml_collections

from experiments import typed_config
from experiments.extraction.token_sources import TOKENS
from experiments.typed_config import expect

SKIP, BOS = EMPTY_PROMPTS = ("skip", "bos")
PRECISIONS = ("highest", "high", "default")


@dataclasses.dataclass(frozen=True)
class SweepConfig:
    """Which models are asked about which windows, and how.

    On the command line a tuple is written A,B,C.

    Attributes:
      models: Folders of the models that were trained on the corpus: Hugging Face
        folders or runs of train_lm.
      baselines: Folders of models that were not, to compare with.
      windows: The folder of an evaluation set.
      contexts: Lengths of the prompts. The prompt is the first so many tokens of a
        window, the suffix the next 50; windows that are too short are left out. Empty
        takes each window's length less 50 (Carlini et al. 2023, section 3.2); several
        shorter ones make their Figure 5.
      windows_per_bucket: At most so many windows of each length and bucket, drawn with
        `seed`; None takes all.
      batch_size: Windows in one batch. Another size may turn verdicts around that lie
        within rounding.
      decode: Also generate 50 tokens after every prompt, and record them; the sweep
        fails where they contradict the verdict and rounding does not explain it.
      corpus: With `decode`: `tokens:DIR` or `tokens:FILE.npy`, the corpus of the
        windows; a set that was built from texts holds it as WINDOWS/corpus. It is
        recorded whether prompt and generated tokens occur anywhere in it. Its suffix
        array is built once and kept beside it.
      verdicts_only: Record only whether windows are extractable, which takes less: most
        of those that are not are given up after the first suffix tokens.
      empty_prompt: What to do where a prompt has no token: `skip` the window, or prompt
        with the separator of the corpus (`bos`).
      matmul_precision: Of matrix products: `highest` is float32; `high` and `default`
        are faster on GPUs and TPUs, which then round the factors.
      near_tie: Two logits closer than this may be equal up to rounding. Verdicts that
        hinge on so little are counted.
      seed: Of `windows_per_bucket`.
      out: The folder; empty makes a new one under runs/.
    """

    models: tuple[str, ...] = ()
    baselines: tuple[str, ...] = ()
    windows: str = ""
    contexts: tuple[int, ...] = ()
    windows_per_bucket: int | None = None
    batch_size: int = 32
    decode: bool = False
    corpus: str = ""
    verdicts_only: bool = False
    empty_prompt: str = SKIP
    matmul_precision: str = "highest"
    near_tie: float = 1e-3
    seed: int = 0
    out: str = ""


def make(**values: Any) -> ml_collections.ConfigDict:
    """The `ConfigDict` of `SweepConfig(**values)`, for the files in configs/.

    Example:
      >>> make(batch_size=8).batch_size
      8
    """
    return typed_config.make(SweepConfig, **values)


def parse(config: ml_collections.ConfigDict) -> SweepConfig:
    """Checks every key and value.

    Raises:
      UsageError: Names the key, its value, what was expected and the remedy.
    """
    parsed = typed_config.parse(SweepConfig, config.to_dict())
    some = bool(parsed.models or parsed.baselines)
    for name in ("models", "baselines"):
        ok = some and all(getattr(parsed, name))
        expect(parsed, name, ok, "folders of models with commas between them")
    expect(parsed, "windows", bool(parsed.windows), "the folder of an evaluation set")
    expect(parsed, "batch_size", parsed.batch_size >= 1, "an integer >= 1")
    ok = parsed.windows_per_bucket is None or parsed.windows_per_bucket >= 1
    expect(parsed, "windows_per_bucket", ok, "an integer >= 1")
    ok = all(context >= 0 for context in parsed.contexts)
    ok = ok and len(set(parsed.contexts)) == len(parsed.contexts)
    expect(parsed, "contexts", ok, "different integers >= 0")
    for name, choices in (
        ("empty_prompt", EMPTY_PROMPTS),
        ("matmul_precision", PRECISIONS),
    ):
        ok = getattr(parsed, name) in choices
        expect(parsed, name, ok, f"one of {', '.join(choices)}")
    ok = 0 <= parsed.near_tie < math.inf
    expect(parsed, "near_tie", ok, "a finite number >= 0")
    ok = not (parsed.decode and parsed.verdicts_only)
    expect(
        parsed, "verdicts_only", ok, "False with decode=True, which needs all columns"
    )
    ok = not parsed.corpus or parsed.corpus.startswith(TOKENS)
    expect(parsed, "corpus", ok, "tokens:DIR or tokens:FILE.npy")
    ok = parsed.decode or not parsed.corpus
    expect(parsed, "corpus", ok, "'' without decode=True, as nothing is generated")
    expect(parsed, "seed", parsed.seed >= 0, "an integer >= 0")
    return parsed
