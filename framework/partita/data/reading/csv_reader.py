"""Rows of CSV and TSV files: every cell stays the text that it is."""

import csv
import io
import sys
from collections import deque
from collections.abc import Iterator
from typing import BinaryIO

from partita.data.reading.records import MAX_ROW_CHARACTERS, UTF16_MARKS, Record, bad, dump
from partita_schema.errors import DataError

NEVER_CLOSED = "a quote opens here that is never closed"


def read_csv(stream: BinaryIO, name: str) -> Iterator[Record]:
    """Rows under a header, separated by commas. Every cell stays text."""
    return read_cells(stream, name, delimiter=",")


def read_tsv(stream: BinaryIO, name: str) -> Iterator[Record]:
    """Rows under a header, separated by tabs. Every cell stays text."""
    return read_cells(stream, name, delimiter="\t")


def read_cells(stream: BinaryIO, name: str, *, delimiter: str) -> Iterator[Record]:
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
    records = cell_records(Lines(text), delimiter=delimiter)
    header: list[str] | None = None
    for number, cells, reason in records:
        if header is None and (cells or reason):
            header = checked_header(cells, reason, name)
        elif reason:
            yield bad(number, reason, cells[0])
        elif header is not None and cells:
            yield cells_record(cells, header, number, delimiter)
    text.detach()


def checked_header(cells: list[str], reason: str, name: str) -> list[str]:
    if reason:
        raise DataError(f"{name}: the header cannot be read: {reason}")
    if any(cell.encode("utf-8", "surrogateescape").startswith(UTF16_MARKS) for cell in cells[:1]):
        raise DataError(f"{name} is UTF-16; save it as UTF-8")
    names = [cell.strip() or f"column {place}" for place, cell in enumerate(cells, start=1)]
    twice = sorted({cell for cell in names if names.count(cell) > 1})
    if twice:
        raise DataError(f"{name}: the header names {twice[0]!r} twice; rename one")
    if not_text := next((cell for cell in names if not is_utf8(cell)), None):
        raise DataError(f"{name}: the header is not UTF-8 ({not_text!r}); save the file as UTF-8")
    return names


def is_utf8(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def cells_record(cells: list[str], header: list[str], number: int, delimiter: str) -> Record:
    if len(cells) != len(header):
        return bad(number, f"{len(cells)} cells, the header has {len(header)}", delimiter.join(cells))
    try:
        return Record(number, dump(dict(zip(header, cells, strict=True))), tuple(header))
    except UnicodeEncodeError:
        return bad(number, "not UTF-8", delimiter.join(cells))


class Lines(Iterator[str]):
    """Lines of a file, counted; those of the current row can be given back."""

    def __init__(self, text: Iterator[str]) -> None:
        self._text = text
        self._again: deque[str] = deque()
        self._size = 0
        self.taken: list[str] = []
        """Lines of the current row."""
        self.number = 1
        """Number of the current row's first line."""

    def __next__(self) -> str:
        if self._size > MAX_ROW_CHARACTERS:
            raise csv.Error(NEVER_CLOSED)
        line = self._again.popleft() if self._again else next(self._text)
        self.taken.append(line)
        self._size += len(line)
        return line

    def end_row(self) -> None:
        """The lines taken so far were a row."""
        self.number += len(self.taken)
        self.taken, self._size = [], 0

    def give_up_row(self) -> None:
        """Only the first line was a row; the others are read again."""
        self._again.extendleft(reversed(self.taken[1:]))
        self.number += 1
        self.taken, self._size = [], 0


def cell_records(lines: Lines, *, delimiter: str) -> Iterator[tuple[int, list[str], str]]:
    """Line, cells and reason of every row. After a broken row, reading goes on at the line after its first."""
    csv.field_size_limit(sys.maxsize)  # the default of 128 KB refuses documents
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    while True:
        number = lines.number
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            reason = NEVER_CLOSED if str(error) == "unexpected end of data" else str(error)
            first = lines.taken[0].rstrip("\r\n") if lines.taken else ""
            lines.give_up_row()
            # A reader that has met the end of its lines stays there.
            reader = csv.reader(lines, delimiter=delimiter, strict=True)
            yield number, [first], f"broken CSV: {reason}"
        else:
            lines.end_row()
            yield number, cells, ""
