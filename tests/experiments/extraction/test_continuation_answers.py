"""Beams and draws through whole sweeps; plain sweeps are in test_sweep.py."""

import functools
import json
import math
import operator

import jax
import numpy as np
import polars
import pytest

from experiments import models
from experiments.errors import RunError, UsageError
from experiments.extraction import (
    asking,
    beam_search,
    records,
    sampled_decoding,
    sweep,
    sweep_config,
    sweep_plan,
)
from experiments.extraction.records import Parts
from experiments.extraction.sampled_decoding import SamplingScheme
from tests.experiments.extraction import known_windows
from tests.experiments.extraction.known_windows import GOLDEN

pytestmark = pytest.mark.usefixtures("compiled_cheaply", "compiled_once")

CONTEXT, BEAMS = 12, 4
# Three windows go on greedily, one as a search with four beams does, one otherwise.
EXTRACTABLE = [True, True, True, False, False]
BY_BEAMS = [False, False, False, True, False]
# So that suffixes are drawn now and then.
SCHEME = {"temperature": 0.05, "top_k": 3}
EVERYTHING = {"decode": True, "beams": BEAMS, "samples": 7, **SCHEME}


@pytest.fixture(scope="module")
def gpt2():
    return models.load(GOLDEN / "gpt2")


@pytest.fixture(scope="module")
def windows(gpt2, tmp_path_factory):
    model, params = gpt2
    shape = (len(EXTRACTABLE), CONTEXT)
    prompts_NxC = np.random.default_rng(3).integers(0, 96, shape, dtype=np.int32)
    tokens_NxT = known_windows.continued(GOLDEN / "gpt2", prompts_NxC)
    search = functools.partial(beam_search.search, model, num_beams=BEAMS)
    beams = jax.jit(search)(params, prompts_NxC)
    tokens_NxT[3, CONTEXT:] = beams.tokens_PxNxT[3, 0]
    tokens_NxT = known_windows.spoiled(tokens_NxT, [50, 50, 50, 50, 7])
    folder = tmp_path_factory.mktemp("set") / "windows"
    return known_windows.write(folder, {CONTEXT + 50: tokens_NxT})


@pytest.fixture(scope="module")
def swept(windows):
    """`(out, **config) -> records`."""

    def make(out, **values):
        values = {
            "models": (str(GOLDEN / "gpt2"),),
            "windows": str(windows),
            "batch_size": 2,
            "out": str(out),
            **values,
        }
        folder = sweep.sweep(sweep_config.parse(sweep_config.make(**values)))
        return polars.read_parquet(folder / records.RECORDS)

    return make


@pytest.fixture(scope="module")
def everything(swept, tmp_path_factory):
    """The folder of a sweep of `EVERYTHING`, in one part, and its records."""
    folder = tmp_path_factory.mktemp("everything")
    return folder, swept(folder, **EVERYTHING)


@pytest.fixture
def run(swept, tmp_path, monkeypatch):
    """`(**config) -> records`, in parts of one batch."""
    monkeypatch.setattr(sweep_plan, "_BATCHES_PER_PART", 1)
    return lambda out="sweep", **values: swept(tmp_path / out, **values)


def suffixes(windows):
    tokens = polars.read_parquet(windows / "windows.parquet")["tokens"]
    return [ids[CONTEXT:] for ids in tokens.to_list()]


def test_the_columns(everything, swept, capsys):
    folder, found = everything
    groups = (records.GENERATED, records.BEAMS, records.SCHEME, records.SAMPLES)
    schema = functools.reduce(operator.or_, groups, records.COLUMNS)
    assert found.schema == polars.Schema(schema)
    assert found.drop("anywhere", "whitespace").null_count().sum_horizontal().sum() == 0
    swept(folder, **EVERYTHING)
    some = (found["samples_extracted"] > 0).sum()
    assert (
        "gpt2: 3 of 5 windows extractable (60.00%); 1 by the best of 4 beams, which is "
        f"the greedy continuation in 0.00%; {some} among 7 draws; 0 verdicts"
    ) in capsys.readouterr().out


def test_the_best_of_several_beams(everything, windows, gpt2):
    _, found = everything
    assert found["extracted"].to_list() == EXTRACTABLE
    assert found["beam_extracted"].to_list() == BY_BEAMS
    best = found["beam_generated"].to_list()
    assert [a == b for a, b in zip(best, suffixes(windows), strict=True)] == BY_BEAMS
    assert not found["beam_identical"].any()
    model, params = gpt2
    tokens = polars.read_parquet(windows / "windows.parquet")["tokens"].to_list()
    whole_NxT = np.array([w[:CONTEXT] + b for w, b in zip(tokens, best, strict=True)])
    log_probability_NxTxV = jax.nn.log_softmax(jax.jit(model.apply)(params, whole_NxT))
    rescored_NxS = np.take_along_axis(
        np.asarray(log_probability_NxTxV)[:, CONTEXT - 1 : -1],
        whole_NxT[:, CONTEXT:, None],
        axis=-1,
    )
    np.testing.assert_allclose(
        found["beam_logprob"], rescored_NxS.sum(axis=(1, 2)), rtol=1e-5
    )


def test_a_single_beam_is_greedy(run):
    found = run(decode=True, beams=1)
    assert found["beam_generated"].equals(found["generated"])
    assert found["beam_identical"].all()
    assert found["beam_extracted"].equals(found["extracted"])
    extracted = found.filter("extracted")
    np.testing.assert_allclose(
        extracted["beam_logprob"], extracted["suffix_logprob"], rtol=1e-5
    )


def test_draws_are_as_likely_as_the_scheme_says(everything, windows, gpt2):
    _, found = everything
    model, params = gpt2
    tokens = polars.read_parquet(windows / "windows.parquet")["tokens"].to_list()
    tokens_NxT = np.array(tokens, np.int32)
    scheme = SamplingScheme(**SCHEME)
    logits_NxTxV = scheme.modified(jax.jit(model.apply)(params, tokens_NxT))
    log_probability_NxTxV = np.asarray(jax.nn.log_softmax(logits_NxTxV))
    expected_N = np.take_along_axis(
        log_probability_NxTxV[:, CONTEXT - 1 : -1], tokens_NxT[:, CONTEXT:, None], -1
    ).sum(axis=(1, 2))
    np.testing.assert_allclose(found["scheme_logprob"], expected_N, rtol=1e-3)
    assert found["scheme_logprob"][4] == -math.inf
    # The draws themselves, by hand.
    ids_N = np.arange(len(tokens))
    keys_NxM = sampled_decoding.draw_keys(0, CONTEXT, ids_N, np.arange(7))
    sample = functools.partial(sampled_decoding.sample, model, scheme=scheme)
    drawn_NxMxS = jax.jit(sample)(params, tokens_NxT[:, :CONTEXT], keys_NxM)
    is_true_NxM = (np.asarray(drawn_NxMxS) == tokens_NxT[:, None, CONTEXT:]).all(-1)
    assert found["samples_extracted"].to_list() == is_true_NxM.sum(axis=1).tolist()
    assert 0 < found["samples_extracted"].sum() < 3 * 7


def test_draws_depend_on_their_window_alone(everything, run, monkeypatch):
    """Not on the batch, on how many are drawn at once, nor on other windows."""
    _, found = everything
    monkeypatch.setattr(asking, "_DRAWS_AT_ONCE", 3)
    other = run("other", samples=7, windows_per_bucket=1, **SCHEME)
    same = found.filter(polars.col("window_id").is_in(other["window_id"].to_list()))
    assert len(other) == 3
    assert other["samples_extracted"].equals(same["samples_extracted"])
    seeded = run("seeded", samples=7, seed=1, **SCHEME)
    assert not seeded["samples_extracted"].equals(found["samples_extracted"])


def test_the_only_token_to_draw(run, capsys):
    found = run(samples=2, top_k=1, contexts=(CONTEXT, 5))
    np.testing.assert_array_equal(
        found["scheme_logprob"], np.where(found["extracted"], 0.0, -math.inf)
    )
    assert found["samples_extracted"].equals(2 * found["extracted"].cast(polars.Int32))
    assert found["extracted"].sum() == 3
    # Each window counts once for each context, whatever it is asked.
    assert "10/10" in capsys.readouterr().err


def test_the_plain_scheme_is_the_model_itself(run, monkeypatch):
    def draw(self, tokens_NxT, *args):
        return np.full(len(tokens_NxT), 9), np.ones(len(tokens_NxT), bool)

    monkeypatch.setattr(asking.Asker, "times_drawn", draw)
    found = run(samples=9)
    assert found["scheme_logprob"].equals(found["suffix_logprob"])
    assert found["samples_extracted"].to_list() == [9] * 5


def test_a_scheme_without_draws(run):
    found = run(temperature=2)
    assert found.schema == polars.Schema(records.COLUMNS | records.SCHEME)
    assert (found["scheme_logprob"] < found["suffix_logprob"])[:3].all()


class Killed(Exception):
    pass


def test_a_killed_sweep_draws_and_searches_the_same(
    everything, run, monkeypatch, tmp_path
):
    whole, killed = everything[0], tmp_path / "killed"
    real, written = Parts.write, []

    def write(self, *args):
        if len(written) == 1:
            raise Killed
        written.append(args)
        real(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Parts, "write", write)
        with pytest.raises(Killed):
            run("killed", **EVERYTHING)
    run("killed", **EVERYTHING)
    for name in ("records.parquet", "config.json"):
        assert (killed / name).read_bytes() == (whole / name).read_bytes()
    rows = (killed / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["windows"] for row in rows] == [2, 2, 2, 1]


@pytest.mark.parametrize(
    ("function", "without"),
    [("best_of_beams", {"samples": 0}), ("times_drawn", {"decode": False, "beams": 0})],
)
def test_logits_that_are_no_numbers_stop_the_sweep(run, monkeypatch, function, without):
    """Also where only generated tokens lead to them."""
    real = getattr(asking.Asker, function)

    def damaged(self, tokens_NxT, *args):
        found_N, score_N = real(self, tokens_NxT, *args)
        broken = np.nan if score_N.dtype == np.float32 else False
        return found_N, np.where(np.arange(len(score_N)) == 1, broken, score_N)

    monkeypatch.setattr(asking.Asker, function, damaged)
    with pytest.raises(RunError, match=r"not finite for window 1 \(context 12\)"):
        run(**(EVERYTHING | without))


def test_no_token_is_recorded_where_decoding_finds_no_number(run, monkeypatch):
    """Having left the suffix, it reads what teacher forcing has not seen."""
    real = asking.Asker.generate

    def damaged(self, *args):
        generated_NxS = real(self, *args).copy()
        # The fifth window is the last, and it is left at its eighth token.
        generated_NxS[-1, 30:] = 128
        return generated_NxS

    monkeypatch.setattr(asking.Asker, "generate", damaged)
    monkeypatch.setattr(sweep_plan, "_BATCHES_PER_PART", 16)
    with pytest.raises(RunError, match=r"not finite for window 4 \(context 12\)"):
        run(decode=True)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"decode": True, "beams": 129}, "'gpt2': 129 beams, expected 1 to 128 .*:"),
        ({"top_k": 129}, "'gpt2': top_k=129, expected at most 128, .*: lower it"),
    ],
)
def test_more_choices_than_tokens(run, tmp_path, values, message):
    with pytest.raises(UsageError, match=message):
        run(**values)
    assert not (tmp_path / "sweep").exists()
