"""Split files into lines, from any byte. Of a line that is too long, its length is kept, and what a format asks for."""

import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import BinaryIO, NamedTuple

from partita.data.formats.base import BLOCK, BOM, FileSlice, Position, StreamRow, opened, seek, too_long
from partita.data.formats.signatures import refuse_binary, refuse_utf16

SHORT_LINE = 8
"""Mean line length in bytes below which a block is searched for runs of blank lines: no rows are that short."""
NOT_BLANK = re.compile(rb"\S[^\n]*")


class Line(NamedTuple):
    """A line, or several consecutive blank lines."""

    text: bytes | None
    """Text without the line break; None for a line above the limit."""
    end: int
    """Position of the byte after it."""
    num_lines: int
    """Number of lines; 1 for every line that is not blank."""
    rest: bytes = b""
    """What is kept of a line above the limit."""


Shorten = Callable[[bytes], bytes]
"""shorten(start): what is kept of the start of a line above the limit, a few bytes. It is called again with these and
the next part of the line: `shorten(shorten(start) + part)` must equal `shorten(start + part)`."""


def nothing(start: bytes) -> bytes:
    """Keep nothing of a line above the limit."""
    return b""


def split_lines(
    stream: BinaryIO,
    *,
    max_row_bytes: int,
    offset: int = 0,
    end: int | None = None,
    block: bytes = b"",
    block_bytes: int = BLOCK,
    shorten: Shorten = nothing,
) -> Iterator[Line]:
    """Yield lines without their line breaks. Consecutive blank lines may be yielded as one.

    Args:
        stream: The file, at the end of `block`.
        max_row_bytes: Maximum size of a line in bytes; the text of a longer one is None.
        offset: Position of the first byte.
        end: Lines that start at this position or later are not read.
        block: Bytes from `offset` on that were read already.
        block_bytes: Bytes that are read at a time.
        shorten: Returns what is kept of a line above the limit.
    """
    left: list[bytes] = []
    size = 0
    limit = float("inf") if end is None else end
    while offset < limit and (block := block or stream.read(block_bytes)):
        begin, end = 0, block.rfind(b"\n") + 1
        if end and size:
            begin = block.index(b"\n") + 1
            left.append(block[: begin - 1])
            size += begin - 1
            offset += size + 1
            yield joined(left, offset, is_long=size > max_row_bytes, shorten=shorten)
            left, size = [], 0
        find_lines = each_line if max_row_bytes < len(block) else lines_and_blank_runs
        for line, count, length in find_lines(block, begin, end):
            if offset >= limit:
                return
            offset += length
            is_long = length > max_row_bytes + 1
            yield Line(None, offset, count, shorten(line)) if is_long else Line(line, offset, count)
        rest, block = block[end:], b""
        if rest:
            size += len(rest)
            left.append(rest)
            if size > max_row_bytes:
                left = [shortened(left, shorten)]
    if size and offset < limit:
        yield joined(left, offset + size, is_long=size > max_row_bytes, shorten=shorten)


def joined(parts: list[bytes], end: int, *, is_long: bool, shorten: Shorten) -> Line:
    """Return a line that was read in parts.

    Args:
        parts: The parts, or what is kept of them.
        end: Position of the byte after the line.
        is_long: Whether the line is above the limit.
        shorten: Returns what is kept of such a line.
    """
    return Line(None, end, 1, shortened(parts, shorten)) if is_long else Line(b"".join(parts), end, 1)


def shortened(parts: list[bytes], shorten: Shorten) -> bytes:
    """Return what is kept of the parts of a line, which are shortened one after the other."""
    kept = b""
    for part in parts:
        kept = shorten(kept + part)
    return kept


def numbered_lines(
    stream: BinaryIO, name: str, *, max_row_bytes: int, shorten: Shorten = nothing
) -> Iterator[tuple[int, bytes | None, bytes]]:
    """Yield the number and text of each line of a text file, without its byte order mark, and what is kept of a longer
    one; see `split_lines`.

    Args:
        stream: The file.
        name: Its name in messages.
        max_row_bytes: Maximum size of a line in bytes; the text of a longer one is None.
        shorten: Returns what is kept of a line above the limit.

    Raises:
        DataError: The file is UTF-16.
    """
    number = 0
    for line, _, count, rest in split_lines(stream, max_row_bytes=max_row_bytes, shorten=shorten):
        number += count
        if number == 1 and line is not None:
            refuse_binary(line, name)
            refuse_utf16(line, name)
            line = line.removeprefix(BOM)
        yield number, line, rest


def each_line(block: bytes, begin: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield the complete lines between two positions, each with its number of lines and of bytes."""
    for line in block[begin:end].split(b"\n")[:-1]:
        yield line, 1, len(line) + 1


def lines_and_blank_runs(block: bytes, begin: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield the same; if lines are very short, merge consecutive blank lines."""
    if block.count(b"\n", begin, end) * SHORT_LINE < end - begin:
        yield from each_line(block, begin, end)
        return
    for match in NOT_BLANK.finditer(block, begin, end):
        start = block.rfind(b"\n", begin, match.start()) + 1 or begin
        if start > begin:
            yield b"", block.count(b"\n", begin, start), start - begin
        begin = match.end() + 1
        yield block[start : begin - 1], 1, begin - start
    if begin < end:
        yield b"", block.count(b"\n", begin, end), end - begin


ToRow = Callable[[int, int, bytes], StreamRow | None]
"""to_row(shard, number, line): the row of a line with its line break; None for a line without a row."""


def read_line_slice(
    to_row: ToRow, file_slice: FileSlice, shard: int, start: Position | None
) -> Iterator[tuple[StreamRow, Position]]:
    """Yield the rows of a slice of a file with one row per line.

    A position is the byte after the row and, unless the slice is a byte range, the number of lines and rows so far.

    Args:
        to_row: Returns the row of a line.
        file_slice: The file slice.
        shard: Index of the shard.
        start: Position to start at.
    """
    by_byte = file_slice.start is not None
    first, every, limit = file_slice.first, file_slice.every, file_slice.max_row_bytes
    block_bytes = file_slice.file_sizes.block_bytes
    offset, number, index = numbers_at(file_slice, start)
    with opened(file_slice.path, file_slice.label, options=file_slice.options) as stream:
        first_block = b""
        if by_byte and start is None:
            offset, first_block = first_line(stream, offset, block_bytes=block_bytes)
        else:
            seek(stream, offset)
        lines = split_lines(
            stream, max_row_bytes=limit, offset=offset, end=file_slice.end, block=first_block, block_bytes=block_bytes
        )
        for line, ended, count, _ in lines:
            row_start, offset = offset, ended
            number += count
            if row_start == 0:
                refuse_binary(line or b"", file_slice.label)
                refuse_utf16(line or b"", file_slice.label)
                line = line and line.removeprefix(BOM)
            if line is not None and not line.strip():
                continue
            index += 1
            if every > 1 and (index - 1) % every != first:
                continue
            position = row_start if by_byte else number
            after: Position = ended if by_byte else [ended, number] if every == 1 else [ended, number, index]
            if line is None:
                row: StreamRow | None = StreamRow(shard, position, b"", too_long(limit))
            else:
                row = to_row(shard, position, line)
            if row is not None:
                yield row, after


def numbers_at(file_slice: FileSlice, start: Position | None) -> tuple[int, int, int]:
    """Return the byte and the numbers of lines and rows before a position."""
    if start is None:
        return file_slice.start or 0, 0, 0
    if isinstance(start, int):
        return start, 0, 0
    return start[0], start[1], start[2] if len(start) > 2 else 0


def first_line(stream: BinaryIO, offset: int, *, block_bytes: int) -> tuple[int, bytes]:
    """Return the first line start at or after `offset`, and what was read after it.

    It never seeks backwards, since remote files often cannot.
    """
    if offset == 0:
        return 0, b""
    seek(stream, offset - 1)
    read_to = offset - 1
    while block := stream.read(block_bytes):
        line_end = block.find(b"\n")
        if line_end >= 0:
            return read_to + line_end + 1, block[line_end + 1 :]
        read_to += len(block)
    return read_to, b""


def line_ranges(size: int, number: int) -> list[tuple[int, int]]:
    """Return byte ranges of similar size; a row belongs to the range in which it starts."""
    marks = [size * index // number for index in range(number + 1)]
    return list(pairwise(marks))
