"""Documents that nearly repeat an earlier one.

Two documents are as similar as the Jaccard index of their sets of 5-grams of tokens:
the number of 5-grams that both have, over the number that at least one has. Documents
are taken in order; one that is similar enough to a document kept before is dropped, any
other is kept. So a chain of documents, each like the one before, does not vanish into
its first: whatever is dropped is close to something that is kept.

MinHash and locality-sensitive hashing propose which pairs to compare (Broder 1997, "On
the resemblance and containment of documents"), and the index is then computed exactly,
on 64-bit fingerprints of the 5-grams. A pair with index s is proposed with probability
1 - (1 - s^5)^25: of pairs with s = 0.8 one in 20,000 is overlooked.
"""

from collections.abc import Sequence

import datasketch
import numpy as np
import tqdm

from experiments.extraction import fingerprints

THRESHOLD = 0.8
_GRAM = 5
_BANDS, _ROWS = 25, 5
_NUM_HASHES = _BANDS * _ROWS
_GRAMS_AT_ONCE = 1 << 13
NONE = -1


def near_duplicates(documents: Sequence[np.ndarray], threshold: float) -> np.ndarray:
    """Which document each one nearly repeats.

    Args:
      documents: Token ids of each, none of them empty. Fewer than 5 tokens are one
        gram.
      threshold: The least Jaccard index of near-duplicates, above 0, at most 1.

    Returns:
      int64[D]: the first document, kept itself, that it is similar enough to; `NONE`
      if it is kept.

    Example:
      >>> text = np.arange(100, dtype=np.uint16)
      >>> near_duplicates([text, text[50:], text[:95]], threshold=0.8)
      array([-1, -1,  0])
    """
    index = datasketch.MinHashLSH(
        threshold=threshold, num_perm=_NUM_HASHES, params=(_BANDS, _ROWS)
    )
    empty = datasketch.MinHash(num_perm=_NUM_HASHES, seed=1, hashfunc=int)
    original_D = np.full(len(documents), NONE)
    progress_bar = tqdm.tqdm(documents, "Comparing documents", unit="document")
    for document, ids in enumerate(progress_bar):
        grams = _grams(ids)
        signature = _signature(empty, grams)
        for candidate in sorted(index.query(signature)):
            if jaccard(grams, _grams(documents[candidate])) >= threshold:
                original_D[document] = candidate
                break
        else:
            index.insert(document, signature)
    return original_D


def jaccard(left: np.ndarray, right: np.ndarray) -> float:
    """The Jaccard index of two sets, of which one at least is not empty.

    Args:
      left: Distinct values.
      right: Distinct values.

    Example:
      >>> jaccard(np.array([1, 2, 3]), np.array([2, 3, 4]))
      0.5
    """
    common = len(np.intersect1d(left, right, assume_unique=True))
    return common / (len(left) + len(right) - common)


def _grams(ids: np.ndarray) -> np.ndarray:
    """The set of a document's 5-grams: uint64, sorted."""
    return np.unique(fingerprints.fingerprints(ids, min(_GRAM, len(ids))))


def _signature(empty: datasketch.MinHash, grams: np.ndarray) -> datasketch.MinHash:
    signature = empty.copy()
    # It takes values of 32 bits; the fingerprints' upper half is as good as any.
    values = grams >> np.uint64(32)
    for start in range(0, len(values), _GRAMS_AT_ONCE):
        signature.update_batch(values[start : start + _GRAMS_AT_ONCE].tolist())
    return signature
