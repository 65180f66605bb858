import json

import numpy as np
import polars
import pytest

from experiments.errors import RunError, UsageError
from experiments.extraction import (
    corpus_folder,
    decoded_measures,
    lookup,
    near_misses,
    records,
    suffix_array,
    sweep,
    sweep_config,
)
from tests.experiments.extraction import known_windows
from tests.experiments.extraction.known_windows import GOLDEN

EOS = 0


@pytest.fixture(scope="module")
def tokens_N():
    """Documents with two continuations of one prompt, and others."""
    rng = np.random.default_rng(0)
    prompt, one, other = (rng.integers(1, 90, n) for n in (20, 50, 50))
    documents = [[*prompt, *one], [*prompt, *other], rng.integers(1, 90, 200)]
    ids = np.concatenate([[*document, EOS] for document in documents])
    return ids.astype(np.uint16)


@pytest.fixture(scope="module")
def searched(tokens_N):
    return lookup.prepare(tokens_N, EOS, 90, suffix_array.build(tokens_N)[0])


@pytest.fixture(scope="module")
def windows(tokens_N):
    """Two of 70 tokens, one of 60."""
    tokens = [tokens_N[:70], tokens_N[142:212], tokens_N[150:210]]
    return polars.DataFrame(
        {"window_id": range(3), "tokens": [ids.tolist() for ids in tokens]},
        schema_overrides={"tokens": polars.List(polars.UInt32())},
    )


def rows_of(windows, answers):
    """Records of (window, context, generated)."""
    schema = records.COLUMNS | records.GENERATED
    rows = []
    for window, context, generated in answers:
        tokens = windows["tokens"][window].to_list()
        row = {
            **dict.fromkeys(schema),
            "window_id": window,
            "length": len(tokens),
            "context": context,
            "extracted": tokens[context : context + 50] == list(generated),
            "generated": generated,
        }
        rows.append(row)
    return polars.DataFrame(rows, schema=schema)


def test_what_is_found_and_how_near_it_is(tokens_N, searched, windows):
    true = {n: ids.to_list() for n, ids in enumerate(windows["tokens"])}
    other = tokens_N[91:141].tolist()
    near = [*true[1][10:59], 89 - true[1][59]]
    nowhere = [7] * 50
    answers = [
        (1, 20, true[1][20:]),
        # The other continuation of the same prompt.
        (0, 20, other),
        (2, 10, nowhere),
        # In the corpus, but not behind this prompt.
        (1, 20, other),
        (1, 10, near),
        (0, 20, true[0][20:]),
    ]
    rows = rows_of(windows, answers)
    found = decoded_measures.add(rows, windows, searched)
    assert found.drop("anywhere", "bleu", "edit_distance").equals(
        rows.drop("anywhere", "bleu", "edit_distance")
    )
    assert found["anywhere"].to_list() == [True, True, False, False, False, True]
    suffixes = np.array([true[w][c : c + 50] for w, c, _ in answers])
    generated = np.array([ids for _, _, ids in answers])
    bleu = near_misses.bleu(generated, suffixes)
    assert found["bleu"].to_list() == bleu.tolist()
    assert found["edit_distance"].to_list() == [
        *near_misses.edit_distance(generated, suffixes)
    ]
    assert found["edit_distance"].to_list()[::4] == [0, 1]
    assert found.schema == polars.Schema(records.COLUMNS | records.GENERATED)


def test_without_a_corpus_nothing_is_known_of_anywhere(windows):
    rows = rows_of(windows, [(0, 20, [7] * 50), (2, 10, [7] * 50)])
    found = decoded_measures.add(rows, windows, None)
    assert found["anywhere"].to_list() == [None, None]
    assert found["bleu"].null_count() == 0
    assert found.schema == polars.Schema(records.COLUMNS | records.GENERATED)


def test_what_is_extracted_counts_as_found_whatever_was_generated(searched, windows):
    # Within rounding, decoding may leave the suffix that teacher forcing stays with.
    rows = rows_of(windows, [(0, 20, [7] * 50)])
    found = decoded_measures.add(rows, windows, searched)
    assert found["anywhere"].to_list() == [False]
    rows = rows.with_columns(extracted=True)
    found = decoded_measures.add(rows, windows, searched)
    assert found["anywhere"].to_list() == [True]


def test_windows_of_another_corpus(searched, windows):
    tokens = [[3] * 70, *windows["tokens"].to_list()[1:]]
    others = windows.with_columns(
        tokens=polars.Series(tokens, dtype=polars.List(polars.UInt32))
    )
    rows = rows_of(others, [(1, 20, [7] * 50), (0, 20, [3] * 50)])
    with pytest.raises(RunError, match=r"window 0 does not occur in config\.corpus"):
        decoded_measures.add(rows, others, searched)


@pytest.fixture
def swept(tmp_path):
    """`(corpus_sha256) -> config`, of windows that a golden model generates."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(2, known_windows.VOCABULARY_SIZE, (3, 12))
    tokens_NxT = known_windows.continued(GOLDEN / "gpt_j", prompts)
    # The corpus holds what is generated from the first, but the window goes on
    # otherwise; nothing is generated from the second; the third is extractable.
    spoiled = known_windows.spoiled(tokens_NxT, [20, 0, 50])
    documents = [spoiled[0], spoiled[1], tokens_NxT[0], spoiled[2]]
    tokens_N = np.concatenate([[*ids, 1] for ids in documents]).astype(np.uint16)
    np.save(tmp_path / "ids.npy", tokens_N)
    sha256 = corpus_folder.open_tokens(tmp_path / "ids.npy", 1, "").sha256

    def config(corpus_sha256=sha256, **values):
        folder = known_windows.write(
            tmp_path / "windows", {62: spoiled}, corpus_sha256=corpus_sha256
        )
        return sweep_config.make(
            models=(str(GOLDEN / "gpt_j"),),
            windows=str(folder),
            batch_size=3,
            decode=True,
            corpus=f"tokens:{tmp_path}/ids.npy",
            out=str(tmp_path / "out"),
            **values,
        )

    return config


@pytest.mark.usefixtures("compiled_cheaply")
def test_a_sweep_looks_up_what_it_generates(swept, tmp_path, capsys):
    folder = sweep.sweep(sweep_config.parse(swept()))
    found = polars.read_parquet(folder / records.RECORDS)
    assert found["anywhere"].to_list() == [True, False, True]
    assert found["extracted"].to_list() == [False, False, True]
    assert found["bleu"].to_list()[2] == 1
    assert "1 of 3 windows extractable (33.33%); 2 found" in capsys.readouterr().out
    told = json.loads((folder / "config.json").read_text())
    assert len(told["derived"]["corpus_sha256"]) == 64
    assert (tmp_path / "ids.suffix_array" / "suffix_array.json").exists()


def test_a_sweep_with_the_corpus_of_other_windows(swept, tmp_path):
    config = sweep_config.parse(swept(corpus_sha256="0" * 64))
    with pytest.raises(UsageError, match=r"is not the corpus of the windows in"):
        sweep.sweep(config)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"corpus": "stdlib"}, r"corpus='stdlib', expected tokens:DIR or tokens:FILE"),
        ({"decode": False}, r"corpus='tokens:x', expected '' without decode=True"),
    ],
)
def test_configs_that_cannot_be(values, message):
    config = {"corpus": "tokens:x", "decode": True, "models": ("m",), "windows": "w"}
    with pytest.raises(UsageError, match=message):
        sweep_config.parse(sweep_config.make(**(config | values)))
