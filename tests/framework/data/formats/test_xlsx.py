"""Tests of Excel workbooks as rows."""

import datetime
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from partita.data.sources.sources import open_rows
from partita_schema.errors import DataError


@pytest.fixture
def book(tmp_path: Path) -> Path:
    """Return a workbook with a sheet of all kinds of cells, and another one."""
    openpyxl = pytest.importorskip("openpyxl", reason="needs openpyxl: pip install 'partita[excel]'")
    workbook = openpyxl.Workbook()
    first = workbook.active
    first.append([])
    first.append(["text", "number", "day", None, "more"])
    first.append(["a\nb", 7, datetime.date(2026, 5, 1), True])
    first.append([None, 2.5, datetime.datetime(2026, 5, 1, 9, 30), None])
    first.append([])
    first.append(["  ", 3.0, datetime.time(9, 30), "x", 1, "too much"])
    first.append(["c", "007"])
    first["A8"], first["B8"] = "d", "#DIV/0!"
    first["B8"].data_type = "e"
    second = workbook.create_sheet("More rows")
    second.append(["text"])
    second.append(["other"])
    workbook.save(tmp_path / "a.xlsx")
    return tmp_path / "a.xlsx"


def failure(path: Path, **options: Any) -> str:
    with pytest.raises(DataError) as error:
        open_rows({"type": "xlsx", "path": str(path), **options}, folder=path.parent)
    return str(error.value)


def test_cells_keep_their_type_and_dates_become_iso_text(book: Path) -> None:
    rows = open_rows(str(book), folder=book.parent)

    assert rows.columns == ("text", "number", "day", "column 4", "more")
    assert [list(row.values()) for row in rows.get(range(len(rows)))] == [
        ["a\nb", 7, "2026-05-01", True, None],
        [None, 2.5, "2026-05-01T09:30:00", None, None],
        ["c", "007", None, None, None],
    ]
    assert list(rows.keys) == ["a.xlsx:3", "a.xlsx:4", "a.xlsx:7"]
    assert [(bad.number, bad.reason) for bad in rows.bad] == [
        (6, "6 cells, the header has 5"),
        (8, "column number: the cell has the error #DIV/0!"),
    ]


def test_another_sheet_is_read_by_its_name(book: Path) -> None:
    rows = open_rows({"type": "xlsx", "path": str(book), "sheet": "More rows"}, folder=book.parent)

    assert rows.get([0]) == [{"text": "other"}]
    assert failure(book, sheet="More row") == (
        "a.xlsx has no sheet 'More row'; its sheets are Sheet, More rows; did you mean 'More rows'?"
    )


def test_a_file_that_is_no_workbook_is_reported(book: Path) -> None:
    (book.parent / "b.xlsx").write_text("a,b\n1,2\n")
    assert failure(book.parent / "b.xlsx").startswith("b.xlsx cannot be read: it is no xlsx file, or it has a password")
    with zipfile.ZipFile(book.parent / "c.xlsx", "w") as file:
        file.writestr("x", "y")
    assert failure(book.parent / "c.xlsx").startswith("c.xlsx cannot be read: ")
    whole = book.read_bytes()
    (book.parent / "d.xlsx").write_bytes(whole[: len(whole) // 2])
    assert failure(book.parent / "d.xlsx").startswith("d.xlsx cannot be read: ")


def test_without_openpyxl_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.xlsx").write_bytes(b"PK")
    monkeypatch.setitem(sys.modules, "openpyxl", None)

    assert failure(tmp_path / "a.xlsx") == (
        "a.xlsx: Excel files need openpyxl: pip install 'partita[excel]', or save it as csv"
    )
