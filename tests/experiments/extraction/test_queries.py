import polars as pl
import pytest

from experiments.extraction import queries


def rows(**columns):
    """One row per window, with a length, a bucket and a count if none are given."""
    size = max(len(values) for values in columns.values())
    given = {"window_id": list(range(size)), "length": [100] * size} | columns
    return pl.DataFrame(given)


def test_full_context_ends_where_the_window_ends():
    records = rows(length=[100, 100, 50, 500], context=[50, 49, 0, 450])
    full = queries.at_full_context(records, suffix_length=50)
    assert full["window_id"].to_list() == [0, 2, 3]


def test_windows_that_a_model_was_not_asked_about_are_not_shared():
    records = rows(
        model=["a", "a", "b", "b", "b"],
        window_id=[1, 2, 2, 3, 2],
        context=[50, 50, 50, 50, 10],
    )
    shared = queries.shared_by_models(records, num_models=2)
    assert shared.select("model", "window_id", "context").rows() == [
        ("a", 2, 50),
        ("b", 2, 50),
    ]
    # A third model that has no records at all shares nothing.
    assert queries.shared_by_models(records, num_models=3).is_empty()


def test_a_bucket_is_described_by_its_windows_each_once():
    records = rows(
        window_id=[0, 0, 1, 2, 3],
        bucket=[12, 12, 12, 12, 0],
        count=[8, 8, 9, 9, 1],
    )
    found = queries.buckets(records)
    assert found.drop("repetitions").rows() == [(0, 1, 1), (12, 8, 9)]
    assert found["repetitions"].to_list() == pytest.approx([1, (8 * 9 * 9) ** (1 / 3)])


def test_windows_are_counted_once_for_all_models_and_contexts():
    records = rows(window_id=[0, 0, 1, 2], length=[100, 100, 100, 50], bucket=[4] * 4)
    assert queries.windows_per_bucket(records).rows() == [(50, 4, 1), (100, 4, 2)]


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        # Most windows at every length.
        ([(100, 0, 9), (200, 0, 1), (100, 4, 2), (200, 4, 2)], 4),
        # Among equals the most in all, then the most repetitions.
        ([(100, 0, 2), (200, 0, 3), (100, 4, 2), (200, 4, 2)], 0),
        ([(100, 0, 2), (200, 0, 2), (100, 4, 2), (200, 4, 2)], 4),
        # A length without windows counts as 0.
        ([(100, 0, 1), (200, 0, 1), (100, 4, 9)], 0),
    ],
)
def test_the_fullest_bucket(cells, expected):
    windows = [(length, bucket) for length, bucket, n in cells for _ in range(n)]
    lengths, buckets = zip(*windows, strict=True)
    records = rows(length=list(lengths), bucket=list(buckets))
    assert queries.fullest_bucket(records) == expected


def test_close_calls_are_counted_or_unknown():
    near = queries.NEAR_TIE / 2
    records = rows(
        model=["a"] * 5 + ["b"] * 2,
        extracted=[True, False, False, True, False, True, True],
        tie=[True, False, False, False, False, False, None],
        min_margin=[0.0, -near, -2 * queries.NEAR_TIE, near, -9.0, 0.5, None],
    )
    assert queries.verdicts_per_model(records).rows() == [
        ("a", 5, 2, 1, 3),
        ("b", 2, 2, None, None),
    ]
