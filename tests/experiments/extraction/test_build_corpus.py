import pathlib
import random
import re
import subprocess
import sys
import types

import pytest

from experiments.errors import UsageError
from experiments.extraction import build_corpus, corpus
from experiments.extraction.corpus_building import Request
from experiments.extraction.documents import ALL, Part
from experiments.extraction.planting import Planting

REPOSITORY = pathlib.Path(__file__).parents[3]
DEFAULTS = {
    "corpus": "stdlib",
    "tokenizer": "",
    "eos_id": None,
    "part": "",
    "max_tokens": None,
    "plant_from": "",
    "plant_counts": None,
    "plant_passages": None,
    "plant_tokens": None,
    "seed": 0,
}


def parse(**values):
    return build_corpus.parse({**DEFAULTS, **values})


def test_the_defaults():
    assert parse() == Request("stdlib", "", None, ALL, None, None)


def test_every_flag_arrives():
    values = {"corpus": "text:*", "tokenizer": "bpe:300", "eos_id": 3, "max_tokens": 9}
    plan = {"plant_passages": 7, "plant_tokens": 60, "seed": 5}
    request = parse(
        **values, **plan, part="0/2", plant_from="1/4", plant_counts="1,2, 16"
    )
    planting = Planting(Part(1, 4), (1, 2, 16), 7, 60, 5)
    assert request == Request("text:*", "bpe:300", 3, Part(0, 2), 9, planting)
    request = parse(part="0/2", plant_from="1/2")
    assert request.planting == Planting(Part(1, 2))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"part": "2/2"}, "part='2/2', expected K/N"),
        ({"part": "0/2", "plant_from": "x"}, "plant_from='x', expected K/N"),
        ({"plant_from": "1/2"}, "plant_from=1/2 shares documents with part=0/1"),
        ({"plant_counts": "1"}, "--plant_counts is given without --plant_from"),
        ({"plant_tokens": 60}, "--plant_tokens is given without --plant_from"),
        (
            {"part": "0/2", "plant_from": "1/2", "plant_counts": "1,x"},
            "plant_counts='1,x', expected integers",
        ),
        ({"max_tokens": -1}, "max_tokens=-1, expected at least 1"),
    ],
)
def test_flags_that_cannot_be(values, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        parse(**values)


def run_main(monkeypatch, **values):
    values = {**DEFAULTS, "out": None, **values}
    fake = {k: types.SimpleNamespace(value=value) for k, value in values.items()}
    monkeypatch.setattr(build_corpus.flags, "FLAGS", fake)
    build_corpus.main()


def test_without_a_folder(monkeypatch):
    with pytest.raises(UsageError, match="--out is missing: give --out=FOLDER"):
        run_main(monkeypatch)


def test_the_last_line_names_the_folder_and_what_it_holds(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    draw = random.Random(0)
    for n in range(6):
        (tmp_path / f"{n}.txt").write_text("".join(draw.choices("abcdefgh", k=300)))
    plan = {"plant_from": "1/2", "plant_counts": "1,4", "plant_passages": 2}
    flags = {"corpus": "text:*.txt", "part": "0/2", "tokenizer": "bpe:270"}
    for _ in range(2):
        run_main(monkeypatch, out="out", **flags, **plan, plant_tokens=60)
        found = corpus.load("tokens:out", tmp_path / "unused")
        assert capsys.readouterr().out.splitlines()[-1] == (
            f"Corpus: {tmp_path}/out ({len(found.tokens_N):,} tokens in 13 documents, "
            "270 entries in the vocabulary, 10 copies of 4 planted passages)"
        )


def test_the_program(tmp_path):
    (tmp_path / "a.txt").write_text("some words and some words")
    (tmp_path / "b.txt").write_text("other words")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "experiments.extraction.build_corpus"),
            *("--corpus=text:*.txt", "--out=out", "--tokenizer=bpe:300"),
        ],
        cwd=tmp_path,
        env={"PYTHONPATH": str(REPOSITORY), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = corpus.load(f"tokens:{tmp_path}/out", tmp_path / "unused")
    assert done.stdout.splitlines()[-1] == (
        f"Corpus: {tmp_path}/out ({len(found.tokens_N)} tokens in 2 documents, "
        f"{found.vocabulary_size} entries in the vocabulary)"
    )
