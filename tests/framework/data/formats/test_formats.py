"""The table of formats: every other list of formats agrees with it, and every use of a format is served by it."""

from pathlib import Path
from typing import get_args

import pandas as pd
import pytest

from partita.cli.standard_streams import StdinFormatName
from partita.data.formats import EXTENSIONS, FORMATS, format_of
from partita.data.formats.base import FileSlice
from partita_schema.sections.sources import FileSource


def test_the_schema_knows_every_format() -> None:
    assert set(get_args(FileSource.model_fields["type"].annotation)) == set(FORMATS)


def test_standard_input_takes_the_formats_that_say_so() -> None:
    assert set(get_args(StdinFormatName)) == {name for name, file_format in FORMATS.items() if file_format.stdin}


def test_no_two_formats_share_an_extension() -> None:
    assert set(EXTENSIONS.values()) == set(FORMATS)
    assert len(EXTENSIONS) == sum(len(file_format.extensions) for file_format in FORMATS.values())


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("a.csv", "csv"),
        ("A.NDJSON.GZ", "jsonl"),
        ("s3://bucket/a.text.zst", "txt"),
        ("a.feather", None),
        ("csv", None),
        ("a.gz", None),
    ],
)
def test_the_extension_gives_the_format(path: str, name: str | None) -> None:
    assert format_of(path) == name


def test_formats_that_split_by_rows_give_ranges_of_all_rows(tmp_path: Path) -> None:
    pd.DataFrame({"n": range(10)}).to_parquet(tmp_path / "a.parquet")
    splits_by_rows = [file_format for file_format in FORMATS.values() if file_format.row_ranges is not None]
    assert [file_format.name for file_format in splits_by_rows] == ["parquet"]
    for file_format in splits_by_rows:
        assert file_format.row_ranges is not None
        ranges = file_format.row_ranges(str(tmp_path / "a.parquet"), "a.parquet", 3)
        assert ranges == [(0, 3), (3, 6), (6, 10)]
        pieces = [FileSlice(str(tmp_path / "a.parquet"), "a", "parquet", start=start, end=end) for start, end in ranges]
        rows = [row.row for piece in pieces for row, _ in file_format.read_slice(piece, 0, None)]
        assert rows == [{"n": number} for number in range(10)]
