"""Texts as token ids: words, hashed. Nothing is trained and nothing downloaded.

A token is a run of letters (in lower case), a run of digits, or any other character but
white space. Its id is a hash of it, so distinct tokens may share an id: the ids serve
to classify texts, not to print them.
"""

import re
import zlib
from collections.abc import Iterable

import numpy as np

PADDING_ID = 0
VOCABULARY_SIZE = 8192

_TOKEN = re.compile(r"[^\W\d_]+|\d+|[^\w\s]|_")


def encode(text: str) -> list[int]:
    """The ids of all tokens of `text`, in [1, VOCABULARY_SIZE).

    Example:
      >>> encode("For x in xs:") == encode("for X in  xs :")
      True
      >>> len(encode("self.max_size == 10"))
      8
    """
    # The same few tokens make up most of a text.
    ids: dict[str, int] = {}
    return [
        ids[token] if token in ids else ids.setdefault(token, _id(token))
        for token in _TOKEN.findall(text.lower())
    ]


def encode_all(texts: Iterable[str], length: int) -> np.ndarray:
    """The first `length` tokens of each text, padded with 0, as i32[N, length].

    Example:
      >>> (encode_all(["one two three", "one"], length=2) > 0).tolist()
      [[True, True], [True, False]]
    """
    rows = [(encode(text)[:length] + [PADDING_ID] * length)[:length] for text in texts]
    return np.asarray(rows, np.int32).reshape(len(rows), length)


def _id(token: str) -> int:
    return 1 + zlib.crc32(token.encode()) % (VOCABULARY_SIZE - 1)
