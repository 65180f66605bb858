import numpy as np
import pytest

from experiments.extraction import one_model
from tests.experiments.extraction import fake_sweeps

COLUMNS = {
    "window_id": [0, 1, 2, 0, 1, 2, 0],
    "model": ["a", "a", "a", "b", "b", "b", "c"],
    "bucket": [8, 0, 8, 8, 0, 8, 8],
    "context": [50, 50, 20, 50, 50, 50, 50],
    "bleu": [0.5, 0.25, 0.0, None, None, None, 1.0],
    "edit_distance": [1, 2, 3, 4, None, 5, 6],
}


@pytest.fixture
def runs():
    return fake_sweeps.runs_of(COLUMNS, members={"a": 7, "b": 9}, baselines={"c": 99})


def test_members_of_which_something_is_known_the_largest_first(runs):
    def ids(columns):
        known = one_model.with_columns_known(runs, columns)
        return [(model.name, rows["window_id"].to_list()) for model, rows in known]

    # In the order of buckets; the prompt of 20 tokens is not all but the suffix.
    assert ids([]) == [("b", [1, 0, 2]), ("a", [1, 0])]
    assert ids(["edit_distance"]) == [("b", [0, 2]), ("a", [1, 0])]
    assert ids(["bleu", "edit_distance"]) == [("a", [1, 0])]
    assert ids(["anywhere"]) == []


def test_means_of_several_measures_in_each_bucket(runs):
    (_, (model, rows)) = one_model.with_columns_known(runs, [])
    measures = {"one": np.array([0.0, 1.0]), "other": np.array([0.25, 0.5])}
    table = one_model.by_bucket(model, rows, measures)
    assert table.columns == [
        *("model", "params", "bucket", "count_low", "count_high", "repetitions"),
        *("one", "one_lower", "one_upper", "other", "other_lower", "other_upper"),
        *("windows", "clusters"),
    ]
    names = ["model", "params", "bucket", "count_low", "one", "other", "windows"]
    assert table.select(names).rows() == [
        ("a", 7, 0, 1, 0.0, 0.25, 1),
        ("a", 7, 8, 4, 1.0, 0.5, 1),
    ]
    assert one_model.sample(rows) == "2 windows in 2 clusters"
