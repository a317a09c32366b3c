"""Tests of table values that Python cannot represent: one bad row each, by index and as a stream."""

from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from partita.data.run_data import open_stream
from partita.data.sources.sources import open_rows
from partita_schema.errors import DataError
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
    table = pyarrow.table({"text": list("vwxyz"), "when": column})
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
