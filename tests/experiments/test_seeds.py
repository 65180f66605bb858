import itertools

import jax
import numpy as np

from experiments import seeds
from experiments.seeds import Stream


def test_streams_and_seeds_are_distinct_and_repeatable():
    data = {
        (seed, stream): tuple(np.asarray(jax.random.key_data(seeds.key(seed, stream))))
        for seed, stream in itertools.product((0, 1, 2**127), Stream)
    }
    assert len(set(data.values())) == len(data)
    again = jax.random.key_data(seeds.key(1, Stream.NOISE))
    assert tuple(np.asarray(again)) == data[1, Stream.NOISE]


def test_generators_depend_on_the_step():
    draws = [seeds.generator(3, Stream.SAMPLING, step).random() for step in (0, 1, 0)]
    assert draws[0] == draws[2] != draws[1]


def test_drawn_seeds_differ():
    drawn = {seeds.draw() for _ in range(10)}
    assert len(drawn) == 10
    assert max(drawn) > 2**100
