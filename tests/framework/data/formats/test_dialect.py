"""Tests of the delimiter, quoting and encoding of tables: found from their rows, or configured."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.data.formats import FORMATS, dialect
from partita.data.formats.base import DEFAULT_OPTIONS, FileOptions, FileSlice
from partita.data.formats.dialect import Dialect, found
from partita.data.formats.encodings import encoding_of
from partita.data.sources.sources import open_rows, options_of
from partita_schema.errors import DataError
from partita_schema.sections.sources import FileSource

ROWS = [{"name": f"Zoë {n}", "text": f"one, two; three | {n}"} for n in range(30)]


@pytest.fixture(autouse=True)
def notes_of_new_files() -> Iterator[None]:
    """Log again what is found in files that have a name of earlier ones."""
    dialect.note.cache_clear()
    yield
    dialect.note.cache_clear()


def table(delimiter: str, rows: list[dict[str, str]] = ROWS) -> str:
    lines = [delimiter.join(rows[0]), *(delimiter.join(f'"{cell}"' for cell in row.values()) for row in rows)]
    return "\n".join(lines) + "\n"


def rows_of(path: Path, **options: Any) -> list[dict[str, Any]]:
    source = {"type": path.suffix[1:], "path": str(path), **options} if options else str(path)
    rows = open_rows(source, folder=path.parent)
    assert not rows.bad
    return rows.get(range(len(rows)))


@pytest.mark.parametrize("kind", ["csv", "tsv"])
@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-be", "cp1252", "latin-1"])
def test_delimiter_and_encoding_are_found(kind: str, delimiter: str, encoding: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.{kind}"
    path.write_bytes(table(delimiter).encode(encoding))

    assert rows_of(path) == ROWS


def test_what_is_found_is_logged_once_for_each_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.csv").write_bytes(table(";").encode("cp1252"))
    (tmp_path / "b.csv").write_text('n\tt\n1\t"a\n2\tb"\n3\t"c\n')
    (tmp_path / "c.csv").write_text(table(","))
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            for name in "abc":
                open_rows(f"{name}.csv", folder=tmp_path)

    assert caplog.messages == [
        "a.csv: found delimiter ';', encoding cp1252; write it at the source if that is wrong",
        "b.csv: found delimiter a tab, quoting none; write it at the source if that is wrong",
    ]


def test_options_of_the_source_are_used_and_not_looked_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes('a;b,c\n"x;y",\xe9\n'.encode("latin-1"))
    with caplog.at_level(logging.INFO):
        assert rows_of(path, delimiter=",", encoding="cp1252") == [{"a;b": "x;y", "c": "é"}]
        assert rows_of(path, delimiter=";", quoting="none", encoding="cp1250") == [{"a": '"x', "b,c": 'y",é'}]
        assert rows_of(path, delimiter="^", quoting="none", encoding="latin-1") == [{"a;b,c": '"x;y",é'}]
    assert not caplog.messages


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_a_table_without_a_header_line_has_the_columns_of_its_source(encoding: str, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes("fine;good\nbad;poor\nso;so;so\n".encode(encoding))
    source = FileSource(type="csv", path=str(path), header=["text", "label"])
    rows = open_rows(source, folder=tmp_path)
    wanted = [{"text": "fine", "label": "good"}, {"text": "bad", "label": "poor"}]
    assert rows.get(range(len(rows))) == wanted
    assert [bad.reason for bad in rows.bad] == ["3 cells, the header has 2"]

    file = FileSlice(str(path), "a.csv", "csv", options=options_of(source))
    streamed = list(FORMATS["csv"].read_slice(file, 0, None))
    assert [row.row for row, _ in streamed[:2]] == wanted
    assert [row.number for row, _ in streamed] == [1, 2, 3]
    _, after_the_first = streamed[0]
    assert list(FORMATS["csv"].read_slice(file, 0, after_the_first)) == streamed[1:]


def test_a_byte_that_an_encoding_does_not_have_makes_a_bad_row(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"a,b\n\x81,1\n\xe9,2\n")
    rows = open_rows({"type": "csv", "path": "a.csv", "encoding": "cp1252"}, folder=tmp_path)

    assert rows.get(range(len(rows))) == [{"a": "é", "b": "2"}]
    assert [(bad.number, bad.reason[:9]) for bad in rows.bad] == [(2, "not UTF-8")]
    (tmp_path / "b.csv").write_bytes("a,b\n".encode("utf-16") + b"\x00\xd8\x31\x00")
    with pytest.raises(DataError, match=r"^b.csv is not utf-16 \(.*\); write another encoding$"):
        open_rows({"type": "csv", "path": "b.csv", "encoding": "utf-16"}, folder=tmp_path)


@pytest.mark.parametrize(
    ("sample", "encoding"),
    [
        (b"", "utf-8"),
        (b"plain", "utf-8"),
        ("na\u00efve".encode(), "utf-8"),
        ("na\u00efve".encode()[:-3], "utf-8"),  # cut off inside a character
        ("\u20ac 5, \u201cna\u00efve\u201d".encode("cp1252"), "cp1252"),
        ("na\u00efve".encode() + b"\xe9", "utf-8"),  # a damaged byte
        (b"a\xffb", "utf-8"),
        ("a,b".encode("utf-16-le"), "utf-16-le"),
        ("a,b".encode("utf-16"), "utf-16"),
        ("a,b".encode("utf-32"), "utf-32"),
    ],
)
def test_an_encoding_is_found_from_marks_zeros_and_bytes(sample: bytes, encoding: str) -> None:
    assert encoding_of(sample) == encoding


@pytest.mark.parametrize(
    ("text", "default", "expected"),
    [
        ("a,b\n1,2\n", ",", Dialect(",")),
        ("text\nOh, well; yes|no\n", ",", Dialect(",")),  # one column
        ("a;b\n1,5;2,5\n", ",", Dialect(";")),
        ("a,b;c\n1;2\n", ",", Dialect(";")),  # a header with a comma
        ("a;b\n", ",", Dialect(";")),
        ("a\tb\n1\t2\n", "\t", Dialect("\t")),
        ('a\tb\n1\t"open\n2\tx\n', "\t", Dialect("\t", "none")),
        ('a,b\n1,"x\ny,z"\n2,w\n', ",", Dialect(",")),  # a quoted cell of two lines
        ("", ",", Dialect(",")),
        ("a;b\n1;2\n3;4;5\n", ",", Dialect(";")),  # half of the rows fit
        ("a;b\n1;2;3\n", ",", Dialect(",")),  # no row fits
        ("a,b\n1,2,3\n1;2\n", ",", Dialect(",")),  # the default reads two columns
    ],
)
def test_the_dialect_fits_the_header_and_nine_of_ten_rows(text: str, default: str, expected: Dialect) -> None:
    assert found(text.encode(), default=default, options=DEFAULT_OPTIONS, is_cut=False) == expected


@pytest.mark.parametrize("delimiter", [",", ";"])
def test_rows_with_more_or_fewer_cells_are_bad_with_any_delimiter(delimiter: str, tmp_path: Path) -> None:
    lines = ["message,team", "hi,billing", "yo,late,x", "why", "where,delivery", "how,late,now"]
    (tmp_path / "a.csv").write_text("\n".join(lines).replace(",", delimiter))
    rows = open_rows("a.csv", folder=tmp_path)

    assert [row["team"] for row in rows.get([0, 1])] == ["billing", "delivery"]
    assert [(row.key, row.reason) for row in rows.bad] == [
        ("a.csv:3", "3 cells, the header has 2"),
        ("a.csv:4", "1 cell, the header has 2"),
        ("a.csv:6", "3 cells, the header has 2"),
    ]


def test_a_configured_delimiter_or_quoting_is_not_changed() -> None:
    for options, expected in (
        (FileOptions(delimiter="|"), Dialect("|")),
        (FileOptions(quoting="none"), Dialect(";", "none")),
    ):
        assert found(b"a;b\n1;2\n", default=",", options=options, is_cut=False) == expected


CELL = st.text(alphabet='ab,;|\t"\n é', min_size=1, max_size=6)


@given(st.lists(st.tuples(CELL, CELL), min_size=3, max_size=12), st.sampled_from([",", ";", "\t", "|"]))
def test_quoted_tables_are_read_with_their_own_delimiter(cells: list[tuple[str, str]], delimiter: str) -> None:
    lines = [
        f'"{first.replace(chr(34), chr(34) * 2)}"{delimiter}"{second.replace(chr(34), chr(34) * 2)}"'
        for first, second in cells
    ]
    text = "\n".join([f"one{delimiter}two", *lines]) + "\n"

    assert found(text.encode(), default=",", options=DEFAULT_OPTIONS, is_cut=False) == Dialect(delimiter)
