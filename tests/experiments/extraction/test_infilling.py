import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.errors import UsageError
from experiments.extraction import infilling, span_corruption
from experiments.extraction.asking import Asker
from experiments.models.sentinels import Sentinels
from experiments.models.t5 import T5
from experiments.models.t5_config import t5_v1_1

pytestmark = pytest.mark.usefixtures("compiled_cheaply")

VOCABULARY_SIZE, EOS = 24, 1
SENTINELS = Sentinels(23, 8)


def blanks_of(tokens_NxL, ids_N, seed=0, masking="iid", sentinels=SENTINELS):
    return infilling.make_blanks(
        tokens_NxL,
        ids_N,
        seed=seed,
        masking=masking,
        sentinels=sentinels,
        eos_id=EOS,
        pad_id=0,
    )


def infill(model, params, batch, batch_size=3):
    """Verdicts, and whether logits are finite."""
    scores = Asker(model, params, batch_size).blanks(batch)
    counted = (scores, batch.num_targets_N)
    return infilling.judge(*counted), infilling.finite(*counted)


def windows_of(seed, num_windows, length, low=2, high=16):
    rng = np.random.default_rng(seed)
    return rng.integers(low, high, (num_windows, length)), np.arange(num_windows) + 50


def t5(vocabulary_size):
    """A T5 with random weights, so large that its choices depend on what it reads."""
    config = t5_v1_1(
        vocabulary_size, layers=1, width=16, heads=2, head_dim=8, feed_forward=16
    )
    model = T5(config)
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    shapes = jax.eval_shape(model.init, jax.random.key(0), tokens, tokens)
    rng = np.random.default_rng(0)
    scale = {"embedding": 0.3, "scale": 1.0}

    def leaf(path, x):
        deviation = scale.get(path[-1].key, 2 * x.shape[0] ** -0.5)
        deviation = deviation / 4 if path[-2].key == "query" else deviation
        return (deviation * rng.normal(size=x.shape)).astype(np.float32)

    return model, jax.tree.map_with_path(leaf, shapes)


class Memory:
    """Answers what its parameters hold for the first token of a window.

    The parameters are answers_VxT; a negative answer is NaN.
    """

    config = types.SimpleNamespace(
        vocabulary_size=VOCABULARY_SIZE, eos_id=EOS, pad_id=0
    )

    def __init__(self):
        self.num_traces = 0

    def apply(self, answers_VxT, *args, method):
        if method == "logits":
            return args[0]
        self.num_traces += 1
        inputs_BxS, targets_BxT, _ = args
        answers_BxT = answers_VxT[inputs_BxS[:, 0], : targets_BxT.shape[1]]
        logits_BxTxV = jax.nn.one_hot(answers_BxT, VOCABULARY_SIZE)
        return jnp.where(answers_BxT[..., None] < 0, jnp.nan, logits_BxTxV)


def remembered(tokens_NxL, ids_N, masking, seed, num_columns=48):
    """The parameters of a `Memory` that knows all fills, and the targets."""
    answers_VxT = np.zeros((VOCABULARY_SIZE, num_columns), np.int32)
    targets = []
    for tokens_L, window_id in zip(tokens_NxL, ids_N, strict=True):
        mask_L = span_corruption.mask(masking, seed, window_id, len(tokens_L))
        blanks = span_corruption.corrupt(tokens_L, mask_L, SENTINELS, EOS)
        scored = blanks.targets_T[: blanks.num_scored]
        answers_VxT[blanks.inputs_S[0], : len(scored)] = scored
        targets.append(scored)
    return answers_VxT, targets


def windows_that_start_kept(masking, num_windows=8, length=20):
    """Each starts with a token of its own, which is kept."""
    ids = [i for i in range(200) if not span_corruption.mask(masking, 0, i, length)[0]][
        :num_windows
    ]
    tokens_NxL, _ = windows_of(0, num_windows, length)
    tokens_NxL[:, 0] = 2 + np.arange(num_windows)
    return tokens_NxL, np.array(ids)


@pytest.mark.parametrize("masking", ["iid", "spans"])
def test_perfect_and_nearly_perfect_fills(masking):
    """One wrong target, whichever it is up to the end of the last blank, spoils it."""
    tokens_NxL, ids_N = windows_that_start_kept(masking)
    answers_VxT, targets = remembered(tokens_NxL, ids_N, masking, seed=0)
    model, batch = Memory(), blanks_of(tokens_NxL, ids_N, masking=masking)
    found, _ = infill(model, answers_VxT, batch)
    lengths = [len(scored) for scored in targets]
    np.testing.assert_array_equal(batch.num_targets_N, lengths)
    assert found.extracted.all()
    np.testing.assert_array_equal(found.first_mismatch, lengths)
    np.testing.assert_array_equal(found.tokens_correct, lengths)
    np.testing.assert_array_equal(found.min_margin, 1)
    assert not found.tie.any()
    per_token = 1 - np.log(np.e + VOCABULARY_SIZE - 1)
    np.testing.assert_allclose(
        found.suffix_logprob, per_token * np.array(lengths), rtol=1e-5
    )
    assert found.first_mismatch.dtype == np.int32
    assert found.tokens_correct.dtype == np.int32
    assert found.min_margin.dtype == np.float32
    assert found.suffix_logprob.dtype == np.float32

    # Window n gets its n-th target wrong, and the last ones their last target.
    wrong = np.minimum(np.arange(8), np.array(lengths) - 1)
    answers_VxT[tokens_NxL[:, 0], wrong] = 0
    model = Memory()
    found, _ = infill(model, answers_VxT, batch)
    assert not found.extracted.any()
    np.testing.assert_array_equal(found.first_mismatch, wrong)
    np.testing.assert_array_equal(found.tokens_correct, np.array(lengths) - 1)
    np.testing.assert_array_equal(found.min_margin, -1)
    # One program, though windows differ in their numbers of blanks.
    assert model.num_traces == 1
    assert (len(set(lengths)) > 1) == (masking == "iid")


def test_what_is_not_scored_does_not_count():
    """A model may go on after the last blank as it likes, even with a NaN."""
    tokens_NxL, ids_N = windows_that_start_kept("iid")
    answers_VxT, targets = remembered(tokens_NxL, ids_N, "iid", seed=0)
    for first, scored in zip(tokens_NxL[:, 0], targets, strict=True):
        answers_VxT[first, len(scored) :] = -1
    batch = blanks_of(tokens_NxL, ids_N)
    found, finite_N = infill(Memory(), answers_VxT, batch)
    assert found.extracted.all()
    assert finite_N.all()
    answers_VxT[tokens_NxL[5, 0], len(targets[5]) - 1] = -1
    _, finite_N = infill(Memory(), answers_VxT, batch)
    assert np.flatnonzero(~finite_N).tolist() == [5]


def test_scores_are_those_of_each_window_alone():
    """Neither the inputs that fill up a batch nor its other windows show."""
    model, params = t5(VOCABULARY_SIZE)
    tokens_NxL, ids_N = windows_of(1, 6, 20)
    batch = blanks_of(tokens_NxL, ids_N, seed=3)
    found, _ = infill(model, params, batch, batch_size=4)
    apply = jax.jit(model.apply)
    num_targets_N = batch.num_targets_N
    shortest, longest = num_targets_N.argmin(), num_targets_N.argmax()
    assert num_targets_N[shortest] < num_targets_N[longest]
    for row in (shortest, longest):
        window_id = ids_N[row]
        mask_L = span_corruption.mask("iid", 3, window_id, 20)
        blanks = span_corruption.corrupt(tokens_NxL[row], mask_L, SENTINELS, EOS)
        logits_1xTxV = apply(params, blanks.inputs_S[None], blanks.targets_T[None])
        logits_TxV = np.asarray(logits_1xTxV)[0, : blanks.num_scored]
        targets = blanks.targets_T[: blanks.num_scored]
        rows = np.arange(len(targets))
        correct_T = logits_TxV.argmax(-1) == targets
        others = logits_TxV.copy()
        others[rows, targets] = -np.inf
        margin_T = logits_TxV[rows, targets] - others.max(-1)
        logprob_T = np.asarray(jax.nn.log_softmax(logits_TxV))[rows, targets]
        verdict = jax.tree.map(lambda x, r=row: x[r], dataclasses.asdict(found))
        assert num_targets_N[row] == len(targets)
        assert verdict["extracted"] == correct_T.all()
        assert verdict["tokens_correct"] == correct_T.sum()
        assert verdict["first_mismatch"] == [*correct_T, False].index(False)
        assert verdict["min_margin"] == pytest.approx(margin_T.min(), abs=1e-4)
        assert verdict["suffix_logprob"] == pytest.approx(logprob_T.sum(), abs=1e-3)


def test_verdicts_are_those_of_greedy_decoding():
    """Targets that decoding writes up to a token are right up to there in the pass."""
    model, params = t5(VOCABULARY_SIZE)
    num_windows, num_targets = 12, 5
    inputs_NxS, _ = windows_of(2, num_windows, 9, low=0, high=VOCABULARY_SIZE)
    num_inputs_N = np.arange(num_windows, dtype=np.int32) % 3 + 7
    mask_NxS = np.arange(9)[None] < num_inputs_N[:, None]
    apply = jax.jit(model.apply)
    written_NxT = np.zeros((num_windows, num_targets), np.int32)
    for t in range(num_targets):
        logits_NxTxV = apply(params, inputs_NxS, written_NxT, mask_NxS)
        written_NxT[:, t] = np.asarray(logits_NxTxV)[:, t].argmax(-1)
    assert len(np.unique(written_NxT, axis=0)) > 3

    # Other tokens from the first on, the second on, ..., nowhere.
    mismatch_N = np.arange(num_windows) % (num_targets + 1)
    other_NxT = (written_NxT + 1) % VOCABULARY_SIZE
    is_other_NxT = np.arange(num_targets)[None] >= mismatch_N[:, None]
    targets_NxT = np.where(is_other_NxT, other_NxT, written_NxT)
    scores = jax.jit(infilling.score, static_argnames="model")(
        model, params, inputs_NxS, num_inputs_N, targets_NxT
    )
    num_targets_N = np.full(num_windows, num_targets, np.int32)
    found = infilling.judge(scores, num_targets_N)
    np.testing.assert_array_equal(found.first_mismatch, mismatch_N)
    np.testing.assert_array_equal(found.extracted, mismatch_N == num_targets)
    assert (found.tokens_correct >= mismatch_N).all()


def test_shapes_are_those_of_the_length_alone():
    shapes = set()
    for seed in range(5):
        tokens_NxL, ids_N = windows_of(seed, 7, 60)
        batch = blanks_of(tokens_NxL, ids_N, seed, sentinels=Sentinels(99, 20))
        shapes.add((batch.inputs_NxS.shape, batch.targets_NxT.shape))
    # 51 kept, at most 9 blanks, </s>; 9 dropped, 9 sentinels, an end, rounded up.
    assert shapes == {((7, 61), (7, 32))}


def test_progress():
    tokens_NxL, ids_N = windows_that_start_kept("spans")
    done = []
    asker = Asker(Memory(), np.zeros((VOCABULARY_SIZE, 48), np.int32), batch_size=3)
    asker.blanks(blanks_of(tokens_NxL, ids_N, masking="spans"), done.append)
    assert done == [3, 3, 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"sentinels": Sentinels(23, 2)},
            r"^window 50: \d blanks need \d sentinels, bu",
        ),
        ({"sentinels": Sentinels(15, 8)}, "^window 50: token .* is a sentinel"),
        ({"tokens_NxL": np.full((2, 1), 5)}, "a window of 1 tokens"),
    ],
)
def test_wrong_windows_and_sentinels(change, message):
    tokens_NxL, ids_N = windows_of(0, 2, 20)
    given = {"tokens_NxL": tokens_NxL, "sentinels": SENTINELS} | change
    given |= {"window_ids_N": ids_N, "seed": 0, "masking": "iid"}
    with pytest.raises(UsageError, match=message) as error:
        infilling.check_windows(**given)
    assert "\n" not in str(error.value)
    with pytest.raises(UsageError, match=message):
        infilling.make_blanks(**given, eos_id=EOS, pad_id=0)


@pytest.mark.parametrize("number", [2, 3, 4, 8])
def test_windows_are_checked_for_what_their_blanks_need(number):
    """Also where only some have more blanks than there are sentinels."""
    tokens_NxL, ids_N = windows_of(0, 9, 20)
    given = {"seed": 0, "masking": "iid", "sentinels": Sentinels(23, number)}
    for row in range(len(ids_N)):
        one = {"tokens_NxL": tokens_NxL[row : row + 1], "window_ids_N": ids_N[[row]]}
        try:
            infilling.make_blanks(**one, **given, eos_id=EOS, pad_id=0)
        except UsageError:
            with pytest.raises(UsageError, match=f"^window {ids_N[row]}: "):
                infilling.check_windows(**one, **given)
        else:
            infilling.check_windows(**one, **given)
