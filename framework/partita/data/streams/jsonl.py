"""Read files with one row per line from any byte, so that a file can be split anywhere.

Nothing is parsed here.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import BinaryIO

from partita.data.contract import Position
from partita.data.sources.lines import opened, split_lines
from partita.data.sources.records import MAX_RAW, not_utf8, refuse_utf16, too_long
from partita.data.streams.base import FileSlice, StreamRow, at_offset

BOM = b"\xef\xbb\xbf"


def read_lines(piece: FileSlice, shard: int, start: Position | None) -> Iterator[tuple[StreamRow, Position]]:
    """Yield the rows of a slice: JSON objects as bytes, lines of text as `{"text": ...}`.

    A position is the byte after the row and, unless the slice is a byte range, the number of lines and rows so far.
    """
    by_byte, as_text = piece.start is not None, piece.kind == "txt"
    part, parts, limit = piece.part, piece.parts, piece.max_row_bytes
    block_bytes = piece.file_sizes.block_bytes
    offset, number, index = numbers_at(piece, start)
    with opened(piece.path, piece.label) as stream:
        first_block = b""
        if by_byte and start is None:
            offset, first_block = first_line(stream, offset, block_bytes=block_bytes)
        else:
            at_offset(stream, offset)
        lines = split_lines(
            stream, max_row_bytes=limit, offset=offset, end=piece.end, block=first_block, block_bytes=block_bytes
        )
        for line, ended, count in lines:
            row_start, offset = offset, ended
            number += count
            if row_start == 0:
                refuse_utf16(line or b"", piece.label)
                line = line and line.removeprefix(BOM)
            text = line if line is None else line.rstrip(b"\r\n") if as_text else line.strip()
            if text is not None and not text.strip():
                continue
            index += 1
            if parts > 1 and (index - 1) % parts != part:
                continue
            position = row_start if by_byte else number
            after: Position = ended if by_byte else [ended, number] if parts == 1 else [ended, number, index]
            if text is None:
                row: StreamRow | None = StreamRow(shard, position, b"", too_long(limit))
            else:
                row = line_row(shard, position, text, as_text)
            if row is not None:
                yield row, after


def numbers_at(piece: FileSlice, start: Position | None) -> tuple[int, int, int]:
    """Return the byte and the numbers of lines and rows before a position."""
    if start is None:
        return piece.start or 0, 0, 0
    if isinstance(start, int):
        return start, 0, 0
    return start[0], start[1], start[2] if len(start) > 2 else 0


def line_row(shard: int, number: int, text: bytes, as_text: bool) -> StreamRow | None:
    """Return the row of a line; None for a text of white space only.

    Args:
        shard: Index of the shard.
        number: Number of the row in its shard.
        text: The line, without its line break.
        as_text: Whether the row is the text itself, and not a JSON object.
    """
    if as_text or not text.isascii():
        try:
            decoded = text.decode("utf-8")
        except UnicodeDecodeError as error:
            return StreamRow(shard, number, b"", not_utf8(error), text.decode("utf-8", "replace")[:MAX_RAW])
        if as_text:
            return StreamRow(shard, number, {"text": decoded}) if decoded.strip() else None
    return StreamRow(shard, number, text)


def first_line(stream: BinaryIO, offset: int, *, block_bytes: int) -> tuple[int, bytes]:
    """Return the first line start at or after `offset`, and what was read after it.

    It never seeks backwards, since remote files often cannot.
    """
    if offset == 0:
        return 0, b""
    at_offset(stream, offset - 1)
    read_to = offset - 1
    while block := stream.read(block_bytes):
        line_end = block.find(b"\n")
        if line_end >= 0:
            return read_to + line_end + 1, block[line_end + 1 :]
        read_to += len(block)
    return read_to, b""


def line_pieces(size: int, pieces: int) -> list[tuple[int, int]]:
    """Return byte ranges of similar size; a row belongs to the range in which it starts."""
    marks = [size * part // pieces for part in range(pieces + 1)]
    return list(pairwise(marks))
