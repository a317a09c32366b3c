"""Tests of columns of short floats: they have the same text from every kind of source."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from partita.data.formats.arrow_rows import rows_of_batch
from partita.data.formats.base import FileOptions
from partita.data.formats.tables import PARQUET
from partita.data.sources.in_memory import open_in_memory
from partita_schema.cells import plain_text

VALUES = [3.8, 0.1, None, 1e10]
TEXTS = ["3.8", "0.1", None, "10000000000"]


def table(kind: Any) -> pa.Table:
    lists = pa.array([[one] for one in VALUES], pa.list_(kind))
    structs = pa.array([{"x": one, "y": "a"} for one in VALUES], pa.struct([("x", kind), ("y", pa.string())]))
    return pa.table({"x": pa.array(VALUES, kind), "all": lists, "one": structs})


def texts(rows: list[Any]) -> list[str | None]:
    return [None if row["x"] is None else plain_text(row["x"]) for row in rows]


SOURCES: dict[str, Callable[[pa.Table], Any]] = {
    "arrow": lambda rows: rows,
    "datasets": lambda rows: datasets.Dataset(rows),
    "pandas": lambda rows: rows.to_pandas(),
    "nullable": lambda rows: rows.select(["x"]).to_pandas(types_mapper={pa.float32(): pd.Float32Dtype()}.get),
}


@pytest.mark.parametrize("source", SOURCES)
def test_a_number_of_32_bits_has_the_text_that_it_was_written_with(source: str) -> None:
    rows = open_in_memory(SOURCES[source](table(pa.float32())), name="dataset")
    read = rows.get(range(4))
    assert texts(read) == TEXTS
    if source in ("arrow", "datasets"):
        assert read[0]["all"] == [3.8]
        assert read[0]["one"] == {"x": 3.8, "y": "a"}
        assert read[2]["one"]["x"] is None


def test_files_and_streams_have_the_same_numbers(tmp_path: Path) -> None:
    pq.write_table(table(pa.float32()), tmp_path / "rows.parquet")
    rows = PARQUET.open([str(tmp_path / "rows.parquet")], ["rows.parquet"], max_row_bytes=1000, options=FileOptions())
    assert texts(rows.get(range(4))) == TEXTS
    assert texts(list(rows_of_batch(table(pa.float32())))) == TEXTS
    unreadable = table(pa.float32()).append_column("when", pa.array([2**62] * 4, pa.timestamp("s")))
    assert all(not isinstance(row, dict) for row in rows_of_batch(unreadable))


def test_arrays_of_16_and_32_bits_and_of_dates_have_their_text() -> None:
    for kind in (np.float16, np.float32):
        rows = open_in_memory({"x": np.array([3.8, 0.1], kind)}, name="dataset")
        assert texts(rows.get(range(2))) == ["3.8", "0.1"]
    days = np.array(["2020-01-01", "NaT"], dtype="datetime64[ns]")
    read = open_in_memory({"x": days}, name="dataset").get(range(2))
    assert [plain_text(read[0]["x"]), read[1]["x"]] == ["2020-01-01T00:00:00", None]
