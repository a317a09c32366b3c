"""Tests of table values that Python cannot represent: one bad row each, by index and as a stream."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from partita.data.column_checks import check_columns
from partita.data.run_data import open_stream
from partita.data.sources.sources import open_rows
from partita_schema.errors import DataError
from partita_schema.rows import check_rows, row_schema
from partita_schema.sections.sources import FileSource

FAR = [0, 1, 10**14, 3, 4]
COLUMNS = {
    "timestamp": lambda: pyarrow.array(FAR, pyarrow.timestamp("s")),
    "zone": lambda: pyarrow.array(FAR, pyarrow.timestamp("s", tz="Europe/Berlin")),
    "date": lambda: pyarrow.array([0, 1, 10**8, 3, 4], pyarrow.int32()).cast(pyarrow.date32()),
    "duration": lambda: pyarrow.array([0, 1, 2**62, 3, 4], pyarrow.duration("s")),
    "nested": lambda: pyarrow.array(
        [[], None, [{"t": 10**14}], [{"t": 1}], []], pyarrow.list_(pyarrow.struct([("t", pyarrow.timestamp("s"))]))
    ),
}


def write(path: Path, column: Any) -> None:
    write_all(path, text=list("vwxyz"), when=column)


def write_all(path: Path, **columns: Any) -> None:
    table = pyarrow.table(columns)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path)
    else:
        with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@pytest.mark.parametrize("name", COLUMNS)
def test_a_value_that_python_cannot_represent_is_one_bad_row(name: str, kind: str, tmp_path: Path) -> None:
    write(tmp_path / f"a.{kind}", COLUMNS[name]())

    rows = open_rows(f"a.{kind}", folder=tmp_path)
    stream = open_stream(FileSource(type=kind, path=f"a.{kind}"), folder=tmp_path, least_shards=1)
    streamed = [row for row, _ in stream.read(0, None)]

    assert [row["text"] for row in rows.get(range(len(rows)))] == ["v", "w", "y", "z"]
    assert list(rows.keys) == [f"a.{kind}:{number}" for number in (1, 2, 4, 5)]
    assert [(bad.key, bad.number, bad.num_before) for bad in rows.bad] == [(f"a.{kind}:3", 3, 2)]
    assert rows.bad[0].reason.startswith("column when: ")
    assert "has no value in Python" in rows.bad[0].reason
    assert "'text': 'x'" in rows.bad[0].raw
    assert [(row.number, bool(row.reason)) for row in streamed] == [(n, n == 3) for n in range(1, 6)]


def test_damaged_offsets_are_bad_rows_and_do_not_end_the_process(tmp_path: Path) -> None:
    text = pyarrow.array(["a", "bb", "c"])
    offsets = pyarrow.py_buffer(text.buffers()[1].to_pybytes()[:4] + (2**30).to_bytes(4, "little") + bytes(8))
    damaged = pyarrow.StringArray.from_buffers(3, offsets, text.buffers()[2])
    table = pyarrow.table({"text": damaged})
    with pyarrow.OSFile(str(tmp_path / "a.arrow"), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)

    stream = open_stream(FileSource(type="arrow", path="a.arrow"), folder=tmp_path, least_shards=1)

    assert any(row.reason for row, _ in stream.read(0, None))


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_two_columns_of_the_same_name_are_refused(kind: str, tmp_path: Path) -> None:
    twice = pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["x", "x"])
    if kind == "parquet":
        pyarrow.parquet.write_table(twice, tmp_path / "a.parquet")
    else:
        with (
            pyarrow.OSFile(str(tmp_path / "a.arrow"), "wb") as sink,
            pyarrow.ipc.new_file(sink, twice.schema) as writer,
        ):
            writer.write_table(twice)

    with pytest.raises(DataError, match=f"^a.{kind} has two columns named 'x'; rename one$"):
        open_rows(f"a.{kind}", folder=tmp_path)
    with pytest.raises(DataError, match=f"^a.{kind} has two columns named 'x'; rename one$"):
        list(open_stream(FileSource(type=kind, path=f"a.{kind}"), folder=tmp_path, least_shards=1).read(0, None))


def test_an_arrow_file_without_rows_adds_none(tmp_path: Path) -> None:
    schema = pyarrow.schema([("text", pyarrow.string())])
    for name, texts in (("a", ["x"]), ("b", [])):
        table = pyarrow.table({"text": texts}, schema=schema)
        with (
            pyarrow.OSFile(str(tmp_path / f"{name}.arrow"), "wb") as sink,
            pyarrow.ipc.new_file(sink, schema) as writer,
        ):
            writer.write_table(table)

    assert list(open_rows("*.arrow", folder=tmp_path).keys) == ["a.arrow:1"]
    with pytest.raises(DataError, match=r"^b.arrow has no rows$"):
        open_rows("b.arrow", folder=tmp_path)


UNKNOWN = {
    "map": lambda: pyarrow.array([[("k", "v")], [], None], pyarrow.map_(pyarrow.string(), pyarrow.string())),
    "map in a struct": lambda: pyarrow.array(
        [{"a": [("k", 1)]}, None, {"a": []}],
        pyarrow.struct([("a", pyarrow.map_(pyarrow.string(), pyarrow.int8()))]),
    ),
    "uuid": lambda: pyarrow.array([bytes(16), None, b"x" * 16], pyarrow.uuid()),
}


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@pytest.mark.parametrize("name", UNKNOWN)
def test_a_column_that_datasets_does_not_know_is_read_as_in_a_stream(name: str, kind: str, tmp_path: Path) -> None:
    write_all(tmp_path / f"a.{kind}", text=list("xyz"), other=UNKNOWN[name]())

    rows = open_rows(f"a.{kind}", folder=tmp_path)
    stream = open_stream(FileSource(type=kind, path=f"a.{kind}"), folder=tmp_path, least_shards=1)

    assert rows.columns == ("text", "other")
    assert [row["text"] for row in rows.get([2, 0, 1])] == ["z", "x", "y"]
    assert rows.get([]) == []
    assert rows.get(range(3)) == [row.row for row, _ in stream.read(0, None)]
    assert rows.fingerprint == open_rows(f"a.{kind}", folder=tmp_path).fingerprint


def test_files_with_and_without_a_column_that_datasets_does_not_know_are_joined(tmp_path: Path) -> None:
    write_all(tmp_path / "a.parquet", text=["x"])
    write_all(tmp_path / "b.parquet", text=[])
    write_all(tmp_path / "c.parquet", other=UNKNOWN["map"](), text=list("xyz"))

    rows = open_rows("*.parquet", folder=tmp_path)

    assert list(rows.keys) == ["a.parquet:1", "c.parquet:1", "c.parquet:2", "c.parquet:3"]
    assert rows.get([0, 1]) == [{"text": "x", "other": None}, {"text": "x", "other": [("k", "v")]}]
    write_all(tmp_path / "d.parquet", text=[1])
    with pytest.raises(DataError, match=r"^the files a\.parquet, b\.parquet, c\.parquet have different columns: "):
        open_rows("*.parquet", folder=tmp_path)


def test_a_value_that_python_cannot_represent_is_one_bad_row_next_to_a_map(tmp_path: Path) -> None:
    when = pyarrow.array([[("k", 1)], [("k", 10**14)], []], pyarrow.map_(pyarrow.string(), pyarrow.timestamp("s")))
    write_all(tmp_path / "a.parquet", text=list("xyz"), when=when)

    rows = open_rows("a.parquet", folder=tmp_path)

    assert [row["text"] for row in rows.get([0, 1])] == ["x", "z"]
    assert [(bad.key, bad.reason.split(":")[0]) for bad in rows.bad] == [("a.parquet:2", "column when")]


def test_a_feature_of_a_map_names_file_and_column(tmp_path: Path, make_config: Callable[..., Any]) -> None:
    write_all(tmp_path / "a.parquet", question=UNKNOWN["map"](), answer=list("xyz"))
    rows = open_rows("a.parquet", folder=tmp_path)
    check_columns(rows, make_config(), supervised=True)

    checked = check_rows(row_schema(make_config(), supervised=True), rows.get([0]))

    assert (rows.key(0), checked.bad[0]) == ("a.parquet:1", ("column question: [('k', 'v')] is not text",))


def test_damaged_metadata_of_datasets_does_not_matter(tmp_path: Path) -> None:
    table = pyarrow.table({"text": ["x"]}).replace_schema_metadata({"huggingface": '{"info": {"features": [1]}}'})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")

    assert open_rows("a.parquet", folder=tmp_path).get([0]) == [{"text": "x"}]
