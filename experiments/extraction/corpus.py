"""Corpora by SPEC, as token ids.

`stdlib`, `text:GLOB`, `jsonl:GLOB`, `tfds:NAME`: texts, tokenised into a corpus folder;
`tokens:FILE.npy`, `tokens:DIR`: token ids as they are.
"""

import pathlib

from experiments.extraction import corpus_folder
from experiments.extraction.corpus_building import Request, build
from experiments.extraction.corpus_folder import Corpus
from experiments.extraction.token_sources import TOKENS

__all__ = ["Corpus", "load"]


def load(
    spec: str, build_in: pathlib.Path, *, eos_id: int | None = None, tokenizer: str = ""
) -> Corpus:
    """Opens the corpus `spec`; texts are tokenised first.

    Every opening reads all tokens once (about a second per gigabyte): for the hash,
    which must be the manifest's, and for ids outside the vocabulary.

    Args:
      spec: `tokens:DIR`, a folder of build_corpus; `tokens:FILE.npy`, a 1-D array of
        uint16 or uint32; or texts as `documents.find` takes them.
      build_in: The folder that texts are tokenised into. If they are there already they
        are not tokenised again.
      eos_id: The separator. Of tokens: by default what the manifest beside them says;
        without a manifest the corpus is one document, which a note on stderr says. Of
        texts: by default what the tokenizer says.
      tokenizer: Of tokens: what made them, a tokenizer.json or a folder that holds one,
        or "". Of texts: the same, or `bpe:V` to train a byte-level BPE; by default
        `bpe:4096`.

    Raises:
      UsageError: The corpus or the tokenizer does not exist, the two do not go
        together, or `build_in` holds another corpus.
      RunError: Something is damaged or empty, or an id is outside the vocabulary.

    Example:
      >>> import tempfile
      >>> import numpy as np
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     path = pathlib.Path(folder, "ids.npy")
      ...     np.save(path, np.array([5, 6, 0, 7], np.uint16))
      ...     corpus = load(f"tokens:{path}", pathlib.Path(folder, "new"), eos_id=0)
      >>> corpus.vocabulary_size, corpus.sha256[:4]
      (8, '8735')
    """
    if spec.startswith(TOKENS):
        path = pathlib.Path(spec.removeprefix(TOKENS)).expanduser()
        return corpus_folder.open_tokens(path, eos_id, tokenizer)
    return build(Request(spec, tokenizer, eos_id), build_in)
