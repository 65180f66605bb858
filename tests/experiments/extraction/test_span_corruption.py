import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from experiments.errors import UsageError
from experiments.extraction import span_corruption
from experiments.extraction.span_corruption import corrupt
from experiments.models.sentinels import T5_SENTINELS, Sentinels

EOS = 1
# Some ids, for the words and the three sentinels of the figure.
WORDS = [
    *("Thank", "you", "for", "inviting", "me", "to"),
    *("your", "party", "last", "week", "."),
]
X, Y, Z = 32_099, 32_098, 32_097


def test_the_figure_of_the_t5_paper():
    """Raffel et al. 2020, figure 2, whose sentence ends in a full stop besides."""
    ids = {word: 100 + i for i, word in enumerate(WORDS)}
    dropped = [word in ("for", "inviting", "last") for word in ids]
    blanks = corrupt(np.array(list(ids.values())), np.array(dropped), T5_SENTINELS, EOS)
    # Thank you <X> me to your party <Y> week . </s>
    assert blanks.inputs_S.tolist() == [100, 101, X, 104, 105, 106, 107, Y, 109, 110, 1]
    # <X> for inviting <Y> last <Z> </s>
    assert blanks.targets_T.tolist() == [X, 102, 103, Y, 108, Z, 1]
    assert blanks.num_scored == 6
    assert blanks.inputs_S.dtype == blanks.targets_T.dtype == np.int32


@pytest.mark.parametrize(
    ("dropped", "inputs", "targets", "num_scored"),
    [
        # In a blank at the end, </s> ends it.
        ("x_x_", [5, X, 7, Y, 1], [X, 6, Y, 8, 1], 5),
        ("_xx_", [X, 6, 7, Y, 1], [X, 5, Y, 8, 1], 5),
        ("__xx", [X, 7, 8, 1], [X, 5, 6, Y, 1], 4),
        ("xxx_", [5, 6, 7, X, 1], [X, 8, 1], 3),
        ("_x_x", [X, 6, Y, 8, 1], [X, 5, Y, 7, Z, 1], 5),
    ],
)
def test_blanks_at_the_borders(dropped, inputs, targets, num_scored):
    dropped_4 = np.array([letter == "_" for letter in dropped])
    blanks = corrupt(np.array([5, 6, 7, 8]), dropped_4, T5_SENTINELS, EOS)
    assert blanks.inputs_S.tolist() == inputs
    assert blanks.targets_T.tolist() == targets
    assert blanks.num_scored == num_scored


def filled(blanks, sentinels):
    """The window that inputs and targets are of, read one token after another."""
    fills, current = {}, None
    for token in blanks.targets_T[:-1].tolist():
        if token > sentinels.first - sentinels.number:
            current = fills[token] = []
        else:
            current.append(token)
    window = []
    for token in blanks.inputs_S[:-1].tolist():
        window += fills.get(token, [token])
    return window, fills


@hypothesis.given(
    st.lists(st.tuples(st.integers(2, 40), st.booleans()), min_size=2, max_size=30)
)
def test_blanks_and_fills_make_the_window(window):
    tokens, dropped = (list(column) for column in zip(*window, strict=True))
    hypothesis.assume(any(dropped))
    sentinels = Sentinels(99, 40)
    blanks = corrupt(np.array(tokens), np.array(dropped), sentinels, EOS)
    again, fills = filled(blanks, sentinels)
    assert again == tokens
    assert sum(map(len, fills.values())) == sum(dropped)
    # One sentinel for each blank, in descending order, and one at the end if needed.
    assert list(fills) == [99 - i for i in range(len(fills))]
    num_blanks = sum(token > 59 for token in blanks.inputs_S)
    assert num_blanks == len(fills) - (not dropped[-1])
    assert (blanks.targets_T[-1], blanks.inputs_S[-1]) == (EOS, EOS)
    assert blanks.num_scored == sum(dropped) + num_blanks + 1
    assert len(blanks.targets_T) - blanks.num_scored == (not dropped[-1])


@hypothesis.given(
    masking=st.sampled_from(["iid", "spans"]),
    seed=st.integers(0, 3),
    window_id=st.integers(0, 2**40),
    length=st.integers(2, 300),
)
def test_masks_drop_exactly_15_percent(masking, seed, window_id, length):
    mask_L = span_corruption.mask(masking, seed, window_id, length)
    assert mask_L.dtype == bool
    assert len(mask_L) == length
    assert mask_L.sum() == span_corruption.num_dropped(length)
    blanks = int((np.diff(mask_L.astype(int), prepend=0) == 1).sum())
    most = span_corruption.most_blanks(masking, length)
    if masking == "spans":
        assert blanks == most
        assert not mask_L[0]
        assert mask_L[-1]
    assert 1 <= blanks <= most
    again_L = span_corruption.mask(masking, seed, np.int64(window_id), length)
    np.testing.assert_array_equal(mask_L, again_L)


def test_how_many_are_dropped():
    assert [span_corruption.num_dropped(n) for n in (2, 3, 4, 10, 30, 100, 500)] == [
        *(1, 1, 1, 2, 4),
        *(15, 75),
    ]
    with pytest.raises(UsageError, match="a window of 1 tokens cannot be in part"):
        span_corruption.num_dropped(1)


def test_masks_stay_the_same():
    """A sweep that goes on elsewhere asks for the same blanks."""
    iid, spans = (
        "".join("x_"[int(d)] for d in span_corruption.mask(masking, 5, 7, 60))
        for masking in ("iid", "spans")
    )
    assert iid == "__xxxx_xxx_xxxxxxxxx_xxx_xxxxx_xxxxxxxxxxxxxxxxxx_xx_xxxxxxx"
    assert spans == "xxx_____xxxxxxxxxxxx___xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx_"


def test_masks_of_other_windows_and_seeds_differ():
    masks = [
        span_corruption.mask("iid", seed, window_id, 100).tobytes()
        for seed in range(3)
        for window_id in range(3)
    ]
    assert len(set(masks)) == 9


def test_iid_masks_favour_nothing():
    """All pairs of 12 tokens come as often as they should, within 5 deviations."""
    masks = [span_corruption.mask("iid", 0, i, 12) for i in range(4000)]
    distinct, counts = np.unique(np.stack(masks), axis=0, return_counts=True)
    assert len(distinct) == 66
    expected = len(masks) / 66
    assert (np.abs(counts - expected) <= 5 * np.sqrt(expected)).all()


def test_span_lengths_favour_nothing():
    """5 dropped of 35 in two runs: 4 ways, and 29 for the 30 that are kept."""
    masks = [span_corruption.mask("spans", 1, i, 35) for i in range(2000)]
    edges = [np.flatnonzero(np.diff(m.astype(int), prepend=0, append=0)) for m in masks]
    starts, ends = np.stack(edges).reshape(-1, 2, 2).transpose(2, 0, 1)
    first_dropped, first_kept = (ends - starts)[:, 0], starts[:, 0]
    for values, number in ((first_dropped, 4), (first_kept, 29)):
        distinct, counts = np.unique(values, return_counts=True)
        np.testing.assert_array_equal(distinct, np.arange(1, number + 1))
        expected = len(masks) / number
        assert (np.abs(counts - expected) <= 5 * np.sqrt(expected)).all()
    correlation = np.corrcoef(first_dropped, first_kept)[0, 1]
    assert abs(correlation) < 5 / np.sqrt(len(masks))


def test_sentinels_that_are_not_enough():
    dropped_5 = np.array([False, True, False, True, False])
    tokens_5 = np.arange(2, 7)
    assert corrupt(tokens_5, dropped_5, Sentinels(99, 3), EOS).num_scored == 5
    with pytest.raises(
        UsageError, match=r"2 blanks need 3 sentinels, .* only 2 from 99"
    ):
        corrupt(tokens_5, dropped_5, Sentinels(99, 2), EOS)
    # With no kept token after it, the last blank needs no sentinel at its end.
    assert corrupt(tokens_5[:4], dropped_5[:4], Sentinels(99, 2), EOS).num_scored == 5


def test_a_window_with_a_sentinel_in_it():
    dropped_3 = np.array([False, True, False])
    for token in (90, 99):
        with pytest.raises(UsageError, match=f"token {token} is a sentinel"):
            corrupt(np.array([5, 6, token]), dropped_3, Sentinels(99, 10), EOS)
    for token in (89, 100):
        corrupt(np.array([5, 6, token]), dropped_3, Sentinels(99, 10), EOS)


@pytest.mark.parametrize(("first", "number"), [(9, 11), (9, 0), (-1, 1)])
def test_sentinels_below_0(first, number):
    with pytest.raises(UsageError, match=f"{number} sentinels from {first} downwards"):
        Sentinels(first, number)
    assert Sentinels(9, 10).number == 10
