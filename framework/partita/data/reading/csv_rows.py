"""Rows of CSV text, split in time linear in the size of the file. Empty lines are passed over.

A quoted cell may hold line breaks, so a row whose quote is still open at the end of its line continues in the next
line. Where such a row turns out to be broken, only its first line counts as broken and reading continues at the second
one. That line may open a quote as well, and so may all others: what was learned about the lines after it is therefore
remembered instead of scanned again. A quote that is open at the start of any line of a broken row is open at the last
line that was looked at, and fails there for the same reason.
"""

import csv
import re
import sys
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

from partita.data.reading.lines import BLOCK
from partita.data.reading.records import MAX_RAW, MAX_VALUES, too_long

BOM = b"\xef\xbb\xbf"
LINE_BREAKS = re.compile(rb"[\r\n]*")
QUOTED = re.compile(r'"[^"]*"')
NEVER_CLOSED = "a quote opens here that is never closed"
STILL_OPEN = "a quote is still open at the end of the text"


class CsvRow(NamedTuple):
    """A row, or the line of a broken one."""

    number: int
    """Line where the row starts, from 1."""
    cells: list[str]
    """The text of the line for a broken row."""
    reason: str
    """Why the row is broken; empty for a good one."""
    end: int
    """Position of the byte after the row."""
    next_number: int
    """Line after the row."""


class CsvRows:
    """Rows of a stream, from one that begins at any byte."""

    def __init__(
        self,
        stream: BinaryIO,
        *,
        delimiter: str,
        max_row_bytes: int,
        offset: int = 0,
        number: int = 1,
        block_bytes: int = BLOCK,
    ) -> None:
        """Read on from a row.

        Args:
            stream: The file, at byte `offset`.
            delimiter: What stands between cells.
            max_row_bytes: Longest row; a longer line is a broken row, and a quote that opens a longer row counts as
                never closed.
            offset: Byte at which the first row begins.
            number: Line at which it begins.
            block_bytes: Bytes that are read at a time.
        """
        self._buffer = LineBuffer(stream, offset=offset, block_bytes=block_bytes)
        self._parser = CellParser(delimiter)
        self._max_row_bytes = max_row_bytes
        self._start = offset
        self._number = number
        self._open_until = -1
        """A quote that is open at the start of a line from here back to the current row is open here, too."""
        self._failure = ""
        """Why such a quote cannot be closed; empty where the lines from there on were not read yet."""

    def __iter__(self) -> Iterator[CsvRow]:
        if self._start == 0 and self._buffer.starts_with(BOM):
            self._start = len(BOM)
        while (row := self._next_row()) is not None:
            self._start, self._number = row.end, row.next_number
            yield row

    def _next_row(self) -> CsvRow | None:
        start, number = self._pass_empty_lines()
        end = self._buffer.line_end(start, limit=self._max_row_bytes)
        if end is None:
            beginning = self._buffer.text(start, start + MAX_RAW)
            return CsvRow(number, [beginning], too_long(self._max_row_bytes), self._buffer.skip_line(start), number + 1)
        if end == start:
            return None
        line = self._buffer.text(start, end)
        cells, reason = self._parser.parse(line)
        if reason == STILL_OPEN:
            closed, reason = self._closed_at(start, end)
            if not reason:
                cells, reason = self._parser.parse(self._buffer.text(start, closed))
                return CsvRow(number, cells, reason, closed, number + self._buffer.count_lines(start, closed))
        if reason:
            cells, reason = [line.rstrip("\r\n")], f"broken CSV: {reason}"
        return CsvRow(number, cells, reason, end, number + 1)

    def _pass_empty_lines(self) -> tuple[int, int]:
        """Return the place and the number of the first line with text."""
        start, number = self._start, self._number
        while True:
            self._buffer.forget(start)
            if (found := self._buffer.breaks_end(start)) == start:
                return start, number
            number += self._buffer.count_lines(start, found)
            start = found

    def _closed_at(self, start: int, place: int) -> tuple[int, str]:
        """Return where the row ends whose quote is open at the line `place`, or the reason why it is broken."""
        failure = ""
        if place <= self._open_until:
            place, failure = self._open_until, self._failure
        while not failure:
            end = self._buffer.line_end(place, limit=self._max_row_bytes)
            if end is None or end == place:
                failure = NEVER_CLOSED
            elif end - start > self._max_row_bytes:
                # A later row may still reach the end of this quote within the limit.
                self._open_until, self._failure = place, ""
                return start, NEVER_CLOSED
            elif not self._buffer.has_quote(place, end):
                place = self._buffer.line_of_quote(end)
            else:
                _, reason = self._parser.parse('"' + self._buffer.text(place, end))
                if not reason:
                    return end, ""
                if reason == STILL_OPEN:
                    place = end
                else:
                    failure = reason
        self._open_until, self._failure = place, failure
        return start, failure


class CellParser:
    """Cells of a text that is a row."""

    def __init__(self, delimiter: str) -> None:
        csv.field_size_limit(sys.maxsize)  # the default of 128 KB refuses documents
        self._delimiter = delimiter
        self._texts: list[str] = []
        # One reader for all texts: making one takes longer than reading a line. It takes its lines from the list, and
        # where it wants another one because a quote is open, IndexError comes through it and leaves it as new.
        self._reader = csv.reader(iter(self._texts.pop, None), delimiter=delimiter, strict=True)

    def parse(self, text: str) -> tuple[list[str], str]:
        """Return the cells, or the reason why there are none: STILL_OPEN where a quote is not closed."""
        if text.count(self._delimiter) >= MAX_VALUES and self._has_too_many_cells(text):
            return [], f"more than {MAX_VALUES:,} cells"
        self._texts.append(text)
        try:
            return next(self._reader), ""
        except IndexError:
            return [], STILL_OPEN
        except csv.Error as error:
            return [], str(error)

    def _has_too_many_cells(self, text: str) -> bool:
        return QUOTED.sub("", text).count(self._delimiter) >= MAX_VALUES


class LineBuffer:
    """The bytes of a stream from the current row on; places are bytes of the whole file."""

    def __init__(self, stream: BinaryIO, *, offset: int, block_bytes: int) -> None:
        self._stream = stream
        self._block_bytes = block_bytes
        self._data = bytearray()
        self._base = offset
        """Place of the first byte in memory."""
        self._last_line = (-1, -1)
        """The line that was found last: the rows before it may all ask for it."""
        self._no_line_feed = (offset, offset)
        """Places between which there is none: a file may have no other line breaks than CR."""

    def starts_with(self, mark: bytes) -> bool:
        """Whether the stream, nothing of which was forgotten, begins with a mark."""
        while len(self._data) < len(mark) and self._fill():
            pass
        return self._data.startswith(mark)

    def forget(self, place: int) -> None:
        """Free the memory of what stands before a place."""
        if place - self._base > self._block_bytes:
            del self._data[: place - self._base]
            self._base = place

    def line_end(self, start: int, *, limit: int) -> int | None:
        """Return the place after a line and its line break (CR, LF or both); None for a line above the limit."""
        if start == self._last_line[0]:
            return self._last_line[1]
        searched = start
        while (found := self._line_break(searched)) is None:
            searched = self._base + len(self._data)
            if searched - start > limit:
                return None
            if not self._fill():
                return searched
        if found - start > limit:
            return None
        self._last_line = start, self._behind_break(found)
        return self._last_line[1]

    def skip_line(self, start: int) -> int:
        """Forget everything up to the end of a line, and return the place after it."""
        while (found := self._line_break(start)) is None:
            self._base = start = self._base + len(self._data)
            self._data.clear()
            if not self._fill():
                return start
        return self._behind_break(found)

    def text(self, start: int, end: int) -> str:
        """The text between two places; bytes that are not UTF-8 become surrogates."""
        return self._data[start - self._base : end - self._base].decode("utf-8", "surrogateescape")

    def has_quote(self, start: int, end: int) -> bool:
        return self._data.find(b'"', start - self._base, end - self._base) >= 0

    def line_of_quote(self, start: int) -> int:
        """Return where the first line with a quote begins, or the last line if none was read so far."""
        begin = start - self._base
        found = self._data.find(b'"', begin)
        until = len(self._data) if found < 0 else found
        last = max(self._data.rfind(b"\n", begin, until), self._data.rfind(b"\r", begin, until))
        return start if last < 0 else self._base + last + 1

    def count_lines(self, start: int, end: int) -> int:
        """Line breaks between two places."""
        data = self._data[start - self._base : end - self._base]
        return data.count(b"\n") + data.count(b"\r") - data.count(b"\r\n")

    def breaks_end(self, start: int) -> int:
        """Return the place after the line breaks that stand at a place, as far as the stream was read."""
        at = start - self._base
        if at == len(self._data):
            self._fill()
        if bytes(self._data[at : at + 1]) not in (b"\r", b"\n"):  # nearly always, so it is asked first
            return start
        found = LINE_BREAKS.match(self._data, at)
        end = start if found is None else self._base + found.end()
        if end - self._base == len(self._data) and self._data.endswith(b"\r"):
            self._fill()  # a line feed that follows belongs to the same line break
            return end + self._data.startswith(b"\n", end - self._base)
        return end

    def _line_break(self, start: int) -> int | None:
        """The first CR or LF from a place on; None where there is none in what was read so far."""
        since, until = self._no_line_feed
        if not since <= start <= until:
            since = until = start
        found = self._data.find(b"\n", until - self._base)
        line_feed = self._base + (len(self._data) if found < 0 else found)
        self._no_line_feed = since, line_feed
        # Each on its own: a search for one byte is ten times as fast as for either of two.
        carriage_return = self._data.find(b"\r", start - self._base, line_feed - self._base)
        if carriage_return >= 0:
            return self._base + carriage_return
        return None if found < 0 else line_feed

    def _behind_break(self, place: int) -> int:
        at = place - self._base
        if self._data[at : at + 1] == b"\n":
            return place + 1
        if at + 1 == len(self._data):
            self._fill()
        return place + (2 if self._data[at + 1 : at + 2] == b"\n" else 1)

    def _fill(self) -> bool:
        """Read one more block; False at the end of the stream."""
        block = self._stream.read(self._block_bytes)
        self._data += block
        return bool(block)
