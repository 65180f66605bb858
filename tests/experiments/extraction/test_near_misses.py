import collections
import math
from unittest import mock

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from experiments.extraction import byte_pairs, near_misses


@st.composite
def pairs(draw, min_length=1):
    """Generated and true suffixes of few ids, so that n-grams repeat."""
    length = draw(st.integers(min_length, 12))
    row = st.lists(st.integers(0, 3), min_size=length, max_size=length)
    rows = draw(st.lists(st.tuples(row, row), max_size=5))
    empty = np.zeros((0, length), np.uint32)
    generated = np.array([one for one, _ in rows], np.uint32) if rows else empty
    truth = np.array([other for _, other in rows], np.uint32) if rows else empty
    return generated, truth


def bleu_by_definition(generated, truth):
    product = 1.0
    for n in range(1, 5):
        grams = [
            collections.Counter(zip(*(row[i:] for i in range(n)), strict=False))
            for row in (generated, truth)
        ]
        product *= (grams[0] & grams[1]).total() / grams[0].total()
    return product**0.25


def distance_by_definition(one, other):
    row = list(range(len(other) + 1))
    for i, a in enumerate(one, 1):
        diagonal, row[0] = row[0], i
        for j, b in enumerate(other, 1):
            diagonal, row[j] = (
                row[j],
                min(row[j] + 1, row[j - 1] + 1, diagonal + (a != b)),
            )
    return row[-1]


@given(pairs(min_length=4), st.sampled_from([1, 2, 512]))
def test_bleu_is_that_of_the_definition(suffixes, at_once):
    generated, truth = suffixes
    with mock.patch.object(near_misses, "_PAIRS_AT_ONCE", at_once):
        found = near_misses.bleu(generated, truth)
    expected = map(bleu_by_definition, generated.tolist(), truth.tolist())
    np.testing.assert_allclose(found, list(expected), rtol=1e-6)
    right = (generated == truth).all(axis=1)
    assert (found[right] == 1).all()


def test_bleu_worked_out_by_hand():
    truth = np.arange(10)[None]
    last_wrong = truth.copy()
    last_wrong[0, -1] = 99
    # 9 of 10 tokens, 8 of 9 pairs, 7 of 8 triples, 6 of 7 quadruples.
    expected = (9 / 10 * 8 / 9 * 7 / 8 * 6 / 7) ** 0.25
    assert near_misses.bleu(last_wrong, truth)[0] == pytest.approx(expected)
    # `1 1 1 1 1` against `1 1 2 1 1`: 4 of 5, 2 of 4, 0 of 3.
    found = near_misses.bleu(np.array([[1] * 5]), np.array([[1, 1, 2, 1, 1]]))
    assert found.tolist() == [0]


def test_of_50_tokens_two_wrong_in_a_row_are_near_and_five_apart_are_not():
    truth = np.arange(50)[None]
    near, far = truth.copy(), truth.copy()
    near[0, [24, 25]] = 99
    far[0, 5::10] = 99
    # A wrong token spoils n of the n-grams, two in a row n + 1.
    expected = (48 / 50 * 46 / 49 * 44 / 48 * 42 / 47) ** 0.25
    assert near_misses.bleu(near, truth)[0] == pytest.approx(expected)
    assert expected > near_misses.BLEU_THRESHOLD
    expected = (45 / 50 * 39 / 49 * 33 / 48 * 27 / 47) ** 0.25
    assert near_misses.bleu(far, truth)[0] == pytest.approx(expected)
    assert expected < near_misses.BLEU_THRESHOLD


def test_bleu_is_1_where_parts_between_the_same_three_tokens_changed_places():
    generated = np.array([[1, 1, 1, 2, 1, 1, 1, 3, 1, 1, 1]])
    truth = np.array([[1, 1, 1, 3, 1, 1, 1, 2, 1, 1, 1]])
    assert near_misses.bleu(generated, truth).tolist() == [1]


@given(pairs())
def test_edit_distance_is_that_of_the_definition(suffixes):
    generated, truth = suffixes
    found = near_misses.edit_distance(generated, truth)
    expected = map(distance_by_definition, generated.tolist(), truth.tolist())
    assert found.tolist() == list(expected)
    assert found.dtype == np.int32


def test_edit_distance_worked_out_by_hand():
    truth = np.array([[1, 2, 3, 4]] * 4, np.uint32)
    generated = np.array(
        [[1, 2, 3, 4], [1, 2, 9, 4], [2, 3, 4, 1], [2**32 - 1, 7, 8, 9]], np.uint32
    )
    assert near_misses.edit_distance(generated, truth).tolist() == [0, 1, 2, 4]


@pytest.mark.parametrize("measure", [near_misses.bleu, near_misses.edit_distance])
def test_suffixes_of_different_lengths(measure):
    with pytest.raises(ValueError, match="expected the same"):
        measure(np.zeros((2, 5)), np.zeros((2, 6)))


def test_bleu_of_suffixes_without_4_grams():
    with pytest.raises(ValueError, match="expected 4 or more"):
        near_misses.bleu(np.zeros((1, 3)), np.zeros((1, 3)))


@given(pairs(), st.sampled_from([1, 20, 1 << 20]))
def test_entropy_is_that_of_the_definition(suffixes, at_once):
    tokens_KxL = np.concatenate(suffixes)
    with mock.patch.object(near_misses, "_TOKENS_AT_ONCE", at_once):
        found = near_misses.token_entropy(tokens_KxL)
    expected = []
    for row in tokens_KxL.tolist():
        shares = [n / len(row) for n in collections.Counter(row).values()]
        expected.append(-sum(share * math.log2(share) for share in shares))
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)


@given(pairs(), st.sampled_from([1, 20, 1 << 20]))
def test_whitespace_is_counted_by_tokens(suffixes, at_once):
    tokens_KxL = np.concatenate(suffixes)
    with mock.patch.object(near_misses, "_TOKENS_AT_ONCE", at_once):
        # The id 3 is beyond the vocabulary.
        found = near_misses.whitespace_share(tokens_KxL, np.array([False, True, True]))
    share = [sum(t in (1, 2) for t in row) / len(row) for row in tokens_KxL.tolist()]
    np.testing.assert_allclose(found, share, rtol=1e-6)


def test_whitespace_tokens_of_a_tokenizer(tmp_path):
    path = tmp_path / "tokenizer.json"
    byte_pairs.train(["word  word\n\n    word\tword"] * 9, 270).save(str(path))
    blank = near_misses.whitespace_tokens(path)
    tokenizer = byte_pairs.open_file(path)
    assert len(blank) == tokenizer.get_vocab_size()
    texts = {i: tokenizer.decode([i]) for i in np.flatnonzero(blank).tolist()}
    assert {" ", "\n", "\t"} <= set(texts.values())
    assert all(text.strip() == "" and text for text in texts.values())
    words = tokenizer.encode("word").ids
    assert not blank[words].any()
    assert not blank[tokenizer.encode(" word").ids].any()


def test_whitespace_tokens_where_texts_start_without_a_blank(tmp_path):
    pieces = [("<unk>", 0.0), ("▁", -1.0), ("▁▁", -1.0), ("▁a", -1.0), ("a", -1.0)]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, unk_id=0))
    tokenizer.decoder = tokenizers.decoders.Metaspace()
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    assert tokenizer.decode([1]) == ""
    blank = near_misses.whitespace_tokens(path)
    assert blank.tolist() == [False, True, True, False, False]
