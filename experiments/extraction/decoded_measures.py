"""What generated suffixes come to: how near the truth, and found elsewhere or not."""

import numpy as np
import polars

from experiments.errors import RunError
from experiments.extraction import lookup, near_misses
from experiments.extraction.lookup import Lookup
from experiments.extraction.verdicts import SUFFIX_LENGTH


def add(
    rows: polars.DataFrame, windows: polars.DataFrame, searched: Lookup | None
) -> polars.DataFrame:
    """Fills in what follows from generated suffixes: see `records.GENERATED`.

    A window counts as found anywhere if prompt + generated suffix occurs in the corpus,
    within a document, at whatever place (Carlini et al. 2023, section 4.5), and if it
    is extracted: where logits are equal up to rounding, what was generated may not be
    the suffix that makes it so. Hence whatever is extracted is found anywhere.

    Args:
      rows: Records, in any order, which they keep.
      windows: The windows of an evaluation set.
      searched: The corpus; None leaves `anywhere` null.

    Raises:
      RunError: A window does not occur in the corpus.
    """
    tokens = windows.select("window_id", "tokens")
    parts = [
        _measured(
            part.join(tokens, "window_id", "left", maintain_order="left"), searched
        )
        for part in rows.with_row_index("row").partition_by("length", "context")
    ]
    return polars.concat(parts).sort("row").drop("row")


def _measured(rows: polars.DataFrame, searched: Lookup | None) -> polars.DataFrame:
    """Of records of one length and one context, with the tokens of their windows."""
    length, context = int(rows["length"][0]), int(rows["context"][0])
    tokens_NxL = rows["tokens"].list.to_array(length).to_numpy()
    generated_NxS = rows["generated"].list.to_array(SUFFIX_LENGTH).to_numpy()
    prompt_NxC, suffix_NxS = np.split(
        tokens_NxL[:, : context + SUFFIX_LENGTH], [context], 1
    )
    anywhere: polars.Expr | polars.Series = polars.lit(None, polars.Boolean())
    if searched is not None:
        found_N = lookup.occurs(searched, np.hstack([prompt_NxC, generated_NxS]))
        _check_found(rows, (generated_NxS == suffix_NxS).all(axis=1) & ~found_N)
        anywhere = polars.Series(found_N) | rows["extracted"]
    return rows.drop("tokens").with_columns(
        anywhere=anywhere,
        bleu=near_misses.bleu(generated_NxS, suffix_NxS),
        edit_distance=near_misses.edit_distance(generated_NxS, suffix_NxS),
    )


def _check_found(rows: polars.DataFrame, is_lost_N: np.ndarray) -> None:
    """A suffix generated as it is in the window occurs: the window was taken there."""
    if is_lost_N.any():
        window_id = rows["window_id"][int(np.argmax(is_lost_N))]
        raise RunError(
            f"window {window_id} does not occur in config.corpus, though windows are "
            "taken from it: give the corpus that the evaluation set was built from"
        )
