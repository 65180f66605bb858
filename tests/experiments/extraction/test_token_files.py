import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.errors import RunError, UsageError
from experiments.extraction import token_files

EOS = 0
documents = st.lists(
    st.lists(st.integers(1, 4), max_size=5).map(lambda ids: np.array(ids, np.uint32)),
    max_size=6,
)


@pytest.fixture(autouse=True, scope="module")
def small_blocks():
    """Blocks of three tokens, so that nearly every array has several."""
    before = token_files._BLOCK
    token_files._BLOCK = 3
    yield
    token_files._BLOCK = before


def joined(documents, max_tokens=None):
    pieces = list(token_files.join(documents, EOS, max_tokens))
    return np.concatenate(pieces).tolist() if pieces else []


@given(documents)
def test_join_puts_one_separator_between_two(documents):
    tokens = joined(documents)
    filled = [ids.tolist() for ids in documents if len(ids)]
    expected = [i for ids in filled for i in (*ids, EOS)][:-1]
    assert tokens == expected


@given(documents)
def test_split_is_the_inverse_of_join(documents):
    tokens_N = np.array(joined(documents), np.uint16)
    found = [ids.tolist() for ids in token_files.split(tokens_N, EOS)]
    assert found == ([ids.tolist() for ids in documents if len(ids)] or [[]])


@given(st.lists(st.integers(0, 2), min_size=1, max_size=12))
def test_split_as_python_splits(ids):
    found = list(token_files.split(np.array(ids, np.uint16), EOS))
    expected = "".join(map(str, ids)).split(str(EOS))
    assert ["".join(map(str, document)) for document in found] == expected
    ends = token_files.separators(np.array(ids, np.uint16), EOS)
    assert ends.tolist() == [n for n, i in enumerate(ids) if i == EOS]


def test_without_a_separator_there_is_one_document():
    tokens_N = np.array([1, 0, 2], np.uint16)
    (document,) = token_files.split(tokens_N, None)
    assert document.tolist() == [1, 0, 2]


@given(documents, st.integers(1, 20))
def test_max_tokens_cuts_and_never_ends_with_a_separator(documents, max_tokens):
    tokens = joined(documents, max_tokens)
    whole = joined(documents)
    assert tokens == whole[: len(tokens)]
    assert len(tokens) <= max_tokens
    if tokens:
        assert tokens[-1] != EOS
    if len(whole) >= max_tokens:
        dropped_separator = whole[max_tokens - 1] == EOS
        assert len(tokens) == max_tokens - dropped_separator


def test_documents_beyond_max_tokens_are_not_read():
    def documents():
        yield np.array([1, 2])
        yield np.array([3])
        yield np.array([4])
        raise AssertionError("read on")

    assert joined(documents(), max_tokens=4) == [1, 2, 0, 3]


@given(
    st.lists(st.lists(st.integers(0, 9)), max_size=5), st.sampled_from([10, 2**16 + 1])
)
def test_written_arrays_are_read_back(tmp_path_factory, pieces, vocabulary_size):
    path = tmp_path_factory.getbasetemp() / "written.npy"
    arrays = [np.array(piece, np.int64) for piece in pieces]
    size = token_files.write_array(path, arrays, vocabulary_size)
    tokens_N = np.load(path)
    assert size == len(tokens_N)
    assert tokens_N.tolist() == [i for piece in pieces for i in piece]
    assert tokens_N.dtype == (np.uint16 if vocabulary_size == 10 else np.uint32)


@pytest.mark.parametrize(
    ("vocabulary_size", "dtype"),
    [(1, "<u2"), (65_535, "<u2"), (65_536, "<u2"), (65_537, "<u4"), (2**32, "<u4")],
)
def test_the_dtype_holds_the_largest_id(tmp_path, vocabulary_size, dtype):
    path = tmp_path / "tokens.npy"
    largest = np.array([vocabulary_size - 1], np.int64)
    token_files.write_array(path, [largest], vocabulary_size)
    tokens_N = token_files.open_array(path)
    assert tokens_N.dtype.str == dtype
    assert tokens_N.tolist() == largest.tolist()


def test_a_vocabulary_beyond_uint32():
    with pytest.raises(RunError, match="4,294,967,297 entries, expected at most"):
        token_files.dtype_for(2**32 + 1)


@pytest.mark.parametrize("ids", [[65_536], [3, -1], [-1], [10, 11]])
def test_ids_that_would_wrap_are_refused(tmp_path, ids):
    vocabulary_size = 11 if 11 in ids else 65_536
    with pytest.raises(RunError, match=f"expected 0 to {vocabulary_size - 1}"):
        token_files.write_array(
            tmp_path / "tokens.npy", [np.array([1]), np.array(ids)], vocabulary_size
        )


def test_an_opened_array_is_a_map_and_cannot_be_written(tmp_path):
    path = tmp_path / "tokens.npy"
    np.save(path, np.arange(5, dtype=np.uint32))
    tokens_N = token_files.open_array(path)
    assert isinstance(tokens_N, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        tokens_N[0] = 1


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((2, 3), np.uint16), r"the shape \(2, 3\), expected one dimension"),
        (np.zeros((), np.uint16), r"the shape \(\), expected one dimension"),
        (np.zeros(0, np.uint16), "holds no tokens"),
        (np.zeros(3, np.int64), "<i8, expected uint16 or uint32"),
        (np.zeros(3, np.int32), "<i4, expected"),
        (np.zeros(3, np.uint8), r"\|u1, expected"),
        (np.zeros(3, ">u2"), ">u2, expected"),
        (np.zeros(3, np.float32), "<f4, expected"),
    ],
)
def test_arrays_that_are_no_corpus(tmp_path, array, message):
    np.save(tmp_path / "tokens.npy", array)
    with pytest.raises(RunError, match=rf"tokens\.npy .*{message}"):
        token_files.open_array(tmp_path / "tokens.npy")


def test_files_that_are_cut_short_or_no_array(tmp_path):
    path = tmp_path / "tokens.npy"
    np.save(path, np.arange(100, dtype=np.uint16))
    whole = path.read_bytes()
    for size in (0, 3, 7, 60, 128, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(RunError, match=r"is not a whole \.npy file"):
            token_files.open_array(path)
    with path.open("wb") as file:
        np.savez(file, a=np.arange(3))
    with pytest.raises(RunError, match="does not start as one"):
        token_files.open_array(path)
    np.save(path, np.array([{}]), allow_pickle=True)
    with pytest.raises(RunError, match=r"is not a whole \.npy file"):
        token_files.open_array(path)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"(100,)", b"[100,)"),
        (b"'<u2'", b"'<,2'"),
        (b"False", b"F lse"),
    ],
)
def test_a_damaged_header(tmp_path, before, after):
    path = tmp_path / "tokens.npy"
    np.save(path, np.arange(100, dtype=np.uint16))
    path.write_bytes(path.read_bytes().replace(before, after))
    with pytest.raises(RunError, match=r"is not a whole \.npy file"):
        token_files.open_array(path)


def test_tokens_that_the_header_does_not_count(tmp_path):
    path = tmp_path / "tokens.npy"
    np.save(path, np.arange(100, dtype=np.uint16))
    whole = path.read_bytes()
    path.write_bytes(whole + b"\0" * 6)
    with pytest.raises(RunError, match="6 bytes more than the 100 tokens"):
        token_files.open_array(path)
    path.write_bytes(whole.replace(b"(100,)", b"(10,) "))
    with pytest.raises(RunError, match="180 bytes more than the 10 tokens"):
        token_files.open_array(path)


def test_no_file(tmp_path):
    for path in (tmp_path, tmp_path / "none.npy"):
        with pytest.raises(UsageError, match="no such file"):
            token_files.open_array(path)


@given(st.lists(st.integers(0, 2**16 - 1), min_size=1), st.integers(0, 5))
def test_a_summary_is_that_of_the_whole_array(ids, eos_id):
    tokens_N = np.array(ids, np.uint16)
    summary = token_files.summarize(tokens_N, eos_id)
    assert summary.max_id == max(ids)
    assert summary.num_separators == ids.count(eos_id)
    assert summary.sha256 == hashlib.sha256(tokens_N.tobytes()).hexdigest()
    assert token_files.summarize(tokens_N, None).num_separators == 0


@given(st.lists(st.integers(0, 9), min_size=1), st.integers(1, 10))
def test_the_first_id_outside_the_vocabulary_is_named(ids, vocabulary_size):
    tokens_N = np.array(ids, np.uint16)
    outside = [n for n, i in enumerate(ids) if i >= vocabulary_size]
    if not outside:
        token_files.check_ids(tokens_N, max(ids), vocabulary_size, "a.npy")
        return
    first = outside[0]
    message = rf"a\.npy: the token at position {first} is {ids[first]}, expected"
    with pytest.raises(RunError, match=message):
        token_files.check_ids(tokens_N, max(ids), vocabulary_size, "a.npy")
