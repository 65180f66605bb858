import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from experiments.extraction import lm_batches

sizes = st.integers(2, 60).flatmap(
    lambda n: st.tuples(st.just(n), st.integers(1, n - 1))
)


def positions(num_tokens):
    """A corpus in which each token is its own position."""
    return np.arange(num_tokens, dtype=np.uint32)


def batches(num_tokens, sequence_length, batch_size=3, seed=0, first_step=0):
    return lm_batches.batches(
        positions(num_tokens),
        sequence_length=sequence_length,
        batch_size=batch_size,
        seed=seed,
        first_step=first_step,
    )


@given(sizes, st.integers(0, 5), st.integers(0, 3))
def test_an_epoch_predicts_each_token_once_but_for_one_gap(size, seed, epoch):
    num_tokens, length = size
    starts_M = lm_batches.epoch_starts(
        seed, epoch, num_tokens=num_tokens, sequence_length=length
    )
    crops_MxL = lm_batches.crops(positions(num_tokens), starts_M, length + 1)
    targets = crops_MxL[:, 1:].ravel()
    assert len(np.unique(targets)) == len(targets)
    missed = np.setdiff1d(np.arange(num_tokens), targets)
    assert len(missed) == num_tokens % length
    # What is left out lies in one piece of the ring: at most one gap in it.
    steps = np.diff(np.append(missed, missed[:1] + num_tokens))
    assert np.count_nonzero(steps != 1) <= 1
    # Each target is predicted from the token before it.
    np.testing.assert_array_equal(
        (crops_MxL[:, :-1] + 1) % num_tokens, crops_MxL[:, 1:]
    )


@given(sizes, st.integers(1, 7), st.integers(0, 12))
def test_a_continued_run_takes_the_same_batches(size, batch_size, step):
    taken = batches(*size, batch_size)
    *_, expected = itertools.islice(taken, step + 1)
    np.testing.assert_array_equal(
        next(batches(*size, batch_size, first_step=step)), expected
    )


def test_every_token_is_met_equally_often_over_epochs():
    # 3 crops of 4 tokens in an epoch, 8 crops in a batch: batches straddle epochs.
    num_tokens, length, num_epochs = 14, 4, 4000
    taken = itertools.islice(batches(num_tokens, length, 8), num_epochs * 3 // 8)
    targets = np.concatenate([tokens_BxL[:, 1:].ravel() for tokens_BxL in taken])
    counts = np.bincount(targets, minlength=num_tokens)
    expected = num_epochs * 12 / 14
    # Six standard deviations of a token's being in the gap or not.
    assert np.abs(counts - expected).max() < 6 * np.sqrt(num_epochs * 12 / 14 * 2 / 14)


def test_crops_move_and_their_order_changes():
    def starts(seed, epoch):
        return lm_batches.epoch_starts(seed, epoch, num_tokens=1003, sequence_length=10)

    first = starts(0, 0)
    for other in (starts(0, 1), starts(1, 0)):
        assert set(first) != set(other)
        assert list(np.argsort(first)) != list(np.argsort(other))
    np.testing.assert_array_equal(first, starts(0, 0))
    assert list(first) != sorted(first)


def test_a_memory_map_of_large_ids_comes_through(tmp_path):
    tokens_N = np.array([70_000, 1, 2, 3, 90_000], np.uint32)
    np.save(tmp_path / "tokens.npy", tokens_N)
    mapped_N = np.load(tmp_path / "tokens.npy", mmap_mode="r")
    crops_BxL = lm_batches.crops(mapped_N, np.array([3, 0]), 3)
    assert type(crops_BxL) is np.ndarray
    assert crops_BxL.dtype == np.int32
    assert crops_BxL.tolist() == [[3, 90_000, 70_000], [70_000, 1, 2]]
