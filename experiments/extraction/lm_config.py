"""The keys of a language model's training config: types, defaults and limits."""

import dataclasses
import math
import typing
from typing import Any

import ml_collections

from experiments import typed_config
from experiments.extraction.span_corruption import Masking
from experiments.typed_config import expect


@dataclasses.dataclass(frozen=True)
class LmConfig:
    """What one run does.

    The defaults of the optimizer are those of GPT-3 (Brown et al. 2020, arXiv
    2005.14165, appendix B); its second moment decays by 0.95 per step.

    Attributes:
      corpus: `stdlib`, `text:GLOB`, `jsonl:GLOB`, `tfds:NAME`, `tokens:FILE.npy` or
        `tokens:DIR`, a folder of build_corpus. Texts are tokenised into OUT/corpus.
      tokenizer: `bpe:SIZE`, or a tokenizer.json or its folder; empty takes the one of
        the corpus, or trains one on its texts.
      eos_id: The id between documents, where the corpus does not say.
      model: A language model, such as `gpt_neox:layers=2:width=64:heads=2`; the
        families are gpt2, gpt_neo, gpt_j and gpt_neox. The corpus decides the size of
        its vocabulary. Or an encoder-decoder, which fills blanks: T5 v1.1, such as
        `t5:layers=2:width=64:heads=2:head_dim=32:feed_forward=128`, whose layers are
        those of each half. It adds 102 tokens of its own to the vocabulary.
      masking: How tokens are dropped to make the blanks of a T5: `spans` of 3 tokens on
        average, or `iid`, each by itself; either way 15 % of them, drawn anew at each
        visit. None takes `spans`, as T5's own training does. Other families have none.
      max_positions: The longest input that the model takes; `sequence_length` by
        default. Positions beyond `sequence_length` are never trained. A T5 has none.
      sequence_length: Tokens that are predicted together; to a T5, those of which some
        are dropped.
      batch_size: Sequences per step.
      microbatch_size: Sequences whose gradient is computed at once, a divisor of
        `batch_size`: smaller ones need less memory. None takes about 512 tokens on a
        CPU, in whose caches they stay, and the whole batch elsewhere.
      num_steps: Number of optimizer updates. One epoch, which visits each token once,
        has tokens / (batch_size * sequence_length) of them.
      learning_rate: At the end of the warm-up; from there it falls along a cosine, to a
        tenth at the last step.
      warmup_steps: Steps before the learning rate is reached, along a line. None takes
        a tenth of the steps, at most 100.
      weight_decay: Of weight matrices and embeddings, not of biases and norms.
      gradient_clip_norm: Longer gradients are scaled down to this L2 norm.
      seed: Of the initial parameters and the order of the corpus. Not secret, as this
        training is not private: config.json holds it.
      log_interval: Steps between two rows of metrics.jsonl.
      checkpoint_interval: Steps between two checkpoints.
      out: The run folder; empty makes a new one under runs/.
    """

    corpus: str = "stdlib"
    tokenizer: str = ""
    eos_id: int | None = None
    model: str = "gpt_neox:layers=2:width=64:heads=2"
    masking: str | None = None
    max_positions: int | None = None
    sequence_length: int = 256
    batch_size: int = 16
    microbatch_size: int | None = None
    num_steps: int = 1000
    learning_rate: float = 1e-3
    warmup_steps: int | None = None
    weight_decay: float = 0.1
    gradient_clip_norm: float = 1.0
    seed: int = 0
    log_interval: int = 20
    checkpoint_interval: int = 200
    out: str = ""


def make(**values: Any) -> ml_collections.ConfigDict:
    """The `ConfigDict` of `LmConfig(**values)`, for the files in configs/.

    Example:
      >>> make(num_steps=5).num_steps
      5
    """
    return typed_config.make(LmConfig, **values)


def parse(config: ml_collections.ConfigDict) -> LmConfig:
    """Checks every key and value.

    Raises:
      UsageError: Names the key, its value, what was expected and the remedy.
    """
    parsed = typed_config.parse(LmConfig, config.to_dict())
    _check_ranges(parsed)
    return parsed


def _check_ranges(config: LmConfig) -> None:
    for name in (
        "sequence_length",
        "batch_size",
        "num_steps",
        "log_interval",
        "checkpoint_interval",
    ):
        expect(config, name, getattr(config, name) >= 1, "an integer >= 1")
    for name in ("learning_rate", "gradient_clip_norm"):
        ok = 0 < getattr(config, name) < math.inf
        expect(config, name, ok, "a finite number > 0")
    ok = 0 <= config.weight_decay < math.inf
    expect(config, "weight_decay", ok, "a finite number >= 0")
    expect(config, "seed", config.seed >= 0, "an integer >= 0")
    ok = config.masking in (None, *typing.get_args(Masking))
    expect(config, "masking", ok, "iid or spans")
    if config.eos_id is not None:
        expect(config, "eos_id", config.eos_id >= 0, "an integer >= 0")
    if config.warmup_steps is not None:
        ok = 0 <= config.warmup_steps < config.num_steps
        expected = f"from 0 to num_steps - 1 = {config.num_steps - 1}"
        expect(config, "warmup_steps", ok, expected)
    if config.microbatch_size is not None:
        size = config.microbatch_size
        ok = size >= 1 and config.batch_size % size == 0
        expected = f"a divisor of batch_size = {config.batch_size}"
        expect(config, "microbatch_size", ok, expected)
    if config.max_positions is not None:
        ok = config.max_positions >= config.sequence_length
        expected = f"at least sequence_length = {config.sequence_length}"
        expect(config, "max_positions", ok, expected)
