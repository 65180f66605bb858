"""What a sweep has found: one row per model, context and window, written part by part.

parts/           finished parts of a sweep that goes on; each is whole or not there
records.parquet  at the end: all rows, by model (in the sweep's order), context, length
                 and window_id
"""

import os
import pathlib
import re
import shutil
from collections.abc import Sequence
from typing import Any

import polars

from experiments.errors import RunError, one_line
from experiments.extraction.sweep_config import SweepConfig

PARTS = "parts"
RECORDS = "records.parquet"
_PARTIAL = ".partial"
_ROW_GROUP = 1 << 16

COLUMNS: dict[str, Any] = {
    "window_id": polars.Int64(),
    "model": polars.String(),
    "params": polars.Int64(),
    "length": polars.Int32(),
    "context": polars.Int32(),
    "count": polars.Int64(),
    "bucket": polars.Int32(),
    "whitespace": polars.Float32(),
    "entropy": polars.Float32(),
    "extracted": polars.Boolean(),
    "first_mismatch": polars.Int32(),
    "tokens_correct": polars.Int32(),
    "min_margin": polars.Float32(),
    "tie": polars.Boolean(),
    "suffix_logprob": polars.Float32(),
}
"""The columns of records.parquet.

window_id       of windows.parquet, as are length (in tokens), count and bucket
model, params   name and number of parameters of the model
context         tokens of the prompt, which is the start of the window
whitespace      share of the window's tokens that are white space alone; null if the
                evaluation set has no tokenizer
entropy         of the window's tokens, in bits per token
extracted       whether greedy decoding continues the prompt by the next 50 tokens
first_mismatch  which of the 50 is the first that is not the argmax; 50 if all are
tokens_correct  how many of the 50 are the argmax given the true ones before them
min_margin      least of the 50 logits' distances to the largest other logit
tie             some of the 50 shares the largest logit; the lowest id then wins
suffix_logprob  natural log of the probability of the 50, given the prompt

The last five are null if a sweep took verdicts only.
"""

GENERATED: dict[str, Any] = {
    "generated": polars.List(polars.UInt32()),
    "anywhere": polars.Boolean(),
    "bleu": polars.Float32(),
    "edit_distance": polars.Int32(),
}
"""With `decode`, these columns as well.

generated      the 50 tokens that greedy decoding gives
anywhere       whether prompt and generated tokens occur together anywhere in the
               corpus; true of all that is extracted; null if the sweep had no corpus
bleu           BLEU of the generated tokens with the true ones, from 0 to 1
edit_distance  the least number of tokens to insert, delete or replace between them

In parts all but the first are null: they follow from it (see decoded_measures.py).
"""

BEAMS: dict[str, Any] = {
    "beam_generated": polars.List(polars.UInt32()),
    "beam_extracted": polars.Boolean(),
    "beam_logprob": polars.Float32(),
    "beam_identical": polars.Boolean(),
}
"""With `beams`, these columns as well.

beam_generated  the most likely 50 tokens that a beam search finds
beam_extracted  whether they are the next 50
beam_logprob    natural log of their probability, given the prompt
beam_identical  whether they are those of `generated`
"""

SCHEME: dict[str, Any] = {"scheme_logprob": polars.Float32()}
"""With `samples`, or a sampling scheme other than the model itself, also this one:
natural log of the probability that the scheme draws the next 50 tokens in one try. It
is -inf where the scheme leaves one of them out.
"""

SAMPLES: dict[str, Any] = {"samples_extracted": polars.Int32()}
"""With `samples`, also this one: how many of the draws are the next 50 tokens."""

BLANKS: dict[str, Any] = {"num_targets": polars.Int32()}
"""With `masking`, also this one, and the others mean something else.

num_targets     how many tokens fill the blanks: those that were dropped, a sentinel for
                each blank, and what ends the last one (see infilling.py)
context         tokens of the window that were kept
extracted       whether greedy decoding fills all blanks exactly
first_mismatch  which of the targets is the first that is not the argmax; `num_targets`
                if all are

What is said of the 50 tokens of a suffix is said of these targets.
"""


def columns(config: SweepConfig) -> dict[str, Any]:
    """The columns of the records of a sweep, in their order."""
    columns = dict(COLUMNS)
    if config.decode:
        columns |= GENERATED
    if config.beams:
        columns |= BEAMS
    if config.has_scheme:
        columns |= SCHEME
    if config.samples:
        columns |= SAMPLES
    if config.masking:
        columns |= BLANKS
    return columns


class Parts:
    """The parts of one sweep, in the folder `parts` of its folder."""

    def __init__(self, folder: pathlib.Path):
        """Makes the folder `parts`, and removes what a killed sweep left unfinished."""
        self._folder = folder / PARTS
        self._folder.mkdir(exist_ok=True)
        for partial in self._folder.glob(f"*{_PARTIAL}"):
            partial.unlink()

    def __contains__(self, name: str) -> bool:
        """Whether the part is finished."""
        return self._path(name).exists()

    def write(self, name: str, rows: polars.DataFrame) -> None:
        """Writes a part, whole or not at all.

        Args:
          name: Letters, digits, `-` and `_`.
          rows: With the `columns` of the sweep.
        """
        if not re.fullmatch(r"[\w-]+", name):
            raise ValueError(f"part {name!r} is not a plain name")
        write_parquet(rows, self._path(name))

    def read(self, name: str) -> polars.DataFrame:
        """Reads a part.

        Raises:
          RunError: It is damaged.
        """
        path = self._path(name)
        try:
            return polars.read_parquet(path)
        except (OSError, polars.exceptions.PolarsError) as error:
            raise RunError(
                f"{path} is damaged ({one_line(error, limit=160)}): delete it, and "
                "sweep again to make it anew"
            ) from error

    def remove(self) -> None:
        """Deletes all parts, once they are merged."""
        shutil.rmtree(self._folder)

    def _path(self, name: str) -> pathlib.Path:
        return self._folder / f"{name}.parquet"


def merge(rows: Sequence[polars.DataFrame], models: Sequence[str]) -> polars.DataFrame:
    """All rows in the order of records.parquet; `models` is the order of models."""
    order = polars.col("model").cast(polars.Enum(models))
    return polars.concat(rows).sort(order, "context", "length", "window_id")


def write_parquet(rows: polars.DataFrame, path: pathlib.Path) -> None:
    """Writes a file, whole or not at all; the same rows make the same bytes."""
    partial = path.with_name(path.name + _PARTIAL)
    with partial.open("wb") as file:
        rows.write_parquet(file, compression="zstd", row_group_size=_ROW_GROUP)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
