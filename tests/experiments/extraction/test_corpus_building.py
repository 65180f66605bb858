import collections
import fcntl
import json
import random
import re

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from experiments.errors import RunError, UsageError
from experiments.extraction import (
    byte_pairs,
    corpus_building,
    corpus_folder,
    planting,
    token_files,
)
from experiments.extraction.corpus_building import Request, build
from experiments.extraction.documents import Part
from experiments.extraction.planting import Planting

SEPARATOR = "<|endoftext|>"


@pytest.fixture
def texts(tmp_path):
    """Twelve documents of 150 to 700 random letters; the fifth has none."""
    draw = random.Random(0)
    texts = ["".join(draw.choices("abcdefgh ", k=150 + 50 * n)) for n in range(12)]
    texts[4] = ""
    texts[7] = SEPARATOR + texts[7] + SEPARATOR
    folder = tmp_path / "texts"
    folder.mkdir()
    for n, text in enumerate(texts):
        (folder / f"{n:02}.txt").write_text(text)
    return texts


def request(tmp_path, **values):
    return Request(f"text:{tmp_path}/texts/*", **{"tokenizer": "bpe:280", **values})


def manifest(folder):
    return json.loads((folder / "manifest.json").read_text())


def documents(found):
    return [ids.tolist() for ids in token_files.split(found.tokens_N, found.eos_id)]


def decoded(found):
    return [byte_pairs.decode(found.tokenizer, ids) for ids in documents(found)]


def contents(folder):
    return {
        path.relative_to(folder): (
            path.is_file() and path.read_bytes(),
            path.stat().st_ino,
            path.stat().st_mtime_ns,
        )
        for path in folder.rglob("*")
    }


def test_documents_in_their_order_without_empty_ones(tmp_path, texts):
    found = build(request(tmp_path), tmp_path / "out")
    assert decoded(found) == [text for text in texts if text]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "manifest.json",
        "tokenizer.json",
        "tokens.npy",
    ]
    assert not (tmp_path / "out.partial").exists()


def test_the_manifest(tmp_path, texts):
    found = build(request(tmp_path), tmp_path / "out")
    written = manifest(tmp_path / "out")
    assert written["format"] == corpus_folder.FORMAT
    assert written["spec"] == f"text:{tmp_path}/texts/*"
    assert written["num_tokens"] == len(found.tokens_N)
    assert written["num_documents"] == 11
    assert written["vocabulary_size"] == found.vocabulary_size == 280
    assert written["eos_id"] == found.eos_id == 0
    assert written["dtype"] == "uint16"
    assert written["tokens_sha256"] == found.sha256
    assert written["tokenizer_fingerprint"] == found.tokenizer_fingerprint
    assert written["planting"] is None
    assert set(written["versions"]) == {"python", "numpy", "tokenizers"}


def test_the_same_corpus_twice_is_the_same_bytes(tmp_path, texts):
    plan = Planting(Part(1, 2), (1, 3), 2, 60, seed=5)
    for name in ("one", "two"):
        build(request(tmp_path, part=Part(0, 2), planting=plan), tmp_path / name)
    for name in corpus_folder.TOKENS, corpus_folder.TOKENIZER, corpus_folder.MANIFEST:
        one, two = ((tmp_path / n / name).read_bytes() for n in ("one", "two"))
        assert one == two


def test_parts_share_their_tokenizer_and_make_up_the_whole(tmp_path, texts):
    whole = build(request(tmp_path), tmp_path / "whole")
    parts = [
        build(request(tmp_path, part=Part(k, 3)), tmp_path / f"{k}") for k in range(3)
    ]
    for k, part in enumerate(parts):
        assert part.tokenizer_fingerprint == whole.tokenizer_fingerprint
        assert decoded(part) == [text for text in texts[k::3] if text]
    together = [ids for part in parts for ids in documents(part)]
    assert sorted(together) == sorted(documents(whole))


def test_max_tokens(tmp_path, texts):
    whole = build(request(tmp_path), tmp_path / "whole")
    cut = build(request(tmp_path, max_tokens=200), tmp_path / "cut")
    assert cut.tokens_N.tolist() == whole.tokens_N[:200].tolist()
    assert manifest(tmp_path / "cut")["num_documents"] == len(documents(cut)) > 1


def test_planted_passages_occur_as_often_as_the_manifest_says(tmp_path, texts):
    plan = Planting(Part(1, 2), (1, 2, 5), 2, 60, seed=5)
    kept = build(request(tmp_path, part=Part(0, 2)), tmp_path / "kept")
    planted = build(request(tmp_path, part=Part(0, 2), planting=plan), tmp_path / "out")
    passages = manifest(tmp_path / "out")["planting"]
    assert [passage["copies"] for passage in passages] == [1, 1, 2, 2, 5, 5]
    tokenizer = byte_pairs.open_file(planted.tokenizer)
    counts = collections.Counter(map(tuple, documents(planted)))
    tokens = planted.tokens_N.tobytes()
    for passage in passages:
        assert passage["document"] % 2 == 1
        (ids_T,) = byte_pairs.encode(tokenizer, [texts[passage["document"]]], 0)
        stop = passage["start"] + passage["length"]
        ids = tuple(ids_T[passage["start"] : stop].tolist())
        assert len(ids) == 60
        assert counts.pop(ids) == passage["copies"]
        # Byte for byte, so overlapping and shifted ones count too.
        for start in range(11):
            window = np.array(ids[start : start + 50], "<u2").tobytes()
            found = [
                m.start() for m in re.finditer(b"(?=%s)" % re.escape(window), tokens)
            ]
            assert (
                len([place for place in found if place % 2 == 0]) == passage["copies"]
            )
    assert counts == collections.Counter(map(tuple, documents(kept)))


def test_max_tokens_is_without_the_copies(tmp_path, texts):
    plan = Planting(Part(1, 2), (3,), 2, 60)
    wanted = request(tmp_path, part=Part(0, 2), max_tokens=100, planting=plan)
    found = build(wanted, tmp_path / "out")
    assert len(found.tokens_N) == 100 + 3 * 2 * (60 + 1)


def test_passages_are_of_the_first_tokens_of_their_part(tmp_path, texts, monkeypatch):
    monkeypatch.setattr(corpus_building, "_MAX_CANDIDATE_TOKENS", 1)
    plan = Planting(Part(1, 2), (1,), 1, 50)
    build(request(tmp_path, part=Part(0, 2), planting=plan), tmp_path / "out")
    # 200 tokens for one passage of 50, which the second document of the part reaches.
    (passage,) = manifest(tmp_path / "out")["planting"]
    assert passage["document"] in (1, 3)


def test_the_same_request_again_changes_nothing(tmp_path, texts, monkeypatch, capsys):
    first = build(request(tmp_path), tmp_path / "out")
    before = contents(tmp_path / "out")
    monkeypatch.setattr(byte_pairs, "train", None)
    again = build(request(tmp_path), tmp_path / "out")
    assert again.sha256 == first.sha256
    assert contents(tmp_path / "out") == before
    assert f"is in {tmp_path / 'out'} already" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("values", "difference"),
    [
        ({"tokenizer": "bpe:281"}, "tokenizer='bpe:280' (now 'bpe:281')"),
        ({"part": Part(2, 4)}, "part='0/2' (now '2/4')"),
        ({"max_tokens": 10}, "max_tokens=None (now 10)"),
        ({"planting": None}, "plant_from='1/2' (now None)"),
        ({"planting": Planting(Part(1, 2), (1,), 1, 60, 1)}, "seed=0 (now 1)"),
        ({"planting": Planting(Part(1, 2), (1,), 2, 60)}, "plant_passages=1 (now 2)"),
        ({"planting": Planting(Part(1, 2), (2,), 1, 60)}, "plant_counts=[1] (now [2])"),
        ({"planting": Planting(Part(1, 2), (1,), 1, 50)}, "plant_tokens=60 (now 50)"),
        (
            {"planting": Planting(Part(3, 4), (1,), 1, 60)},
            "plant_from='1/2' (now '3/4')",
        ),
    ],
)
def test_another_request_changes_nothing(tmp_path, texts, values, difference):
    plan = Planting(Part(1, 2), (1,), 1, 60)
    options = {"part": Part(0, 2), "planting": plan}
    build(request(tmp_path, **options), tmp_path / "out")
    before = contents(tmp_path)
    message = rf"holds another corpus, with .*{re.escape(difference)}"
    with pytest.raises(UsageError, match=message):
        build(request(tmp_path, **{**options, **values}), tmp_path / "out")
    assert contents(tmp_path) == before


def test_files_that_have_changed_make_another_corpus(tmp_path, texts):
    build(request(tmp_path), tmp_path / "out")
    (tmp_path / "texts" / "00.txt").write_text("shorter")
    with pytest.raises(UsageError, match=r"another corpus, with files=.*now"):
        build(request(tmp_path), tmp_path / "out")


def test_a_folder_of_something_else_is_left_alone(tmp_path, texts):
    out = tmp_path / "out"
    out.mkdir()
    (out / "tokens.npy").write_text("mine")
    before = contents(tmp_path)
    with pytest.raises(
        UsageError, match=r"holds 'tokens.npy' and no corpus, so nothing"
    ):
        build(request(tmp_path), out)
    with pytest.raises(UsageError, match="is a file, expected a folder"):
        build(request(tmp_path), out / "tokens.npy")
    assert contents(tmp_path) == before


def test_an_empty_folder_will_do(tmp_path, texts):
    (tmp_path / "out").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "out")
    build(request(tmp_path), tmp_path / "link")
    assert (tmp_path / "out" / "manifest.json").exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError("disk full")])
def test_what_fails_leaves_nothing(tmp_path, texts, monkeypatch, error):
    def fail(*_):
        raise error

    before = contents(tmp_path)
    monkeypatch.setattr(corpus_building, "_manifest", fail)
    with pytest.raises((KeyboardInterrupt, OSError)):
        build(request(tmp_path), tmp_path / "out")
    assert contents(tmp_path) == before


def test_what_was_killed_is_begun_again(tmp_path, texts):
    scratch = tmp_path / "out.partial"
    scratch.mkdir()
    for name in ("tokens.npy", "kept.npy", "manifest.json.partial", ".lock"):
        (scratch / name).write_text("half")
    found = build(request(tmp_path), tmp_path / "out")
    assert decoded(found) == [text for text in texts if text]
    assert not scratch.exists()


def test_a_scratch_folder_of_somebody_else_is_left_alone(tmp_path, texts):
    scratch = tmp_path / "out.partial"
    scratch.mkdir()
    (scratch / "thesis.tex").write_text("mine")
    with pytest.raises(UsageError, match=r"holds 'thesis.tex', which no build"):
        build(request(tmp_path), tmp_path / "out")
    assert (scratch / "thesis.tex").read_text() == "mine"


def test_two_processes_do_not_build_in_one_folder(tmp_path, texts):
    scratch = tmp_path / "out.partial"
    scratch.mkdir()
    with (scratch / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(RunError, match=r"/out.partial' is in use by another"):
            build(request(tmp_path), tmp_path / "out")
        assert (scratch / ".lock").exists()


def test_no_tokens(tmp_path, texts):
    before = contents(tmp_path)
    with pytest.raises(RunError, match=r"has no tokens in part 4/12: give another"):
        build(request(tmp_path, part=Part(4, 12)), tmp_path / "out")
    with pytest.raises(RunError, match="has no tokens in part 20/99"):
        build(request(tmp_path, part=Part(20, 99)), tmp_path / "out")
    assert contents(tmp_path) == before


def test_too_few_passages(tmp_path, texts):
    plan = Planting(Part(1, 2), (1,), 999, 60)
    with pytest.raises(UsageError, match=r"expected 999: lower --plant_passages or"):
        build(request(tmp_path, part=Part(0, 2), planting=plan), tmp_path / "out")
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("part", [Part(0, 1), Part(1, 2), Part(3, 4), Part(1, 3)])
def test_passages_of_documents_that_are_kept(tmp_path, part):
    with pytest.raises(UsageError, match=r"plant_from=1/2 shares documents with part="):
        request(tmp_path, part=part, planting=Planting(Part(1, 2)))


def test_max_tokens_that_cannot_be(tmp_path):
    with pytest.raises(UsageError, match="max_tokens=0, expected at least 1"):
        request(tmp_path, max_tokens=0)


def test_a_given_tokenizer_is_copied_and_finds_its_separator(tmp_path, texts):
    other = tmp_path / "model"
    other.mkdir()
    byte_pairs.train(texts, 300).save(str(other / "tokenizer.json"))
    (other / "config.json").write_text('{"eos_token_id": 7}')
    found = build(request(tmp_path, tokenizer=str(other)), tmp_path / "out")
    copy = tmp_path / "out" / "tokenizer.json"
    assert copy.read_bytes() == (other / "tokenizer.json").read_bytes()
    assert found.tokenizer == copy
    assert found.eos_id == 7
    assert found.vocabulary_size == 300
    # The same by another name; another separator is another corpus.
    again = request(tmp_path, tokenizer=str(copy), eos_id=7)
    assert build(again, tmp_path / "out").sha256 == found.sha256
    with pytest.raises(UsageError, match=r"eos_id=7 \(now 0\)"):
        build(request(tmp_path, tokenizer=str(other), eos_id=0), tmp_path / "out")
    for eos_id in (-1, 300):
        with pytest.raises(UsageError, match=f"eos_id={eos_id}, expected an id of"):
            build(
                request(tmp_path, tokenizer=str(other), eos_id=eos_id), tmp_path / "x"
            )


def test_ids_above_65535_are_not_wrapped(tmp_path):
    ids = (0, 1, 65_535, 65_536, 65_537, 66_000, 69_999)
    vocabulary = {f"w{n}": n for n in ids}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "words.json"))
    (tmp_path / "a.txt").write_text("w65535 w65536 w69999")
    (tmp_path / "b.txt").write_text("w1 w65537")
    wanted = Request(
        f"text:{tmp_path}/*.txt", str(tmp_path / "words.json"), eos_id=66_000
    )
    found = build(wanted, tmp_path / "out")
    assert found.tokens_N.dtype == np.uint32
    assert found.tokens_N.tolist() == [65_535, 65_536, 69_999, 66_000, 1, 65_537]
    assert found.vocabulary_size == 70_000


def save_tokens(tmp_path, ids):
    np.save(tmp_path / "ids.npy", np.array(ids, np.uint16))
    return f"tokens:{tmp_path}/ids.npy"


def test_a_part_of_tokens(tmp_path):
    spec = save_tokens(tmp_path, [5, 0, 6, 6, 0, 0, 7, 0])
    found = build(Request(spec, eos_id=0, part=Part(0, 2)), tmp_path / "out")
    # The third document is empty.
    assert documents(found) == [[5]]
    found = build(Request(spec, eos_id=0, part=Part(1, 2)), tmp_path / "odd")
    assert documents(found) == [[6, 6], [7]]
    assert (found.vocabulary_size, found.tokenizer) == (8, None)
    assert manifest(tmp_path / "odd")["tokenizer_fingerprint"] is None


def test_tokens_that_are_one_document(tmp_path):
    spec = save_tokens(tmp_path, [5, 0, 6])
    found = build(Request(spec, max_tokens=2), tmp_path / "out")
    assert (found.tokens_N.tolist(), found.eos_id) == ([5, 0], None)
    assert manifest(tmp_path / "out")["num_documents"] == 1
    plan = Planting(Part(1, 2), (1,), 1, 50)
    with pytest.raises(UsageError, match=r"the corpus has no separator: give --eos_id"):
        build(Request(spec, part=Part(0, 2), planting=plan), tmp_path / "other")


def test_a_corpus_of_a_corpus(tmp_path, texts):
    whole = build(request(tmp_path), tmp_path / "whole")
    plan = Planting(Part(1, 2), (2,), 1, 60)
    wanted = Request(f"tokens:{tmp_path}/whole", part=Part(0, 2), planting=plan)
    found = build(wanted, tmp_path / "out")
    assert found.tokenizer_fingerprint == whole.tokenizer_fingerprint
    (passage,) = manifest(tmp_path / "out")["planting"]
    source = documents(whole)[passage["document"]]
    ids = source[passage["start"] : passage["start"] + 60]
    assert documents(found).count(ids) == 2
    assert passage["length"] == 60 >= planting.WINDOW


@pytest.mark.parametrize("tokenizer", ["", "given.json"])
def test_a_bad_line_stops_the_build(tmp_path, tokenizer):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": 2}\n')
    if tokenizer:
        tokenizer = str(tmp_path / tokenizer)
        byte_pairs.train(["one"], 257).save(tokenizer)
    before = contents(tmp_path)
    with pytest.raises(RunError, match=r"a\.jsonl, line 2: 'text' is int"):
        build(Request(f"jsonl:{tmp_path}/a.jsonl", tokenizer), tmp_path / "out")
    assert contents(tmp_path) == before
