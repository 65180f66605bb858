"""Which windows a reader will want to see: the galleries of Carlini et al. 2023.

The unit is a *prompt*, a window at one context: what a model was asked.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import polars as pl

from experiments.extraction import memorized_sets
from experiments.extraction.sweep_runs import Model

# Of each selection so many prompts are shown at least, where there are as many.
_PER_SELECTION = 100


@dataclasses.dataclass(frozen=True, eq=False)
class Selection:
    """Some of the prompts.

    Attributes:
      title: Which ones, in words.
      selected_N: bool, for each prompt.
      descending: Whether counts are shown from the largest; None has no such order.
    """

    title: str
    selected_N: np.ndarray
    descending: bool | None = None


def prompts(records: pl.DataFrame, models: Sequence[Model]) -> pl.DataFrame:
    """One row for each window and context, with the verdict on each model.

    Args:
      records: One row for each (model, window_id, context).
      models: All of them.

    Returns:
      window_id, context, length, count, bucket, whitespace, entropy, and two columns
      for each model, named by its place I among `models`: I, the verdict, and
      I_anywhere, whether what it generated occurs anywhere in the corpus after the
      prompt; null where a model was not asked, or that is not known. By length, context
      and window_id.
    """
    verdicts = [
        pl.col(column).filter(pl.col("model") == model.name).first().alias(name)
        for i, model in enumerate(models)
        for column, name in (("extracted", f"{i}"), ("anywhere", f"{i}_anywhere"))
    ]
    facts = pl.col("length", "count", "bucket", "whitespace", "entropy")
    return (
        records.group_by("window_id", "context")
        .agg(facts.first(), *verdicts)
        .sort("length", "context", "window_id")
    )


def of_the_appendix(
    prompts: pl.DataFrame, models: Sequence[Model]
) -> tuple[Selection, ...]:
    """The selections of Figures 3 and 6 to 13 that these models allow.

    A repeat is few or many at the quartiles of the counts. *Only* by one model is by no
    other that was trained on the corpus; where it is known, what each of the others
    generated also occurs nowhere in the corpus (Carlini et al. 2023, appendix C).

    Args:
      prompts: As `prompts` has them, at least one.
      models: All of them.
    """
    members = [m for m in memorized_sets.in_order(models) if not m.baseline]
    baselines = [m for m in models if m.baseline]
    yes_N, no_N = (
        {
            model.name: (prompts[f"{i}"] == verdict).fill_null(False).to_numpy()
            for i, model in enumerate(models)
        }
        for verdict in (True, False)
    )

    searched = is_strict(prompts, models)

    def only(model: Model) -> np.ndarray:
        others = [other for other in members if other is not model]
        elsewhere = [
            ~prompts[f"{models.index(other)}_anywhere"].fill_null(True).to_numpy()
            for other in others
            if searched
        ]
        missed = [no_N[other.name] for other in others]
        return np.all([yes_N[model.name], *missed, *elsewhere], axis=0)

    strictly = "; what others say occurs nowhere" if searched else ""
    found = []
    if len(members) > 1:
        smallest, largest = members[0], members[-1]
        found += [
            Selection(
                "Memorised by all models trained on the corpus (Figure 6)",
                np.all([yes_N[m.name] for m in members], axis=0),
            ),
            Selection(
                f"Only by the largest, {largest.name} (Figures 3, 7 to 9{strictly})",
                only(largest),
            ),
            Selection(
                f"Only by the smallest, {smallest.name} (Figure 10{strictly})",
                only(smallest),
            ),
        ]
    if members:
        name = members[-1].name
        count_N = prompts["count"].to_numpy()
        few, many = (
            int(np.quantile(count_N, 0.25, method="lower")),
            int(np.quantile(count_N, 0.75, method="higher")),
        )
        found += [
            Selection(
                f"Few repeats (at most {few:,}) but memorised by {name} (Figure 11)",
                yes_N[name] & (count_N <= few),
                descending=False,
            ),
            Selection(
                f"Most repeats (at least {many:,}) but not memorised by {name} "
                "(Figure 12)",
                no_N[name] & (count_N >= many),
                descending=True,
            ),
        ]
    if baselines:
        found.append(
            Selection(
                "Memorised by a baseline (Figure 13)",
                np.any([yes_N[m.name] for m in baselines], axis=0),
            )
        )
    return tuple(found)


def is_strict(prompts: pl.DataFrame, models: Sequence[Model]) -> bool:
    """Whether it is known of all answers if they occur anywhere in the corpus.

    Args:
      prompts: As `prompts` has them.
      models: All of them; what baselines say does not matter.
    """
    return not any(
        (prompts[f"{i}"].is_not_null() & prompts[f"{i}_anywhere"].is_null()).any()
        for i, model in enumerate(models)
        if not model.baseline
    )


def choose(
    bucket_N: np.ndarray, selections: Sequence[Selection], limit: int, seed: int
) -> np.ndarray:
    """Which prompts to show: some of each selection, and the rest evenly from buckets.

    Args:
      bucket_N: Of each prompt.
      selections: Up to 100 prompts of each are among those chosen, as far as half of
        `limit` goes.
      limit: How many to choose at most.
      seed: Of the choice.

    Returns:
      Their places, ascending.

    Example:
      >>> choose(np.array([0, 0, 0, 4]), [], limit=2, seed=0)[-1]
      np.int64(3)
    """
    key_N = np.random.default_rng(seed).permutation(len(bucket_N))
    wanted_N = np.zeros(len(bucket_N), bool)
    share = min(_PER_SELECTION, limit // (2 * max(1, len(selections))))
    for selection in selections:
        places = np.flatnonzero(selection.selected_N)
        wanted_N[places[np.argsort(key_N[places])][:share]] = True
    # Bucket by bucket, the wanted first: the rank of each in its own bucket.
    order_N = np.lexsort((key_N, ~wanted_N, bucket_N))
    _, starts_B, sizes_B = np.unique(
        bucket_N[order_N], return_index=True, return_counts=True
    )
    rank_N = np.empty(len(bucket_N), np.int64)
    rank_N[order_N] = np.arange(len(bucket_N)) - np.repeat(starts_B, sizes_B)
    return np.sort(np.lexsort((bucket_N, rank_N, ~wanted_N))[:limit])
