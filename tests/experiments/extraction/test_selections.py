import hypothesis
import numpy as np
import polars as pl
from hypothesis import strategies as st

from experiments.extraction import selections
from experiments.extraction.selections import Selection
from experiments.extraction.sweep_runs import Model

MODELS = [
    Model("big", "", 9, False),
    Model("small", "", 1, False),
    Model("other", "", 5, True),
]


def records_of(verdicts, counts, anywhere=None):
    """Records of windows 0, 1, ... with a verdict for each model; None was not asked.

    `anywhere` has for each window the names of models whose answers are in the corpus.
    """
    names = pl.Enum([model.name for model in MODELS])
    rows = [
        {
            **{"window_id": i, "context": 50, "length": 100, "bucket": 0},
            **{"count": count, "model": model.name, "extracted": verdict},
            **{"whitespace": 0.25, "entropy": 4.5},
            "anywhere": anywhere and (verdict or model.name in anywhere[i]),
        }
        for i, (own, count) in enumerate(zip(verdicts, counts, strict=True))
        for model, verdict in zip(MODELS, own, strict=True)
        if verdict is not None
    ]
    schema = {"anywhere": pl.Boolean}
    return pl.DataFrame(rows, schema_overrides=schema).with_columns(
        pl.col("model").cast(names)
    )


def found_in(verdicts, counts, anywhere=None):
    table = selections.prompts(records_of(verdicts, counts, anywhere), MODELS)
    found = selections.of_the_appendix(table, MODELS)
    return [(s.title, np.flatnonzero(s.selected_N).tolist()) for s in found]


def test_the_selections_of_the_appendix():
    verdicts = [
        (True, True, False),
        (True, False, True),
        (False, True, False),
        (False, False, True),
        (True, False, False),
    ]
    found = found_in(verdicts, [1, 2, 4, 800, 16])
    assert found == [
        ("Memorised by all models trained on the corpus (Figure 6)", [0]),
        ("Only by the largest, big (Figures 3, 7 to 9)", [1, 4]),
        ("Only by the smallest, small (Figure 10)", [2]),
        ("Few repeats (at most 2) but memorised by big (Figure 11)", [0, 1]),
        ("Most repeats (at least 16) but not memorised by big (Figure 12)", [3]),
        ("Memorised by a baseline (Figure 13)", [1, 3]),
    ]


def test_a_model_that_was_not_asked_neither_memorised_nor_did_not():
    verdicts = [(True, None, None), (None, True, None), (True, True, False)]
    found = dict(found_in(verdicts, [1, 1, 1]))
    assert list(found.values()) == [[2], [], [], [0, 2], [], []]


def test_prompts_have_a_row_each_and_a_column_for_each_model():
    records = pl.concat(
        [
            records_of([(True, False, None)], [3]),
            records_of([(False, False, True)], [3]).with_columns(
                context=pl.lit(20, pl.Int64)
            ),
        ]
    )
    assert selections.prompts(records, MODELS).rows() == [
        (0, 20, 100, 3, 0, 0.25, 4.5, False, None, False, None, True, None),
        (0, 50, 100, 3, 0, 0.25, 4.5, True, None, False, None, None, None),
    ]


def test_only_by_one_is_strict_where_all_is_known():
    verdicts = [
        (True, False, False),
        (True, False, False),
        (False, True, False),
        (False, True, True),
        (True, None, False),
    ]
    anywhere = [["other"], ["small"], [], ["big"], []]
    found = dict(found_in(verdicts, [1] * 5, anywhere))
    nowhere = "what others say occurs nowhere"
    assert found[f"Only by the largest, big (Figures 3, 7 to 9; {nowhere})"] == [0]
    assert found[f"Only by the smallest, small (Figure 10; {nowhere})"] == [2]
    records = records_of(verdicts, [1] * 5, anywhere)
    for name, strict in (("other", True), ("small", False)):
        unknown = (pl.col("model") == name) & (pl.col("window_id") == 2)
        partly = records.with_columns(
            anywhere=pl.when(unknown).then(None).otherwise("anywhere")
        )
        table = selections.prompts(partly, MODELS)
        assert selections.is_strict(table, MODELS) == strict
        only = {
            s.title: s.selected_N for s in selections.of_the_appendix(table, MODELS)
        }
        assert ("Only by the largest, big (Figures 3, 7 to 9)" in only) != strict


@hypothesis.given(
    st.lists(st.integers(0, 4), min_size=1, max_size=60),
    st.integers(0, 70),
    st.integers(0, 3),
)
def test_buckets_are_shown_evenly(buckets, limit, seed):
    bucket_N = np.array(buckets)
    places = selections.choose(bucket_N, [], limit, seed)
    assert len(places) == min(limit, len(buckets))
    assert (np.diff(places) > 0).all()
    left_over = np.delete(bucket_N, places)
    taken = {b: (bucket_N[places] == b).sum() for b in buckets}
    # A bucket of which something is left has as many as any other, up to rounding.
    for bucket in left_over:
        assert taken[bucket] >= max(taken.values()) - 1
    again = selections.choose(bucket_N, [], limit, seed)
    np.testing.assert_array_equal(places, again)


def test_rare_selections_are_shown():
    bucket_N = np.arange(10_000) % 10
    rare_N = np.isin(np.arange(10_000), [17, 4_321, 9_999])
    common_N = bucket_N == 3
    wanted = [Selection("rare", rare_N), Selection("common", common_N)]
    places = selections.choose(bucket_N, wanted, 1_000, seed=0)
    assert rare_N[places].sum() == 3
    # Of the common one there are no more than its bucket's share.
    assert (np.bincount(bucket_N[places]) <= 103).all()
    assert common_N[places].sum() == 100
    other = selections.choose(bucket_N, wanted, 1_000, seed=1)
    assert set(places) != set(other)
