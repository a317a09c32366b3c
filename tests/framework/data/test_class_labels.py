"""Tests of class labels of `datasets`: their names are read, from every kind of source."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest

from partita.data.arrow_values import converters
from partita.data.formats.arrow_rows import UnreadableRow, rows_of_batch
from partita.data.formats.base import FileOptions, FileSlice
from partita.data.formats.table_slices import read_parquet
from partita.data.formats.tables import ARROW, PARQUET
from partita.data.sources.in_memory import open_in_memory
from partita.data.streams.hub import DatasetsStream

LABEL = datasets.ClassLabel(names=["no", "yes"])
FEATURES = datasets.Features(
    {
        "text": datasets.Value("string"),
        "label": LABEL,
        "all": datasets.List(LABEL),
        "two": datasets.List(LABEL, length=2),
        "one": {"label": LABEL, "other": datasets.Value("int64")},
        "many": [{"label": LABEL}],
        "lists": datasets.Sequence({"label": LABEL}),
    }
)
INDICES: list[dict[str, Any]] = [
    {
        "text": "a",
        "label": 1,
        "all": [0, 1],
        "two": [1, 1],
        "one": {"label": 0, "other": 1},
        "many": [{"label": 1}],
        "lists": {"label": [1, 0]},
    },
    {
        "text": "b",
        "label": -1,
        "all": [],
        "two": [0, -1],
        "one": {"label": None, "other": -1},
        "many": [],
        "lists": {"label": []},
    },
]
NAMES: list[dict[str, Any]] = [
    {
        "text": "a",
        "label": "yes",
        "all": ["no", "yes"],
        "two": ["yes", "yes"],
        "one": {"label": "no", "other": 1},
        "many": [{"label": "yes"}],
        "lists": {"label": ["yes", "no"]},
    },
    {
        "text": "b",
        "label": None,
        "all": [],
        "two": ["no", None],
        "one": {"label": None, "other": -1},
        "many": [],
        "lists": {"label": []},
    },
]


def table() -> datasets.Dataset:
    return datasets.Dataset.from_list(INDICES, features=FEATURES)


def of_parquet(folder: Path) -> list[Any]:
    table().to_parquet(folder / "rows.parquet")
    rows = PARQUET.open([str(folder / "rows.parquet")], ["rows.parquet"], max_row_bytes=1000, options=FileOptions())
    return rows.get(range(2))


def of_arrow(folder: Path) -> list[Any]:
    table().save_to_disk(folder / "saved")
    file = next((folder / "saved").glob("*.arrow"))
    return ARROW.open([str(file)], ["rows.arrow"], max_row_bytes=1000, options=FileOptions()).get(range(2))


def of_slice(folder: Path) -> list[Any]:
    path = folder / "rows.parquet"
    table().to_parquet(path)
    return [row.row for row, _ in read_parquet(FileSlice(str(path), "rows.parquet", "parquet"), 0, None)]


def of_stream(folder: Path) -> list[Any]:
    stream = DatasetsStream(table().to_iterable_dataset(), name="rows", least_shards=1)
    return [row.row for row, _ in stream.read(0, None)]


def in_memory(rows: Callable[[datasets.Dataset], Any]) -> Callable[[Path], list[Any]]:
    return lambda folder: open_in_memory(rows(table()), name="dataset").get(range(2))


SOURCES: dict[str, Callable[[Path], list[Any]]] = {
    "datasets": in_memory(lambda rows: rows),
    "a stream of datasets": in_memory(lambda rows: rows.to_iterable_dataset()),
    "an Arrow table": in_memory(lambda rows: rows.data.table),
    "a Parquet file": of_parquet,
    "an Arrow file": of_arrow,
    "a slice of a Parquet file": of_slice,
    "a stream": of_stream,
}


@pytest.mark.parametrize("source", SOURCES)
def test_the_names_of_class_labels_are_read(source: str, tmp_path: Path) -> None:
    assert SOURCES[source](tmp_path) == NAMES


def test_a_dataset_whose_labels_became_numbers_keeps_them() -> None:
    numbers = table().select_columns(["label"]).cast_column("label", datasets.Value("int64"))
    assert open_in_memory(numbers, name="dataset").get(range(2)) == [{"label": 1}, {"label": -1}]


def test_an_index_without_a_name_stays() -> None:
    schema = datasets.Features({"label": LABEL}).arrow_schema
    rows = rows_of_batch(pa.table({"label": pa.array([5, -7, 0])}, schema=schema))
    assert rows == [{"label": 5}, {"label": -7}, {"label": "no"}]


def test_a_row_beside_an_unreadable_one_has_names() -> None:
    features = datasets.Features({"label": LABEL, "when": datasets.Value("timestamp[s]")})
    rows = rows_of_batch(pa.table({"label": [1, 0], "when": pa.array([0, 2**62])}).cast(features.arrow_schema))
    assert isinstance(rows[1], UnreadableRow)
    assert isinstance(rows[0], dict)
    assert rows[0]["label"] == "yes"


def test_a_struct_of_lists_of_an_earlier_version_of_datasets_has_names() -> None:
    label = {"names": ["no", "yes"], "_type": "ClassLabel"}
    written = {"info": {"features": {"x": {"feature": {"label": label}, "_type": "Sequence"}}}}
    kind = pa.struct([("label", pa.list_(pa.int64()))])
    schema = pa.schema([("x", kind)], metadata={"huggingface": json.dumps(written)})
    assert rows_of_batch(pa.table({"x": pa.array([{"label": [1, 0]}], kind)}, schema=schema)) == [
        {"x": {"label": ["yes", "no"]}}
    ]


@pytest.mark.parametrize(
    "metadata",
    [b"{", b"[]", b"{}", b'{"info": null}', b'{"info": {"features": []}}', b'{"info": {"features": {"x": 3}}}'],
)
def test_metadata_that_says_nothing_about_columns_changes_nothing(metadata: bytes) -> None:
    assert not converters(pa.schema([("x", pa.int64())], metadata={b"huggingface": metadata}))
