"""Windows with blanks, and what fills the blanks, as T5 reads and writes them.

Some tokens of a window are *dropped*; each run of neighbouring dropped tokens is a
*blank*. With sentinels <X>, <Y>, <Z> in this order (Raffel et al. 2020, arXiv
1910.10683, figure 2):

    window   Thank you for inviting me to your party last week
    inputs   Thank you <X> me to your party <Y> week </s>
    targets  <X> for inviting <Y> last <Z> </s>

The targets name each blank and then fill it. What ends the last blank is one more
sentinel, which stands for the kept tokens after it. A window that ends in a blank has
no such tokens: there </s> follows the last dropped token. That is how the data of T5
are made, whose targets replace each run of kept tokens by a sentinel. A window that
starts with a blank is beyond those data, for their masks never do; here its blank is
named like any other.

Two ways of dropping are built. Both depend on (seed, window_id) and on the window's
length alone, and drop exactly `num_dropped` tokens:

- `iid`: single tokens at random, as in the protocol of Carlini et al. 2023 (arXiv
  2202.07646, section 5.1: 170 of 200 tokens are context, 30 are predicted). All sets of
  so many tokens are equally likely. With the number fixed the choices are not quite
  independent, but windows of one length have equally many tokens to predict.
- `spans`: blanks of 3 tokens on average, as in the training of T5 (Raffel et al. 2020,
  section 3.1.4). Kept and dropped runs take turns, a kept one first and a dropped one
  last; their number is fixed, and all ways to cut the kept and the dropped tokens into
  so many runs are equally likely.
"""

import typing
from typing import Literal, NamedTuple

import numpy as np

from experiments.errors import UsageError
from experiments.extraction.window_sampling import random_keys
from experiments.models.sentinels import Sentinels

Masking = Literal["iid", "spans"]
MASKINGS: tuple[Masking, ...] = typing.get_args(Masking)

_DROPPED = 0.15
_MEAN_SPAN = 3


class Blanks(NamedTuple):
    """One window with blanks.

    Attributes:
      inputs_S: i32, kept tokens, a sentinel for each blank, and </s>.
      targets_T: i32, each blank's sentinel and tokens, then what ends the last one,
        </s> at the latest.
      num_scored: How many targets count: all up to what ends the last blank. A </s>
        after a last sentinel fills nothing.
    """

    inputs_S: np.ndarray
    targets_T: np.ndarray
    num_scored: int


def num_dropped(length: int) -> int:
    """How many tokens of a window are dropped: 15 %, at least 1, but not all.

    Halves are rounded to the even number, as T5's own code does.

    Raises:
      UsageError: Fewer than 2 tokens.

    Example:
      >>> num_dropped(200), num_dropped(50), num_dropped(150)
      (30, 8, 22)
    """
    if length < 2:
        raise UsageError(
            f"a window of {length} tokens cannot be in part dropped: give windows of "
            "at least 2"
        )
    return min(max(round(_DROPPED * length), 1), length - 1)


def most_blanks(masking: Masking, length: int) -> int:
    """The largest number of blanks that a window can have.

    Example:
      >>> most_blanks("iid", 200), most_blanks("spans", 200)
      (30, 10)
    """
    dropped = num_dropped(length)
    kept = length - dropped
    if masking == "iid":
        return min(dropped, kept + 1)
    return min(max(round(dropped / _MEAN_SPAN), 1), kept)


def mask(masking: Masking, seed: int, window_id: int, length: int) -> np.ndarray:
    """Which tokens of a window are dropped, bool[L].

    Args:
      masking: `iid` or `spans`, see above.
      seed: An integer >= 0.
      window_id: Of the window; others have other masks.
      length: L.

    Raises:
      UsageError: Fewer than 2 tokens.

    Example:
      >>> "".join("_" if dropped else "x" for dropped in mask("spans", 0, 1, 40))
      'xxxxxxxxxx_____xxxxxxxxxxxxxxxxxxxxxxxx_'
    """
    dropped = num_dropped(length)
    stream = (int(seed), int(window_id), masking)
    if masking == "iid":
        dropped_L = np.zeros(length, bool)
        dropped_L[_draw(stream, length, dropped)] = True
        return dropped_L
    number = most_blanks(masking, length)
    kept_R = _cut(length - dropped, number, (*stream, "kept"))
    dropped_R = _cut(dropped, number, (*stream, "dropped"))
    lengths = np.stack([kept_R, dropped_R], axis=1).ravel()
    return np.repeat(np.tile([False, True], number), lengths)


def _draw(stream: tuple[int | str, ...], population: int, number: int) -> np.ndarray:
    """`number` different integers below `population`; all sets are equally likely."""
    return np.argsort(random_keys(stream, np.arange(population)))[:number]


def _cut(total: int, parts: int, stream: tuple[int | str, ...]) -> np.ndarray:
    """`parts` integers >= 1 with the sum `total`; all sequences are equally likely."""
    cuts = np.sort(_draw(stream, total - 1, parts - 1)) + 1
    return np.diff(cuts, prepend=0, append=total)


def corrupt(
    tokens_L: np.ndarray, dropped_L: np.ndarray, sentinels: Sentinels, eos_id: int
) -> Blanks:
    """Makes blanks of the dropped tokens.

    Args:
      tokens_L: Token ids.
      dropped_L: bool.
      sentinels: Their ids.
      eos_id: </s>.

    Raises:
      UsageError: A token of the window is a sentinel, or there are not enough of them.

    Example:
      >>> dropped_5 = np.array([False, True, True, False, True])
      >>> blanks = corrupt(np.array([5, 6, 7, 8, 9]), dropped_5, Sentinels(99, 10), 1)
      >>> blanks.inputs_S.tolist(), blanks.targets_T.tolist(), blanks.num_scored
      ([5, 99, 8, 98, 1], [99, 6, 7, 98, 9, 1], 6)
    """
    tokens_L = np.asarray(tokens_L, np.int64)
    is_sentinel_L = is_sentinel(tokens_L, sentinels)
    if is_sentinel_L.any():
        raise UsageError(
            f"token {tokens_L[is_sentinel_L][0]} is a sentinel (there are "
            f"{sentinels.number} from {sentinels.first} downwards), so a blank could "
            "not be told from it: give other sentinels, or leave the window out"
        )
    starts_L = dropped_L & ~np.concatenate([[False], dropped_L[:-1]])
    number = int(starts_L.sum())
    closed = not dropped_L[-1]
    if number + closed > sentinels.number:
        raise UsageError(
            f"{number} blanks need {number + closed} sentinels, but there are only "
            f"{sentinels.number} from {sentinels.first} downwards: give shorter "
            "windows, or drop spans instead of single tokens"
        )
    ids = sentinels.first - np.arange(number + closed)
    inputs_L = tokens_L.copy()
    inputs_L[starts_L] = ids[:number]
    inputs_S = inputs_L[starts_L | ~dropped_L]
    places = np.flatnonzero(starts_L[dropped_L])
    targets_T = np.insert(tokens_L[dropped_L], places, ids[:number])
    return Blanks(
        inputs_S=np.append(inputs_S, eos_id).astype(np.int32),
        targets_T=np.concatenate([targets_T, ids[number:], [eos_id]]).astype(np.int32),
        num_scored=len(targets_T) + 1,
    )


def is_sentinel(tokens: np.ndarray, sentinels: Sentinels) -> np.ndarray:
    """Which tokens are sentinels, bool of the same shape.

    Example:
      >>> is_sentinel(np.array([89, 90, 99, 100]), Sentinels(99, 10)).tolist()
      [False, True, True, False]
    """
    last = sentinels.first - sentinels.number + 1
    return (tokens >= last) & (tokens <= sentinels.first)
