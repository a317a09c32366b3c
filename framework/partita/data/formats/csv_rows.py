"""Split CSV text into rows, in time linear in the size of the file. Empty lines are skipped.

A quoted cell may hold line breaks, so a row whose quote is still open at the end of its line continues in the next
line. If such a row turns out to be malformed, only its first line counts as malformed and reading continues at the
second one. That line may open a quote as well, and so may all others: what was learned about the lines after it is
therefore remembered instead of scanned again. A quote that is open at the start of any line of a malformed row is open
at the last line that was scanned, and fails there for the same reason.
"""

import csv
import re
import sys
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

from partita.data.formats.base import BLOCK, BOM, MAX_RAW, MAX_VALUES, Quoting, too_long

LINE_BREAKS = re.compile(rb"[\r\n]*")
QUOTED = re.compile(r'"[^"]*"')
UNCLOSED_QUOTE = "a quote opens here that is never closed"
STILL_OPEN = "a quote is still open at the end of the text"


class CsvRow(NamedTuple):
    """A row, or the line of a malformed one."""

    number: int
    """Line where the row starts, from 1."""
    cells: list[str]
    """Cells of the row; for a malformed row, the text of its line."""
    reason: str
    """Why the row is malformed; empty for a good one."""
    end: int
    """Position of the byte after the row."""
    next_number: int
    """Line after the row."""


class CsvRows:
    """Iterate over the rows of a stream, starting with a row at any byte."""

    def __init__(
        self,
        stream: BinaryIO,
        *,
        delimiter: str,
        max_row_bytes: int,
        quoting: Quoting = "minimal",
        offset: int = 0,
        number: int = 1,
        block_bytes: int = BLOCK,
    ) -> None:
        """Start at a row.

        Args:
            stream: The file, at byte `offset`.
            delimiter: Separator of cells.
            max_row_bytes: Maximum size of a row in bytes. A longer line is a malformed row, and a quote that opens a
                longer row counts as never closed.
            quoting: Whether quotes enclose cells.
            offset: Byte at which the first row starts.
            number: Line number of the first row.
            block_bytes: Bytes that are read at a time.
        """
        self._buffer = LineBuffer(stream, offset=offset, block_bytes=block_bytes)
        self._parser = CellParser(delimiter, quoting=quoting)
        self._max_row_bytes = max_row_bytes
        self._start = offset
        self._number = number
        self._open_until = -1
        """A quote open at the start of any line from the current row to this position is open at this position too."""
        self._failure = ""
        """Why such a quote cannot be closed; empty if the lines from there on were not read yet."""

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
        """Return position and number of the first line with text."""
        start, number = self._start, self._number
        while True:
            self._buffer.forget(start)
            if (end_of_breaks := self._buffer.breaks_end(start)) == start:
                return start, number
            number += self._buffer.count_lines(start, end_of_breaks)
            start = end_of_breaks

    def _closed_at(self, start: int, line_start: int) -> tuple[int, str]:
        """Return the end of the row whose quote is open at `line_start`, or the reason why it is malformed."""
        failure = ""
        if line_start <= self._open_until:
            line_start, failure = self._open_until, self._failure
        while not failure:
            end = self._buffer.line_end(line_start, limit=self._max_row_bytes)
            if end is None or end == line_start:
                failure = UNCLOSED_QUOTE
            elif end - start > self._max_row_bytes:
                # A later row may still reach the end of this quote within the limit.
                self._open_until, self._failure = line_start, ""
                return start, UNCLOSED_QUOTE
            elif not self._buffer.has_quote(line_start, end):
                line_start = self._buffer.line_of_quote(end)
            else:
                _, reason = self._parser.parse('"' + self._buffer.text(line_start, end))
                if not reason:
                    return end, ""
                if reason == STILL_OPEN:
                    line_start = end
                else:
                    failure = reason
        self._open_until, self._failure = line_start, failure
        return start, failure


class CellParser:
    """Split the text of one row into cells."""

    def __init__(self, delimiter: str, *, quoting: Quoting = "minimal") -> None:
        csv.field_size_limit(sys.maxsize)  # the default of 128 KB rejects long documents
        self._delimiter = delimiter
        self._texts: list[str] = []
        # One reader for all texts, since creating one takes longer than reading a line. It takes its lines from the
        # list. If it needs another line because a quote is open, IndexError passes through it and resets it.
        lines = iter(self._texts.pop, None)
        if quoting == "none":
            self._reader = csv.reader(lines, delimiter=delimiter, quoting=csv.QUOTE_NONE, strict=True)
        else:
            self._reader = csv.reader(lines, delimiter=delimiter, strict=True)

    def parse(self, text: str) -> tuple[list[str], str]:
        """Return the cells, or the reason why there are none: STILL_OPEN if a quote is not closed."""
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
    """The bytes of a stream from the current row on; positions are bytes of the whole file."""

    def __init__(self, stream: BinaryIO, *, offset: int, block_bytes: int) -> None:
        self._stream = stream
        self._block_bytes = block_bytes
        self._data = bytearray()
        self._base = offset
        """Position of the first byte in memory."""
        self._last_line = (-1, -1)
        """Start and end of the line found last: every row before it may ask for it."""
        self._no_line_feed = (offset, offset)
        """Range without a line feed: a file may use only CR as line break."""

    def starts_with(self, mark: bytes) -> bool:
        """Return whether the stream starts with a mark; nothing may have been forgotten before."""
        while len(self._data) < len(mark) and self._fill():
            pass
        return self._data.startswith(mark)

    def forget(self, offset: int) -> None:
        """Free the memory of the bytes before a position."""
        if offset - self._base > self._block_bytes:
            del self._data[: offset - self._base]
            self._base = offset

    def line_end(self, start: int, *, limit: int) -> int | None:
        """Return the position after a line and its line break (CR, LF or both); None for a line above the limit."""
        if start == self._last_line[0]:
            return self._last_line[1]
        searched = start
        while (line_break := self._line_break(searched)) is None:
            searched = self._base + len(self._data)
            if searched - start > limit:
                return None
            if not self._fill():
                return searched
        if line_break - start > limit:
            return None
        self._last_line = start, self._after_break(line_break)
        return self._last_line[1]

    def skip_line(self, start: int) -> int:
        """Forget everything up to the end of a line, and return the position after it."""
        while (line_break := self._line_break(start)) is None:
            self._base = start = self._base + len(self._data)
            self._data.clear()
            if not self._fill():
                return start
        return self._after_break(line_break)

    def text(self, start: int, end: int) -> str:
        """Return the text between two positions; bytes that are not UTF-8 become surrogates."""
        return self._data[start - self._base : end - self._base].decode("utf-8", "surrogateescape")

    def has_quote(self, start: int, end: int) -> bool:
        return self._data.find(b'"', start - self._base, end - self._base) >= 0

    def line_of_quote(self, start: int) -> int:
        """Return the start of the first line with a quote, or of the last line if no quote was read so far."""
        begin = start - self._base
        quote = self._data.find(b'"', begin)
        until = len(self._data) if quote < 0 else quote
        last = max(self._data.rfind(b"\n", begin, until), self._data.rfind(b"\r", begin, until))
        return start if last < 0 else self._base + last + 1

    def count_lines(self, start: int, end: int) -> int:
        """Return the number of line breaks between two positions."""
        data = self._data[start - self._base : end - self._base]
        return data.count(b"\n") + data.count(b"\r") - data.count(b"\r\n")

    def breaks_end(self, start: int) -> int:
        """Return the position after the line breaks at `start`, as far as the stream was read."""
        at = start - self._base
        if at == len(self._data):
            self._fill()
        if bytes(self._data[at : at + 1]) not in (b"\r", b"\n"):  # the usual case, so it is checked first
            return start
        match = LINE_BREAKS.match(self._data, at)
        end = start if match is None else self._base + match.end()
        if end - self._base == len(self._data) and self._data.endswith(b"\r"):
            self._fill()  # a line feed that follows belongs to the same line break
            return end + self._data.startswith(b"\n", end - self._base)
        return end

    def _line_break(self, start: int) -> int | None:
        """Return the first CR or LF from a position on; None if there is none in the bytes read so far."""
        since, until = self._no_line_feed
        if not since <= start <= until:
            since = until = start
        line_feed_index = self._data.find(b"\n", until - self._base)
        line_feed = self._base + (len(self._data) if line_feed_index < 0 else line_feed_index)
        self._no_line_feed = since, line_feed
        # Separate searches: a search for one byte is ten times as fast as for either of two.
        carriage_return = self._data.find(b"\r", start - self._base, line_feed - self._base)
        if carriage_return >= 0:
            return self._base + carriage_return
        return None if line_feed_index < 0 else line_feed

    def _after_break(self, offset: int) -> int:
        at = offset - self._base
        if self._data[at : at + 1] == b"\n":
            return offset + 1
        if at + 1 == len(self._data):
            self._fill()
        return offset + (2 if self._data[at + 1 : at + 2] == b"\n" else 1)

    def _fill(self) -> bool:
        """Read one more block; return False at the end of the stream."""
        block = self._stream.read(self._block_bytes)
        self._data += block
        return bool(block)
