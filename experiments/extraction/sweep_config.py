"""The keys of a sweep's config: their types, defaults and limits."""

import dataclasses
import math
from typing import Any

import ml_collections

from experiments import typed_config
from experiments.extraction.span_corruption import MASKINGS
from experiments.extraction.token_sources import TOKENS
from experiments.typed_config import expect

SKIP, BOS = EMPTY_PROMPTS = ("skip", "bos")
PRECISIONS = ("highest", "high", "default")
# They are counted in 32 bits.
MOST_SAMPLES = 2**31 - 1


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
      beams: With `decode`: also search for the most likely continuation with so many
        beams (Carlini et al. 2023, section 4.5, take 100), and record it; 0: do not.
      samples: Also draw so many continuations of each prompt at random, with `seed`,
        and record how many are the true one; 0: none.
      temperature: Logits are divided by this before tokens are drawn. With another than
        1, or with `top_k` or `samples`, it is recorded how likely the true suffix is to
        be drawn in one try.
      top_k: Only so many tokens, of the largest logits, can be drawn; None: all.
      masking: For T5 models, which do not continue prompts: `iid` drops 15 % of every
        window's tokens one by one at random (Carlini et al. 2023, section 5.1), `spans`
        in blanks of 3 tokens on average, and it is recorded whether the model fills all
        blanks exactly. Where they are depends on `seed` and window. A folder that does
        not say first_sentinel and num_sentinels in its config.json has those of the
        published T5: 100 from 32,099 downwards.
      verdicts_only: Record only whether windows are extractable, which takes less: most
        of those that are not are given up after the first suffix tokens.
      empty_prompt: What to do where a prompt has no token: `skip` the window, or prompt
        with the separator of the corpus (`bos`).
      matmul_precision: Of matrix products: `highest` is float32; `high` and `default`
        are faster on GPUs and TPUs, which then round the factors.
      near_tie: Two logits closer than this may be equal up to rounding. Verdicts that
        hinge on so little are counted.
      seed: Of `windows_per_bucket`, `samples` and `masking`.
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
    beams: int = 0
    samples: int = 0
    temperature: float = 1.0
    top_k: int | None = None
    masking: str = ""
    verdicts_only: bool = False
    empty_prompt: str = SKIP
    matmul_precision: str = "highest"
    near_tie: float = 1e-3
    seed: int = 0
    out: str = ""

    @property
    def has_scheme(self) -> bool:
        """Whether it is recorded how likely suffixes are to be drawn."""
        return self.samples > 0 or self.temperature != 1.0 or self.top_k is not None


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
    _check_masking(parsed)
    ok = not (parsed.decode and parsed.verdicts_only)
    expect(
        parsed, "verdicts_only", ok, "False with decode=True, which needs all columns"
    )
    ok = not parsed.corpus or parsed.corpus.startswith(TOKENS)
    expect(parsed, "corpus", ok, "tokens:DIR or tokens:FILE.npy")
    ok = parsed.decode or not parsed.corpus
    expect(parsed, "corpus", ok, "'' without decode=True, as nothing is generated")
    expect(parsed, "seed", parsed.seed >= 0, "an integer >= 0")
    _check_beams_and_samples(parsed)
    return parsed


def _check_beams_and_samples(parsed: SweepConfig) -> None:
    expect(parsed, "beams", parsed.beams >= 0, "an integer >= 0")
    ok = 0 <= parsed.samples <= MOST_SAMPLES
    expect(parsed, "samples", ok, f"an integer from 0 to {MOST_SAMPLES}")
    ok = parsed.decode or not parsed.beams
    expect(parsed, "beams", ok, "0 without decode=True, whose tokens it is compared to")
    ok = 0 < parsed.temperature < math.inf
    expect(parsed, "temperature", ok, "a positive number (top_k=1 is greedy decoding)")
    ok = parsed.top_k is None or parsed.top_k >= 1
    expect(parsed, "top_k", ok, "an integer >= 1, or None")
    ok = not (parsed.has_scheme and parsed.verdicts_only)
    name = "samples, temperature or top_k"
    expect(parsed, "verdicts_only", ok, f"False with {name}, which need all columns")


def _check_masking(parsed: SweepConfig) -> None:
    ok = parsed.masking in ("", *MASKINGS)
    expect(parsed, "masking", ok, f"'' or one of {', '.join(MASKINGS)}")
    if not parsed.masking:
        return
    # Of prompts that are continued.
    for name in (
        "contexts",
        "empty_prompt",
        "decode",
        "corpus",
        "beams",
        "samples",
        "temperature",
        "top_k",
        "verdicts_only",
    ):
        default = getattr(SweepConfig, name)
        ok = getattr(parsed, name) == default
        expect(parsed, name, ok, f"{default!r} with masking, as T5 continues no prompt")
