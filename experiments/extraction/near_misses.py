"""How close generated suffixes come to the truth, and how plain a window's text is.

All measures are of token ids; generated and true suffixes have the same length.
"""

import pathlib

import numpy as np
from rapidfuzz.distance import Levenshtein

from experiments.extraction import byte_pairs

BLEU_THRESHOLD = 0.75
"""Above it, a suffix is approximately memorised (Ippolito et al. 2023)."""

_LONGEST_GRAM = 4
_PAIRS_AT_ONCE = 1 << 9
_TOKENS_AT_ONCE = 1 << 20


def edit_distance(generated_KxT: np.ndarray, truth_KxT: np.ndarray) -> np.ndarray:
    """The Levenshtein distance in tokens.

    Fewest insertions, deletions and replacements of one token that turn one suffix
    into the other.

    Args:
      generated_KxT: Token ids.
      truth_KxT: Token ids.

    Returns:
      int32[K], from 0 to T.

    Example:
      >>> edit_distance(np.array([[9, 1, 2, 3]]), np.array([[1, 2, 3, 4]]))
      array([2], dtype=int32)
    """
    _check_shapes(generated_KxT, truth_KxT)
    pairs = zip(generated_KxT.tolist(), truth_KxT.tolist(), strict=True)
    distances = (Levenshtein.distance(one, other) for one, other in pairs)
    return np.fromiter(distances, np.int32, len(truth_KxT))


def bleu(generated_KxT: np.ndarray, truth_KxT: np.ndarray) -> np.ndarray:
    """BLEU of each suffix with the truth as its one reference.

    (p1 p2 p3 p4)^(1/4), where p_n is the share of the suffix's n-grams that the truth
    has too, each matched at most as often as the truth has it (Papineni et al. 2002,
    "BLEU: a method for automatic evaluation of machine translation"). Words are token
    ids; nothing is smoothed, so that without a common 4-gram it is 0; the penalty for
    brevity is 1, as lengths are equal.

    Args:
      generated_KxT: Token ids, T at least 4.
      truth_KxT: Token ids.

    Returns:
      float32[K], from 0 to 1; exactly 1 where all tokens are right (and where parts
      between the same three tokens have changed places).

    Example:
      >>> truth = np.array([[1, 2, 3, 4, 5, 6]])
      >>> bleu(truth, truth), bleu(truth, truth[:, ::-1])
      (array([1.], dtype=float32), array([0.], dtype=float32))
    """
    _check_shapes(generated_KxT, truth_KxT)
    if truth_KxT.shape[1] < _LONGEST_GRAM:
        raise ValueError(f"suffixes of {truth_KxT.shape[1]} tokens, expected 4 or more")
    scores_K = np.zeros(len(truth_KxT), np.float32)
    for start in range(0, len(truth_KxT), _PAIRS_AT_ONCE):
        part = slice(start, start + _PAIRS_AT_ONCE)
        scores_K[part] = _bleu(generated_KxT[part], truth_KxT[part])
    return scores_K


def _bleu(generated_KxT: np.ndarray, truth_KxT: np.ndarray) -> np.ndarray:
    # Which tokens are the same; then, step by step, which 2-grams, 3-grams and 4-grams.
    alike_KxTxT = generated_KxT[:, :, None] == truth_KxT[:, None, :]
    again_KxTxT = generated_KxT[:, :, None] == generated_KxT[:, None, :]
    matched = alike_KxTxT, again_KxTxT
    product_K = np.ones(len(truth_KxT))
    for n in range(1, _LONGEST_GRAM + 1):
        in_truth, in_generated = matched
        num_grams = in_truth.shape[1]
        # The i-th time that a gram comes it is matched by the i-th in the truth.
        earlier = np.tril(in_generated, k=-1).sum(axis=2)
        clipped_K = (earlier < in_truth.sum(axis=2)).sum(axis=1)
        product_K *= clipped_K / num_grams
        if n < _LONGEST_GRAM:
            matched = (
                in_truth[:, :-1, :-1] & alike_KxTxT[:, n:, n:],
                in_generated[:, :-1, :-1] & again_KxTxT[:, n:, n:],
            )
    return product_K ** (1 / _LONGEST_GRAM)


def whitespace_share(tokens_KxL: np.ndarray, is_whitespace_V: np.ndarray) -> np.ndarray:
    """The share of each window's tokens that are nothing but white space.

    Blanks that a token has before a word do not count: those are in all prose.

    Args:
      tokens_KxL: Token ids; of ids beyond V nothing is known, and they do not count.
      is_whitespace_V: What `whitespace_tokens` says.

    Returns:
      float32[K], from 0 to 1.

    Example:
      >>> whitespace_share(np.array([[0, 1, 1, 2]]), np.array([False, True, False]))
      array([0.5], dtype=float32)
    """
    shares_K = np.zeros(len(tokens_KxL), np.float32)
    last = len(is_whitespace_V)
    is_whitespace = np.append(is_whitespace_V, False)
    for part in _parts(tokens_KxL):
        known = np.minimum(tokens_KxL[part], last)
        shares_K[part] = is_whitespace[known].mean(axis=1)
    return shares_K


def whitespace_tokens(tokenizer_json: pathlib.Path) -> np.ndarray:
    """Which ids stand for one or more characters of white space, and nothing else.

    Returns:
      bool[V].

    Raises:
      RunError: The file cannot be read as a tokenizer.
    """
    tokenizer = byte_pairs.open_file(tokenizer_json)
    size = byte_pairs.vocabulary_size(tokenizer)
    # Twice, since a decoder such as T5's drops the blank that a text starts with. Ids
    # may have gaps, which decode to nothing.
    texts = tokenizer.decode_batch(
        [[i, i] for i in range(size)], skip_special_tokens=False
    )
    return np.array([text.isspace() for text in texts])


def token_entropy(tokens_KxL: np.ndarray) -> np.ndarray:
    """The entropy of each window's tokens, in bits per token.

    -Σ f log2 f over the distinct tokens, where f is a token's share of the window: 0
    for one token again and again, log2 L if all L differ.

    Args:
      tokens_KxL: Token ids, L at least 1.

    Returns:
      float32[K].

    Example:
      >>> token_entropy(np.array([[7, 7, 7, 7], [7, 8, 7, 8], [1, 2, 3, 4]]))
      array([0., 1., 2.], dtype=float32)
    """
    entropies_K = np.zeros(len(tokens_KxL), np.float32)
    for part in _parts(tokens_KxL):
        entropies_K[part] = _token_entropy(tokens_KxL[part])
    return entropies_K


def _token_entropy(tokens_KxL: np.ndarray) -> np.ndarray:
    num_windows, length = tokens_KxL.shape
    sorted_KxL = np.sort(tokens_KxL, axis=1)
    is_first_KxL = np.ones(sorted_KxL.shape, bool)
    is_first_KxL[:, 1:] = sorted_KxL[:, 1:] != sorted_KxL[:, :-1]
    # Every run of equal tokens starts at a place of its own, and row by row.
    starts = np.flatnonzero(is_first_KxL)
    shares = np.diff(starts, append=sorted_KxL.size) / length
    return np.bincount(starts // length, -shares * np.log2(shares), num_windows)


def _parts(tokens_KxL: np.ndarray) -> list[slice]:
    step = max(1, _TOKENS_AT_ONCE // tokens_KxL.shape[1])
    return [slice(start, start + step) for start in range(0, len(tokens_KxL), step)]


def _check_shapes(generated_KxT: np.ndarray, truth_KxT: np.ndarray) -> None:
    if generated_KxT.shape != truth_KxT.shape or truth_KxT.ndim != 2:
        raise ValueError(
            f"suffixes of shapes {generated_KxT.shape} and {truth_KxT.shape}, expected "
            "the same [K, T]"
        )
