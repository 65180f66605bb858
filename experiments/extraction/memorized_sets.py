"""Which model memorised what another did not: Table 1 of Carlini et al. 2023.

Models are compared on the prompts that all of them were given, for windows of one
length and prompts of one context at a time: a window then counts once.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import polars as pl

from experiments.extraction import queries
from experiments.extraction.sweep_runs import Model

_CELL: dict[str, Any] = {
    "length": pl.Int32(),
    "context": pl.Int32(),
    "windows": pl.Int64(),
}
_TOTALS = _CELL | {
    "model": pl.String(),
    "baseline": pl.Boolean(),
    "params": pl.Int64(),
    "memorized": pl.Int64(),
    "only": pl.Int64(),
    "only_strict": pl.Int64(),
}
_PAIRS = _CELL | {
    "model": pl.String(),
    "other": pl.String(),
    "memorized": pl.Int64(),
    "not_by_other": pl.Int64(),
}


@dataclasses.dataclass(frozen=True)
class MemorizedSets:
    """Table 1.

    Attributes:
      totals: As the function `totals` has them.
      pairs: As the function `pairs` has them.
      cell: The length and context that are shown; None if models share no prompt.
    """

    totals: pl.DataFrame
    pairs: pl.DataFrame
    cell: tuple[int, int] | None

    def shown(self) -> tuple[pl.DataFrame, pl.DataFrame]:
        """`totals` and `pairs` of the length and context that are shown."""
        assert self.cell is not None
        length, context = self.cell
        at_cell = (pl.col("length") == length) & (pl.col("context") == context)
        return self.totals.filter(at_cell), self.pairs.filter(at_cell)


def in_order(models: Sequence[Model]) -> list[Model]:
    """The models as Table 1 has them: by size, those trained on the corpus first."""
    return sorted(models, key=lambda model: (model.baseline, model.params))


def totals(records: pl.DataFrame, models: Sequence[Model]) -> pl.DataFrame:
    """How many windows each model memorised, and how many it alone.

    Args:
      records: One row for each (model, window_id, context); `model` is an Enum of the
        names in the order of `models`.
      models: All of them.

    Returns:
      length, context, windows (given to every model), model, baseline, params,
      memorized, only (memorised by no other model that was trained on the corpus; null
      for a baseline, and where there is no other), only_strict (of these, those of
      which what the others generate occurs nowhere in the corpus after the prompt, as
      in appendix C of the paper; null where `only` is, and where that is not known of
      each of these models); models as `in_order` has them.
    """
    members = np.array([not model.baseline for model in models], np.int64)
    rows = []
    for cell, extracted_WxM, anywhere_WxM in _cells(records, len(models)):
        alone_W = extracted_WxM @ members == 1
        # What a model extracts is somewhere in the corpus: of one at most, of this one.
        of_members_WxM = anywhere_WxM[:, members > 0]
        strictly_W = of_members_WxM.sum(axis=1) == 1
        searched = not np.isnan(of_members_WxM).any()
        for model, i in _indexed(models):
            only_W = extracted_WxM[:, i] & alone_W
            known = members[i] and members.sum() > 1
            rows.append(
                {
                    **cell,
                    "model": model.name,
                    "baseline": model.baseline,
                    "params": model.params,
                    "memorized": int(extracted_WxM[:, i].sum()),
                    "only": int(only_W.sum()) if known else None,
                    "only_strict": (
                        int((only_W & strictly_W).sum()) if known and searched else None
                    ),
                }
            )
    return pl.DataFrame(rows, schema=_TOTALS)


def pairs(records: pl.DataFrame, models: Sequence[Model]) -> pl.DataFrame:
    """How many windows a model memorised and another did not, for all ordered pairs.

    For models A and B, `memorized` of A less "A, not B" and `memorized` of B less
    "B, not A" are the same: the windows that both memorised.

    Args:
      records: As in `totals`.
      models: All of them.

    Returns:
      length, context, windows, model, other, memorized (by the model), not_by_other
      (of these, not by the other); models as `in_order` has them.

    Example:
      >>> models = [Model("a", "", 1, False), Model("b", "", 2, False)]
      >>> records = pl.DataFrame({
      ...     "model": ["a", "a", "b", "b"], "window_id": [0, 1, 0, 1],
      ...     "length": 100, "context": 50, "extracted": [True, False, True, True],
      ...     "anywhere": None,
      ... }).with_columns(pl.col("model").cast(pl.Enum(["a", "b"])))
      >>> pairs(records, models).select(pl.exclude("length", "context")).rows()
      [(2, 'a', 'b', 1, 0), (2, 'b', 'a', 2, 1)]
    """
    rows = []
    for cell, extracted_WxM, _ in _cells(records, len(models)):
        counts_WxM = extracted_WxM.astype(np.int64)
        differences_MxM = counts_WxM.T @ (1 - counts_WxM)
        for model, i in _indexed(models):
            rows += [
                {
                    **cell,
                    "model": model.name,
                    "other": other.name,
                    "memorized": int(counts_WxM[:, i].sum()),
                    "not_by_other": int(differences_MxM[i, j]),
                }
                for other, j in _indexed(models)
                if i != j
            ]
    return pl.DataFrame(rows, schema=_PAIRS)


def choose_cell(
    totals: pl.DataFrame,
    suffix_length: int | None,
    length: int | None = None,
    context: int | None = None,
) -> tuple[int, int] | None:
    """The length and context with most windows, among those asked for.

    An empty prompt is taken only if nothing else is there. Among equals the one whose
    prompt is all of the window but the suffix is taken, then the shortest window (the
    paper's has 100 tokens), then the longest prompt.

    Args:
      totals: As `totals` has them.
      suffix_length: In tokens; None if blanks are filled in.
      length: Of the windows; None is any.
      context: Of the prompts; None is any.

    Returns:
      length, context; None if no window has them.

    Example:
      >>> cells = pl.DataFrame(
      ...     {"length": [100, 100, 200], "context": [20, 50, 150], "windows": 7})
      >>> choose_cell(cells, 50), choose_cell(cells, 50, length=200)
      ((100, 50), (200, 150))
    """
    at_full = pl.col("context") + (suffix_length or 0) == pl.col("length")
    # A comparison with None would be null, and true for no row.
    asked = [pl.col("length") == length] if length is not None else []
    asked += [pl.col("context") == context] if context is not None else []
    cells = totals.filter(*asked).sort(
        pl.col("context") > 0,
        "windows",
        at_full,
        "length",
        "context",
        descending=[True, True, True, False, True],
    )
    if cells.is_empty():
        return None
    return cells["length"][0], cells["context"][0]


def _cells(
    records: pl.DataFrame, num_models: int
) -> Iterator[tuple[dict[str, int], np.ndarray, np.ndarray]]:
    """For each length and context: what it is, extracted_WxM and anywhere_WxM.

    These are bool, and float64 with NaN for what is not known.
    """
    shared = queries.shared_by_models(records, num_models)
    ordered = shared.sort("length", "context", "window_id", "model")
    for (length, context), rows in ordered.group_by(
        "length", "context", maintain_order=True
    ):
        extracted_WxM = rows["extracted"].to_numpy().reshape(-1, num_models)
        cell = {"length": length, "context": context, "windows": len(extracted_WxM)}
        anywhere_N = rows["anywhere"].cast(pl.Float64).to_numpy()
        yield cell, extracted_WxM, anywhere_N.reshape(-1, num_models)


def _indexed(models: Sequence[Model]) -> list[tuple[Model, int]]:
    """The models in the order of a table, with their places among the columns."""
    places = {model.name: i for i, model in enumerate(models)}
    return [(model, places[model.name]) for model in in_order(models)]
