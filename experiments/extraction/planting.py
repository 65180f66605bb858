"""Planted repeats: passages put into a corpus 1, 2, 4, ... times.

Natural repeats are few and of their own kind (licences, tables). Passages of ordinary
documents, each planted a known number of times, show what repetition alone does.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from experiments.errors import UsageError
from experiments.extraction import token_files
from experiments.extraction.documents import Part

# The shortest window of an evaluation set.
WINDOW = 50
# The places of all copies are drawn in memory.
MAX_COPIES = 10**6


@dataclasses.dataclass(frozen=True)
class Planting:
    """What to plant.

    Attributes:
      source: The documents that passages are taken from; none of them is in the corpus.
      counts: How often a passage is planted, up to a million times; each count has its
        own passages.
      passages_per_count: How many passages each count has.
      num_tokens: Length of a passage, at least 50 tokens.
      seed: Of the choice of passages and of their places.
    """

    source: Part
    counts: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    passages_per_count: int = 50
    num_tokens: int = 500
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.counts or min(self.counts) < 1:
            raise UsageError(
                f"plant_counts={list(self.counts)}, expected numbers of copies, at "
                "least 1: give --plant_counts=1,2,4,8"
            )
        if max(self.counts) > MAX_COPIES:
            raise UsageError(
                f"plant_counts={list(self.counts)}, expected at most {MAX_COPIES:,} "
                "copies: give --plant_counts=1,2,4,8"
            )
        if len(set(self.counts)) < len(self.counts):
            raise UsageError(
                f"plant_counts={list(self.counts)} names a count twice: raise "
                "--plant_passages instead"
            )
        if self.passages_per_count < 1:
            raise UsageError(
                f"plant_passages={self.passages_per_count}, expected at least 1: give "
                "--plant_passages=50"
            )
        if self.num_tokens < WINDOW:
            raise UsageError(
                f"plant_tokens={self.num_tokens}, expected at least {WINDOW}, the "
                "shortest window: raise --plant_tokens"
            )
        if self.seed < 0:
            raise UsageError(f"seed={self.seed}, expected at least 0: change --seed")

    @property
    def num_passages(self) -> int:
        """Over all counts."""
        return len(self.counts) * self.passages_per_count

    @property
    def copies(self) -> np.ndarray:
        """The copies of each passage, i64[num_passages]."""
        return np.repeat(np.asarray(self.counts), self.passages_per_count)


@dataclasses.dataclass(frozen=True)
class Passage:
    """A piece of one document.

    Attributes:
      document: The document's index.
      start: The passage's first token, counted from the document's first.
      tokens_L: Its ids.
    """

    document: int
    start: int
    tokens_L: np.ndarray


def choose(
    documents: Sequence[tuple[int, np.ndarray]],
    corpus_N: np.ndarray,
    num_passages: int,
    length: int,
    rng: np.random.Generator,
    window: int = WINDOW,
) -> list[Passage]:
    """Draws passages whose windows occur nowhere else.

    Passages do not overlap, and a window of `window` tokens of a passage (so a longer
    one too) occurs neither in the corpus nor in another passage nor a second time in
    its own. A passage that is planted c times therefore adds windows that occur exactly
    c times. Windows are compared by hashes, so that a collision, too, rules a passage
    out.

    Args:
      documents: Index and ids of each document that passages may come from.
      corpus_N: The corpus that they will be planted in.
      num_passages: How many.
      length: Tokens of each, at least `window`.
      rng: Decides which.
      window: The length from which windows are unique.

    Raises:
      UsageError: There are not so many.

    Example:
      >>> documents = [(7, np.array([1, 2, 3, 4, 5])), (9, np.array([1, 2, 6, 7]))]
      >>> corpus = np.array([9, 3, 4, 5, 9])
      >>> rng = np.random.default_rng(0)
      >>> (passage,) = choose(documents, corpus, 1, length=4, rng=rng, window=3)
      >>> passage.document, passage.start, passage.tokens_L.tolist()
      (9, 0, [1, 2, 6, 7])
    """
    slots = _slots(documents, length, rng)
    chosen: list[Passage] = []
    used: set[int] = set()
    for first in range(0, len(slots), num_passages):
        candidates = slots[first : first + num_passages]
        hashes_CxW = window_hashes(np.stack([c.tokens_L for c in candidates]), window)
        in_corpus_CxW = _occur(hashes_CxW, corpus_N, window)
        for candidate, hashes_W, in_corpus_W in zip(
            candidates, hashes_CxW, in_corpus_CxW, strict=True
        ):
            distinct = set(hashes_W.tolist())
            repeats = len(distinct) < len(hashes_W)
            if in_corpus_W.any() or repeats or distinct & used:
                continue
            chosen.append(candidate)
            used |= distinct
        if len(chosen) >= num_passages:
            return chosen[:num_passages]
    raise UsageError(
        f"the documents to plant from hold {len(chosen)} passages of {length} tokens "
        f"that occur nowhere else, expected {num_passages}: lower --plant_passages or "
        "--plant_tokens"
    )


def insert(
    corpus_N: np.ndarray,
    eos_id: int,
    passages: Sequence[np.ndarray],
    copies_P: Sequence[int] | np.ndarray,
    rng: np.random.Generator,
) -> Iterator[np.ndarray]:
    """Puts passages between the documents of a corpus, as documents of their own.

    Args:
      corpus_N: Documents with one separator between two.
      eos_id: The separator.
      passages: Ids of each passage.
      copies_P: How often each is put in.
      rng: Each copy goes to a place of its own, before the first document, between two
        or after the last, all of them equally likely.

    Returns:
      The new corpus, in pieces, again with one separator between two documents.

    Example:
      >>> corpus, rng = np.array([1, 2, 0, 3]), np.random.default_rng(0)
      >>> pieces = insert(corpus, 0, [np.array([8, 9])], [2], rng)
      >>> np.concatenate(list(pieces)).tolist()
      [1, 2, 0, 8, 9, 0, 8, 9, 0, 3]
    """
    return token_files.join(
        _with_copies(corpus_N, eos_id, passages, copies_P, rng), eos_id
    )


def window_hashes(tokens_xN: np.ndarray, window: int) -> np.ndarray:
    """A hash of every run of `window` tokens along the last axis.

    The hash is a polynomial in an odd constant modulo 2^64 over the ids, mixed first,
    built by doubling: the hash of a+b tokens follows from those of a and of b.

    Args:
      tokens_xN: Ids.
      window: At least 1.

    Returns:
      uint64[..., N - window + 1]; nothing along that axis if N is less than `window`.

    Example:
      >>> hashes = window_hashes(np.array([1, 2, 3, 1, 2]), window=2)
      >>> hashes[0] == hashes[3], len(set(hashes.tolist()))
      (np.True_, 3)
    """
    if tokens_xN.shape[-1] < window:
        return np.zeros((*tokens_xN.shape[:-1], 0), np.uint64)
    if window == 1:
        return _mixed(tokens_xN)
    half = window // 2
    hashes = window_hashes(tokens_xN, half)
    hashes = _appended(hashes, half, hashes, half)
    if window % 2:
        hashes = _appended(hashes, window - 1, _mixed(tokens_xN), 1)
    return hashes


def _slots(
    documents: Sequence[tuple[int, np.ndarray]], length: int, rng: np.random.Generator
) -> list[Passage]:
    """Passages side by side, from a random place of each document on; shuffled."""
    slots = []
    for index, ids_T in documents:
        count, spare = divmod(len(ids_T), length)
        offset = int(rng.integers(spare + 1))
        starts = range(offset, offset + count * length, length)
        slots += [Passage(index, s, ids_T[s : s + length]) for s in starts]
    return [slots[i] for i in rng.permutation(len(slots))]


def _occur(hashes: np.ndarray, corpus_N: np.ndarray, window: int) -> np.ndarray:
    """Which of the hashes are of windows of the corpus; bool, shaped like `hashes`."""
    distinct, place = np.unique(hashes, return_inverse=True)
    found = np.zeros(len(distinct), bool)
    for start in range(0, len(corpus_N) - window + 1, _BLOCK):
        block = corpus_N[start : start + _BLOCK + window - 1]
        found |= np.isin(distinct, window_hashes(block, window))
    return found[place].reshape(hashes.shape)


def _with_copies(
    corpus_N: np.ndarray,
    eos_id: int,
    passages: Sequence[np.ndarray],
    copies_P: Sequence[int] | np.ndarray,
    rng: np.random.Generator,
) -> Iterator[np.ndarray]:
    """Runs of the corpus's documents, and copies of passages, in their order."""
    ends = token_files.separators(corpus_N, eos_id)
    order = rng.permutation(np.repeat(np.arange(len(passages)), copies_P))
    # A place is named by the number of documents before it.
    places = np.sort(rng.integers(len(ends) + 2, size=len(order)))
    documents, start = 0, 0
    for passage, place in zip(order, places, strict=True):
        if place > documents:
            end = ends[place - 1] if place <= len(ends) else len(corpus_N)
            yield corpus_N[start:end]
            documents, start = place, end + 1
        yield passages[passage]
    yield corpus_N[start:]


_BLOCK = 1 << 22
_BASE = 0xD1342543DE82EF95


def _mixed(ids: np.ndarray) -> np.ndarray:
    # Neighbouring ids far apart, by the last steps of splitmix64.
    x = ids.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _appended(
    left: np.ndarray, left_length: int, right: np.ndarray, right_length: int
) -> np.ndarray:
    """Hashes of runs of `left_length` tokens and the `right_length` that follow."""
    count = right.shape[-1] - left_length
    factor = np.uint64(pow(_BASE, right_length, 2**64))
    return left[..., :count] * factor + right[..., left_length:]
