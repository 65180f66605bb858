"""What tokens say, each on its own, so that a reader can tell one from the next.

For display only: texts put together again need not be the text that was tokenised.
"""

import hashlib
import pathlib
import unicodedata
from collections.abc import Collection, Iterable

import polars as pl

from experiments.errors import UsageError
from experiments.extraction import byte_pairs, evaluation_set

# Control and format characters (some turn the direction of writing), private and
# unassigned ones, and separators of lines.
_HIDDEN = frozenset({"Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp"})


def check_windows(folder: pathlib.Path, sha256: str) -> None:
    """Makes sure that `folder` holds an evaluation set with the hash `sha256`.

    Raises:
      UsageError: It does not.
    """
    path = folder / evaluation_set.WINDOWS
    if not path.is_file():
        raise UsageError(
            f"{folder} holds no {evaluation_set.WINDOWS}: give the folder of the "
            "evaluation set that was swept as --windows"
        )
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise UsageError(
            f"{path} has the sha256 {found[:12]}..., but the sweep was about "
            f"{sha256[:12]}...: give the folder of that evaluation set as --windows"
        )


def tokens_of_windows(
    folder: pathlib.Path, window_ids: Collection[int]
) -> dict[int, list[int]]:
    """The ids of the tokens of some windows of an evaluation set."""
    windows = (
        pl.scan_parquet(folder / evaluation_set.WINDOWS)
        .filter(pl.col("window_id").is_in(list(window_ids)))
        .select("window_id", "tokens")
        .collect()
    )
    return dict(windows.iter_rows())


def of_ids(tokenizer_json: pathlib.Path, ids: Iterable[int]) -> dict[int, str]:
    """What each of `ids` says, with everything `visible`.

    Bytes that are no whole character, and ids that the vocabulary lacks, are U+FFFD.

    Raises:
      RunError: The file cannot be read as a tokenizer.
    """
    tokenizer = byte_pairs.open_file(tokenizer_json)
    known = [i for i in ids if tokenizer.id_to_token(i) is not None]
    once = tokenizer.decode_batch([[i] for i in known], skip_special_tokens=False)
    twice = tokenizer.decode_batch([[i, i] for i in known], skip_special_tokens=False)
    texts = dict.fromkeys(ids, "\ufffd")
    for i, first, both in zip(known, once, twice, strict=True):
        # Some decoders drop the space before the first token of a text.
        text = both[len(first) :] if both.startswith(first) else first
        texts[i] = visible(text) or f"\u27e8{tokenizer.id_to_token(i)}\u27e9"
    return texts


def visible(text: str) -> str:
    """The text with signs for what would not be seen, or would hide something.

    Example:
      >>> ascii(visible("a\\tb\\u202e"))
      "'a\\\\u21e5\\\\tb\\\\u27e8U+202E\\\\u27e9'"
    """
    return "".join(map(_visible, text))


def _visible(character: str) -> str:
    if character == "\n":
        return "\u21b5\n"
    if character == "\t":
        return "\u21e5\t"
    if unicodedata.category(character) in _HIDDEN:
        return f"\u27e8U+{ord(character):04X}\u27e9"
    return character
