"""Open files, decompressed, and split them into lines; only the length of a line that is too long is kept."""

import gzip
import lzma
import re
import zlib
from codecs import BOM_UTF8
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO, NamedTuple

from partita.data.sources.records import refuse_utf16
from partita_schema.errors import DataError

BLOCK = 1 << 18
"""Bytes that are read at a time."""
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


def split_lines(
    stream: BinaryIO,
    *,
    max_row_bytes: int,
    offset: int = 0,
    end: int | None = None,
    block: bytes = b"",
    block_bytes: int = BLOCK,
) -> Iterator[Line]:
    """Yield lines without their line breaks. Consecutive blank lines may be yielded as one.

    Args:
        stream: The file, at the end of `block`.
        max_row_bytes: Maximum size of a line in bytes; the text of a longer one is None.
        offset: Position of the first byte.
        end: Lines that start at this position or later are not read.
        block: Bytes from `offset` on that were read already.
        block_bytes: Bytes that are read at a time.
    """
    left: list[bytes] = []
    size, too_long = 0, False
    limit = float("inf") if end is None else end
    while offset < limit and (block := block or stream.read(block_bytes)):
        begin, end = 0, block.rfind(b"\n") + 1
        if end and size:
            begin = block.index(b"\n") + 1
            left.append(block[: begin - 1])
            size += begin - 1
            offset += size + 1
            yield Line(None if too_long or size > max_row_bytes else b"".join(left), offset, 1)
            left, size, too_long = [], 0, False
        find_lines = each_line if max_row_bytes < len(block) else lines_and_blank_runs
        for line, count, length in find_lines(block, begin, end):
            if offset >= limit:
                return
            offset += length
            yield Line(line if length <= max_row_bytes + 1 else None, offset, count)
        rest, block = block[end:], b""
        if rest:
            size += len(rest)
            left.append(rest)
            if size > max_row_bytes:
                left, too_long = [], True
    if size and offset < limit:
        yield Line(None if too_long else b"".join(left), offset + size, 1)


def numbered_lines(stream: BinaryIO, name: str, *, max_row_bytes: int) -> Iterator[tuple[int, bytes | None]]:
    """Yield the number and text of each line of a text file, without its byte order mark; see `split_lines`.

    Raises DataError if the file is UTF-16.
    """
    number = 0
    for line, _, count in split_lines(stream, max_row_bytes=max_row_bytes):
        number += count
        if number == 1 and line is not None:
            refuse_utf16(line, name)
            line = line.removeprefix(BOM_UTF8)
        yield number, line


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


FOREIGN = frozenset(
    ("zstandard", "zstd", "fsspec", "aiohttp", "requests", "httpx", "huggingface_hub", "botocore", "s3fs", "gcsfs")
)
"""Libraries used by fsspec whose exceptions are not OSError."""


@contextmanager
def opened(path: str, label: str) -> Iterator[BinaryIO]:
    """Open a file and yield its decompressed bytes. Raise DataError if opening or reading fails."""
    import fsspec  # type: ignore[import-untyped] # it ships no types

    try:
        file = fsspec.open(path, "rb", compression="infer")
    except ValueError as error:  # a compression whose library is not installed
        raise DataError(f"{label} cannot be read: {error}") from error
    try:
        with file as stream:
            yield stream
    except (OSError, EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise DataError(f"{label} cannot be read: {error}") from error
    except Exception as error:
        if type(error).__module__.partition(".")[0] in FOREIGN:
            raise DataError(f"{label} cannot be read: {error}") from error
        raise
