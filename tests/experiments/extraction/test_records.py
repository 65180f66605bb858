import polars
import pytest

from experiments.errors import RunError
from experiments.extraction import records
from experiments.extraction.records import Parts


def rows(model, context, length, window_ids):
    values = dict.fromkeys(records.COLUMNS)
    values |= {
        "window_id": window_ids,
        "model": model,
        "context": context,
        "length": length,
        "extracted": False,
    }
    return polars.DataFrame(values).cast(polars.Schema(records.COLUMNS))


def test_a_part_is_there_once_it_is_whole(tmp_path):
    parts = Parts(tmp_path)
    part = rows("a", 50, 100, [3, 4])
    assert "one" not in parts
    parts.write("one", part)
    assert "one" in parts
    assert parts.read("one").equals(part)
    assert parts.read("one").schema == part.schema
    # What a killed sweep leaves is no part, and goes.
    (tmp_path / "parts" / "two.parquet.partial").write_bytes(b"PAR1")
    parts = Parts(tmp_path)
    assert "one" in parts
    assert "two" not in parts
    assert [path.name for path in (tmp_path / "parts").iterdir()] == ["one.parquet"]
    parts.remove()
    assert not list(tmp_path.iterdir())


def test_a_damaged_part_is_named(tmp_path):
    parts = Parts(tmp_path)
    parts.write("one", rows("a", 50, 100, [1]))
    path = tmp_path / "parts" / "one.parquet"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(RunError, match=r"one\.parquet is damaged .*delete it"):
        parts.read("one")


def test_merged_rows_are_in_their_order():
    parts = [
        rows("b", 50, 100, [5, 4]),
        rows("a", 100, 150, [1]),
        rows("a", 50, 150, [1]),
        rows("a", 50, 100, [7, 6]),
    ]
    merged = records.merge(parts, ["b", "a"])
    assert merged.schema == polars.Schema(records.COLUMNS)
    assert merged.select("model", "context", "length", "window_id").rows() == [
        ("b", 50, 100, 4),
        ("b", 50, 100, 5),
        ("a", 50, 100, 6),
        ("a", 50, 100, 7),
        ("a", 50, 150, 1),
        ("a", 100, 150, 1),
    ]


def test_the_same_rows_make_the_same_bytes(tmp_path):
    one = rows("a", 50, 100, list(range(100)))
    two = polars.concat([one[:33], one[33:]], rechunk=False)
    records.write_parquet(one, tmp_path / "one")
    records.write_parquet(two, tmp_path / "two")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
