import hypothesis
import hypothesis.strategies as st
import numpy as np

from experiments.data import tokenizer


def test_tokens():
    ids = tokenizer.encode("def Foo_bar2(x):\n\treturn ∑ été")
    same = [
        tokenizer.encode(token)
        for token in (
            "DEF",
            "foo",
            "_",
            "bar",
            "2",
            "(",
            "X",
            ")",
            ":",
            "Return",
            "∑",
            "Été",
        )
    ]
    assert [[i] for i in ids] == same
    assert len(set(ids)) == len(ids)


def test_ids_do_not_depend_on_the_process():
    # Unlike those of Python's own hash, which is salted.
    assert tokenizer.encode("import numpy") == [6331, 6149]


@hypothesis.given(st.lists(st.text()), st.integers(1, 9))
def test_rows(texts, length):
    ids_NxT = tokenizer.encode_all(texts, length)
    assert ids_NxT.shape == (len(texts), length)
    assert ids_NxT.dtype == np.int32
    for row, text in zip(ids_NxT, texts, strict=True):
        ids = tokenizer.encode(text)
        assert all(0 < i < tokenizer.VOCABULARY_SIZE for i in ids)
        kept = min(len(ids), length)
        assert row[:kept].tolist() == ids[:kept]
        assert np.all(row[kept:] == tokenizer.PADDING_ID)
