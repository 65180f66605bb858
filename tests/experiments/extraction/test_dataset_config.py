import pytest

from experiments.errors import UsageError
from experiments.extraction import dataset_config
from experiments.extraction.buckets import Bucket


def parse(**flags):
    return dataset_config.parse({"out": "windows", **flags})


def test_what_is_not_given_is_as_in_the_paper():
    config = parse(lengths=None, seed=None, one_per_repeat=None)
    assert config.lengths == (50, 100, 150, 200, 250, 300, 350, 400, 450, 500)
    assert (config.per_bucket, config.sample, config.seed) == (1000, "by_count", 0)
    assert config.bucket_list(3) == [Bucket(0, 1, 2), Bucket(4, 2, 3), Bucket(6, 3, 4)]


def test_lengths_and_edges_are_lists_of_integers():
    config = parse(lengths="300, 50,100", edges="2,8")
    assert config.lengths == (50, 100, 300)
    assert config.bucket_list(10**9) == [Bucket(0, 2, 8)]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"out": None}, "--out is missing"),
        ({"lengths": "50,x"}, "lengths='50,x', expected integers with commas"),
        ({"lengths": "50;100"}, "lengths='50;100', expected integers with commas"),
        ({"lengths": ""}, "lengths='', expected integers with commas"),
        ({"lengths": "-50"}, "lengths='-50', expected integers with commas"),
        ({"lengths": "0,50"}, "lengths=0,50, expected integers >= 1, each once"),
        ({"lengths": "50,100,50"}, "lengths=50,100,50, .* each once"),
        ({"edges": "1,2,2"}, "edges=1,2,2, expected two or more rising integers"),
        ({"edges": "2^3"}, r"edges='2\^3', expected integers with commas"),
        ({"per_bucket": 0}, "per_bucket=0, expected an integer >= 1"),
        ({"sample": "uniform", "num_windows": -1}, "num_windows=-1, expected an"),
        ({"seed": -1}, "seed=-1, expected an integer >= 0"),
        ({"num_windows": 5}, "--num_windows has no meaning with sample=by_count"),
        ({"sample": "uniform", "per_bucket": 5}, "--per_bucket has no meaning"),
        ({"sample": "uniform", "edges": "1,2"}, "--edges has no meaning"),
        ({"sample": "uniform", "one_per_repeat": True}, "--one_per_repeat has no mean"),
    ],
)
def test_flags_that_make_no_sense_are_refused(flags, message):
    with pytest.raises(UsageError, match=message):
        parse(**flags)
