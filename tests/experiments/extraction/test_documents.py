import gzip
import json
import re
import sys
import sysconfig
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.errors import RunError, UsageError
from experiments.extraction import documents
from experiments.extraction.documents import Part


def read(spec):
    return list(documents.find(spec))


@pytest.fixture
def stdlib(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    return tmp_path


def write(folder, **texts):
    for name, text in texts.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())


def test_stdlib_in_order_of_path(stdlib):
    write(stdlib, **{"b.py": "b", "a__z.py": "a/z", "a.py": "a", "a__b__c.py": "a/b/c"})
    write(stdlib, **{"site-packages__x.py": "no", "a__site-packages__x.py": "no"})
    write(stdlib, **{"notes.txt": "no", "dist-packages__x.py": "no"})
    (stdlib / "__pycache__").mkdir()
    (stdlib / "__pycache__" / "x.py").write_text("no")
    assert read("stdlib") == ["a", "a/b/c", "a/z", "b"]


def test_stdlib_size_and_bytes_that_are_not_text(stdlib):
    write(stdlib, **{"a.py": b"caf\xe9\r\n", "b.py": ""})
    found = documents.find("stdlib")
    assert (found.count, found.size) == (2, {"count": 2, "bytes": 6})
    # Twice: documents can be read again.
    assert list(found) == list(found) == ["caf\ufffd\r\n", ""]


def test_stdlib_without_sources(stdlib):
    with pytest.raises(RunError, match=r"no \*\.py under .*give --corpus=text:GLOB"):
        documents.find("stdlib")


def test_the_real_stdlib_has_modules_and_no_packages_of_others():
    files = documents._stdlib()
    names = {path.name for path in files}
    assert {"argparse.py", "turtle.py"} <= names
    assert not [path for path in files if "site-packages" in path.parts]


def test_text_files(tmp_path):
    write(tmp_path, **{"b.txt": "two", "a.txt": "one\r\n", "sub__c.txt": "three"})
    assert read(f"text:{tmp_path}/*.txt") == ["one\r\n", "two"]
    assert sorted(read(f"text:{tmp_path}/**/*.txt")) == ["one\r\n", "three", "two"]
    assert read(f"text:{tmp_path}/a.txt") == ["one\r\n"]


def test_a_glob_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path, **{"a.txt": "one"})
    assert read("text:~/*.txt") == ["one"]


@pytest.mark.parametrize("kind", ["text", "jsonl"])
def test_a_glob_that_matches_nothing(tmp_path, kind):
    with pytest.raises(UsageError, match="matches no file: check the path"):
        documents.find(f"{kind}:{tmp_path}/*.txt")
    with pytest.raises(UsageError, match=r"a folder's files are .*/\*\*/\*"):
        documents.find(f"{kind}:{tmp_path}")


def test_jsonl(tmp_path):
    lines = [
        '{"text": "one", "id": 3}',
        "",
        '{"text": ""}',
        '{"text": "a\\nb \\u00e9"}',
    ]
    write(tmp_path, **{"a.jsonl": "\n".join(lines), "b.jsonl": '{"text": "last"}\n'})
    with gzip.open(tmp_path / "c.jsonl.gz", "wt") as file:
        file.write('{"text": "packed"}\n')
    expected = ["one", "", "a\nb é", "last", "packed"]
    assert read(f"jsonl:{tmp_path}/*") == expected
    assert documents.find(f"jsonl:{tmp_path}/*").count is None


def test_half_a_character_in_jsonl_is_replaced(tmp_path):
    text = "\ud83d lone, \ud83d\ude00 pair"
    write(tmp_path, **{"a.jsonl": json.dumps({"text": text})})
    assert read(f"jsonl:{tmp_path}/*") == ["\ufffd lone, \U0001f600 pair"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "x"', "Expecting ',' delimiter at column 13"),
        (b'{"txt": "x", "id": 1}', r"found the keys \['id', 'txt'\]"),
        (b'["text"]', "found list"),
        (b'"text"', "found str"),
        (b'{"text": 3}', "'text' is int, not a string"),
        (b'{"text": null}', "'text' is NoneType, not a string"),
        (b'{"text": "caf\xe9"}', "can't decode byte 0xe9"),
        (b"[" * 100_000, "it is nested too deeply"),
    ],
)
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_bad_line_is_named(tmp_path, line, message, suffix):
    path = tmp_path / f"a.jsonl{suffix}"
    data = b'{"text": "x"}\n\n' + line + b"\n"
    path.write_bytes(gzip.compress(data) if suffix else data)
    with pytest.raises(RunError, match=rf"a\.jsonl{suffix}, line 3: .*{message}"):
        read(f"jsonl:{path}")


def test_a_damaged_archive_is_named_with_its_line(tmp_path):
    data = gzip.compress(b'{"text": "x"}\n' * 3)
    path = tmp_path / "a.jsonl.gz"
    for damaged in (data[:-6], b"not gzip", data[:15] + b"\xff" * 9 + data[24:]):
        path.write_bytes(damaged)
        with pytest.raises(RunError, match=r"a\.jsonl\.gz, line \d: "):
            read(f"jsonl:{path}")


class FakeSource(list):
    def __init__(self, examples, features):
        super().__init__(examples)
        self.dataset_info = types.SimpleNamespace(features=features)


def install_fake(monkeypatch, source):
    def data_source(name, split):
        assert (name, split) == ("c4/en:3.1.0", ["train"])
        return [source]

    module = types.ModuleType("tensorflow_datasets")
    module.data_source = data_source
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", module)


def test_tensorflow_data_set(monkeypatch):
    examples = [{"text": "café".encode()}, {"text": "two"}, {"text": b"\xff"}]
    install_fake(monkeypatch, FakeSource(examples, {"text": None, "label": None}))
    found = documents.find("tfds:c4/en:3.1.0")
    assert list(found) == list(found) == ["café", "two", "\ufffd"]
    assert (found.count, found.size) == (3, None)


def test_tensorflow_data_set_without_texts(monkeypatch):
    install_fake(monkeypatch, FakeSource([], {"image": None, "label": None}))
    with pytest.raises(
        RunError, match=r"corpus='tfds:.*\['image', 'label'\], expected"
    ):
        documents.find("tfds:c4/en:3.1.0")


def test_tensorflow_data_sets_are_optional(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    with pytest.raises(RunError, match=r"corpus='tfds:c4' needs .*\.\[tfds\]"):
        documents.find("tfds:c4")


@pytest.mark.parametrize(
    ("spec", "hint"),
    [
        ("stdlb", " (did you mean 'stdlib'?)"),
        ("txt:a/*", " (did you mean 'text'?)"),
        ("json:a/*", " (did you mean 'jsonl'?)"),
        ("token:a.npy", " (did you mean 'tokens'?)"),
        ("text:", " (did you mean 'text'?)"),
        ("", ""),
        ("wikipedia", ""),
    ],
)
def test_unknown_specs(spec, hint):
    message = re.escape(f"corpus={spec!r} is unknown{hint}: expected one of stdlib, ")
    with pytest.raises(UsageError, match=message):
        documents.find(spec)


@pytest.mark.parametrize(
    "text", ["", "1", "2/2", "0/0", "-1/2", "1/2/3", "a/b", "1.5/2", "0/1" + 19 * "0"]
)
def test_parts_that_are_none(text):
    with pytest.raises(UsageError, match=r"expected K/N .* give --plant_from=0/2"):
        Part.parse(text, "plant_from")


parts = st.integers(1, 12).flatmap(
    lambda of: st.integers(0, of - 1).map(lambda index: Part(index, of))
)


@given(parts, parts)
def test_parts_are_disjoint_iff_they_share_no_index(one, other):
    shared = [i for i in range(one.of * other.of) if i in one and i in other]
    assert one.is_disjoint(other) == (not shared)
    assert Part.parse(str(one)) == one


@given(st.integers(1, 12))
def test_the_parts_of_a_number_hold_each_document_once(of):
    for document in range(3 * of):
        assert sum(document in Part(index, of) for index in range(of)) == 1
