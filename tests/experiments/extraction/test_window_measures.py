import numpy as np
import polars

from experiments.extraction import near_misses, window_measures

IS_WHITESPACE = np.array([False, True, False])


def windows_of(num_windows, length):
    tokens = np.random.default_rng(0).integers(0, 3, (num_windows, length)).tolist()
    return polars.DataFrame(
        {"window_id": range(num_windows), "length": length, "tokens": tokens},
        schema_overrides={"tokens": polars.List(polars.UInt32())},
    )


def test_measures_are_those_of_each_window():
    windows = windows_of(5, 8)
    measured = window_measures.add(windows, IS_WHITESPACE)
    assert measured.drop("whitespace", "entropy").equals(windows)
    assert measured.dtypes[-2:] == [polars.Float32(), polars.Float32()]
    for row in measured.iter_rows(named=True):
        tokens = np.array([row["tokens"]])
        assert row["whitespace"] == np.float32((tokens == 1).mean())
        assert row["entropy"] == near_misses.token_entropy(tokens).item()
    assert measured["whitespace"].n_unique() == 2


def test_without_a_tokenizer_white_space_is_not_known():
    measured = window_measures.add(windows_of(2, 8), None)
    assert measured["whitespace"].to_list() == [None, None]
    assert measured.dtypes[-2:] == [polars.Float32(), polars.Float32()]
    assert measured["entropy"].null_count() == 0
