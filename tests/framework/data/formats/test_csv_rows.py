"""Tests of the CSV reader: linear time, and the same rows as a quadratic reference."""

import csv
import gzip
import io
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.data.formats.base import BLOCK, MAX_VALUES
from partita.data.formats.csv_rows import CsvRows
from partita.data.sources.sources import open_rows
from partita_schema.errors import DataError

from ....work import counted_calls
from .text_readers import READERS


def split(data: bytes, *, max_row_bytes: int = 1000, block_bytes: int = BLOCK) -> list[tuple[int, list[str], bool]]:
    """Return number and cells of each row; for a broken row, its line and True."""
    rows = CsvRows(io.BytesIO(data), delimiter=",", max_row_bytes=max_row_bytes, block_bytes=block_bytes)
    return [(row.number, row.cells, bool(row.reason)) for row in rows]


def expected(data: bytes) -> list[tuple[int, list[str], bool]]:
    """Return the same rows in quadratic time: after a broken row, read again from the line after its first one.

    Empty lines are skipped.
    """
    lines = list(io.TextIOWrapper(io.BytesIO(data), "utf-8-sig", "surrogateescape", newline=""))
    result, index = [], 0
    while index < len(lines):
        reader = csv.reader(lines[index:], strict=True)
        try:
            result.append((index + 1, next(reader), False))
            index += reader.line_num
        except csv.Error:
            result.append((index + 1, [lines[index].rstrip("\r\n")], True))
            index += 1
    return [row for row in result if row[1]]


PIECES = st.sampled_from(
    ['"', '"', '""', ",", "\n", "\r\n", "\r", "x", 'x"', '"x"', '"x",', "é", "\ufeff", '"\n"', '",']
)


@given(st.lists(PIECES, max_size=40).map("".join), st.sampled_from([1, 2, 5, 1000]))
def test_rows_equal_those_of_the_quadratic_reference(text: str, block: int) -> None:
    assert split(text.encode(), block_bytes=block) == expected(text.encode())


def calls(data: bytes, *, max_row_bytes: int = 100_000_000) -> int:
    """Count the function calls while the rows of a file are split."""
    return counted_calls(lambda: split(data, max_row_bytes=max_row_bytes))[1]


@pytest.mark.parametrize(
    "line",
    ['x","y"\n"', '"x\n', '"\n', '"x\ny"z\n', 'x","y\n', '"""\n', '"a","b\n"c\n'],
    ids=["shifted", "closed too late", "alone", "in pairs", "open", "escaped", "mixed"],
)
def test_the_work_for_broken_quotes_is_linear(line: str) -> None:
    few, many = (calls(f'a,b\n"{line * count}'.encode()) for count in (300, 600))

    assert many < 2.2 * few


def test_a_quote_left_open_beyond_the_row_limit_is_not_searched_again() -> None:
    few, many = (
        calls(b'"x\n' * count + b"y" * 50 + b"\n" + b"z\n" * count * 10, max_row_bytes=count) for count in (300, 600)
    )

    assert many < 2.2 * few


def test_a_row_with_too_many_cells_is_reported_without_creating_them() -> None:
    many = "," * MAX_VALUES

    assert split(f'a,b\n{many}\n"{many}",7\n'.encode(), max_row_bytes=2 * MAX_VALUES) == [
        (1, ["a", "b"], False),
        (2, [many], True),
        (3, [many, "7"], False),
    ]


@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl", "txt", "parlai", "json"])
def test_a_long_line_in_a_small_compressed_file_does_not_fill_the_memory(kind: str, tmp_path: Path) -> None:
    first = {"jsonl": b'{"a": 1}\n', "parlai": b"text:a\tlabels:b\tepisode_done:True\n", "json": b'[{"a": 1}, "'}
    packed = gzip.compress(first.get(kind, b"a\nb\n") + b"x" * 50_000_000)
    assert len(packed) < 100_000
    tracemalloc.start()
    try:
        with gzip.open(io.BytesIO(packed)) as stream:
            if kind == "json":
                with pytest.raises(DataError, match=r"row 2 of the JSON array is longer than 1,000,000 bytes"):
                    list(READERS[kind](stream, "a", 1_000_000))
            else:
                *good, last = READERS[kind](stream, "a", 1_000_000)
                assert [row.reason for row in good] == [""] * len(good)
                assert "the line is longer than 1,000,000 bytes" in last.reason
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


def test_a_file_that_is_mostly_broken_is_refused_before_its_reasons_fill_the_memory(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"a,b\n" + b"1,2\n" * 10 + b"1\n" * 200_000)

    with pytest.raises(DataError) as error:
        open_rows("a.csv", folder=tmp_path)

    assert str(error.value) == (
        "a.csv: 100,000 of the first 100,010 rows are broken; the last one is in line 100,011: "
        "1 cell, the header has 2; repair the file or leave it out"
    )


@pytest.mark.parametrize(
    ("kind", "first", "blank", "last"),
    [
        ("csv", b"a\n1\n", b"\n", b"2\n"),
        ("csv", b"a\n1\n", b"\r", b"2\n"),
        ("csv", b"a\n1\n", b"\r\n", b"2\n"),
        ("csv", b'a\n"1', b"\n", b'"\n2\n'),
        ("jsonl", b'{"a": "1"}\n', b"\n", b'{"a": "2"}\n'),
        ("jsonl", b'{"a": "1"}\n', b" \r\n", b'{"a": "2"}\n'),
        ("json", b'[{"a": "1"},\n', b"\n", b'{"a": "2"}]'),
        ("json", b'[{"a": "1"}\n', b",", b'{"a": "2"}]'),
        ("txt", b"1\n", b"\n", b"2\n"),
        ("parlai", b"text:1\tepisode_done:True\n", b"\n", b"text:2\tepisode_done:True\n"),
    ],
)
def test_blank_lines_take_almost_no_work(kind: str, first: bytes, blank: bytes, last: bytes) -> None:
    count = 100_000

    result, work = counted_calls(lambda: list(READERS[kind](io.BytesIO(first + blank * count + last), "a", 10_000_000)))

    assert [record.reason for record in result] == ["", ""]
    assert result[1].number == (2 if kind == "json" else count + first.count(b"\n") + last.startswith(b'"') + 1)
    assert work < count / 20
