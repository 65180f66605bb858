import hypothesis
import numpy as np
import polars as pl
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from experiments.extraction import memorized_sets
from experiments.extraction.sweep_runs import Model


def records_of(extracted_WxM, models, length=100, context=50, anywhere_WxM=None):
    """Records in the order of models, as a sweep has them."""
    num_windows, num_models = extracted_WxM.shape
    names = pl.Enum([model.name for model in models])
    return pl.DataFrame(
        {
            "model": pl.Series(
                [m.name for m in models for _ in range(num_windows)], dtype=names
            ),
            "window_id": np.tile(np.arange(num_windows), num_models),
            "length": np.full(extracted_WxM.size, length, np.int32),
            "context": np.full(extracted_WxM.size, context, np.int32),
            "extracted": extracted_WxM.T.ravel(),
            "anywhere": pl.Series(
                [None] * extracted_WxM.size
                if anywhere_WxM is None
                else anywhere_WxM.T.ravel().tolist(),
                dtype=pl.Boolean,
            ),
        }
    )


def models_of(*kinds):
    """(name, params, baseline) for each."""
    return [Model(name, "", params, baseline) for name, params, baseline in kinds]


SOME = models_of(("big", 9, False), ("small", 1, False), ("other", 5, True))


@hypothesis.given(
    hnp.arrays(bool, st.tuples(st.integers(1, 40), st.integers(2, 4))),
    st.randoms(use_true_random=False),
)
def test_what_two_models_share_is_the_same_from_either_side(extracted_WxM, random):
    models = models_of(
        *(
            (f"m{i}", random.randrange(3), random.random() < 0.3)
            for i in range(extracted_WxM.shape[1])
        )
    )
    records = records_of(extracted_WxM, models)
    shuffled = records.sample(fraction=1, shuffle=True, seed=random.randrange(99))
    table = memorized_sets.pairs(shuffled, models)
    assert len(table) == len(models) * (len(models) - 1)
    shared = {
        (row["model"], row["other"]): row["memorized"] - row["not_by_other"]
        for row in table.iter_rows(named=True)
    }
    columns = {m.name: extracted_WxM[:, i] for i, m in enumerate(models)}
    for (a, b), both in shared.items():
        assert both == shared[b, a] == (columns[a] & columns[b]).sum()
    totals = memorized_sets.totals(shuffled, models)
    assert dict(totals.select("model", "memorized").iter_rows()) == {
        name: column.sum() for name, column in columns.items()
    }


def test_only_one_model_is_said_of_those_trained_on_the_corpus():
    extracted_WxM = np.array(
        [[1, 0, 1], [1, 0, 0], [0, 1, 0], [1, 1, 0], [0, 0, 1]], bool
    )
    table = memorized_sets.totals(records_of(extracted_WxM, SOME), SOME)
    assert table.select("windows", "model", "memorized", "only").rows() == [
        (5, "small", 2, 1),
        (5, "big", 3, 2),
        (5, "other", 2, None),
    ]


def test_strictly_what_the_others_say_is_nowhere_in_the_corpus():
    # big, small, other: what each extracts, and what is somewhere in the corpus.
    extracted_WxM = np.array(
        [[1, 0, 0], [1, 0, 1], [1, 0, 0], [0, 1, 0], [1, 1, 0], [0, 0, 1]], bool
    )
    anywhere_WxM = extracted_WxM | np.array(
        [[0, 0, 0], [0, 0, 0], [0, 1, 0], [1, 0, 0], [0, 0, 0], [0, 0, 0]], bool
    )
    records = records_of(extracted_WxM, SOME, anywhere_WxM=anywhere_WxM)
    table = memorized_sets.totals(records, SOME)
    assert table.select("model", "only", "only_strict").rows() == [
        ("small", 1, 0),
        ("big", 3, 2),
        ("other", None, None),
    ]
    # What a baseline says does not matter, what a member says does.
    for name, expected in (("other", [0, 2, None]), ("small", [None] * 3)):
        unknown = pl.col("model") == name
        partly = records.with_columns(
            anywhere=pl.when(unknown).then(None).otherwise("anywhere")
        )
        strict = memorized_sets.totals(partly, SOME)
        assert strict["only_strict"].to_list() == expected
        assert strict["only"].to_list() == [1, 3, None]


def test_a_single_member_is_alone_with_nobody():
    models = models_of(("a", 1, False), ("b", 2, True))
    table = memorized_sets.totals(records_of(np.ones((3, 2), bool), models), models)
    assert table["only"].to_list() == [None, None]


def test_windows_that_a_model_was_not_given_do_not_count():
    records = records_of(np.ones((4, 3), bool), SOME)
    missing = (pl.col("model") == "small") & (pl.col("window_id") == 2)
    totals = memorized_sets.totals(records.filter(~missing), SOME)
    assert totals["windows"].to_list() == totals["memorized"].to_list() == [3, 3, 3]
    nothing = memorized_sets.pairs(records.filter(pl.col("model") == "big"), SOME)
    assert nothing.is_empty()


def test_lengths_and_contexts_are_counted_apart():
    yes, no = np.ones((2, 3), bool), np.zeros((3, 3), bool)
    records = pl.concat([records_of(yes, SOME, 200, 20), records_of(no, SOME, 200, 50)])
    table = memorized_sets.totals(records, SOME)
    small = table.filter(pl.col("model") == "small")
    assert small.select("length", "context", "windows", "memorized").rows() == [
        (200, 20, 2, 2),
        (200, 50, 3, 0),
    ]
    pairs = memorized_sets.pairs(records, SOME)
    sets = memorized_sets.MemorizedSets(table, pairs, (200, 50))
    assert [shown["windows"].unique().to_list() for shown in sets.shown()] == [[3], [3]]


@pytest.mark.parametrize(
    ("cells", "asked", "expected"),
    [
        ([(100, 50, 7), (200, 150, 9)], {}, (200, 150)),
        # Among equals full context, then the shortest window, then the longest prompt.
        ([(100, 20, 7), (200, 150, 7)], {}, (200, 150)),
        ([(200, 150, 7), (100, 50, 7)], {}, (100, 50)),
        ([(200, 20, 7), (200, 100, 7)], {}, (200, 100)),
        # An empty prompt is a last resort.
        ([(50, 0, 9), (100, 50, 7)], {}, (100, 50)),
        ([(50, 0, 9)], {}, (50, 0)),
        ([(100, 50, 7), (200, 150, 9)], {"length": 100}, (100, 50)),
        ([(200, 50, 7), (200, 150, 9)], {"length": 200, "context": 50}, (200, 50)),
        ([(50, 0, 1), (100, 50, 7)], {"context": 0}, (50, 0)),
        ([(100, 50, 7)], {"length": 200}, None),
        ([], {}, None),
    ],
)
def test_the_cell_that_is_shown(cells, asked, expected):
    schema = {"length": pl.Int32, "context": pl.Int32, "windows": pl.Int64}
    table = pl.DataFrame(cells, schema=schema, orient="row")
    assert memorized_sets.choose_cell(table, 50, **asked) == expected
