"""Lines of a file, read in blocks: of a line that is too long only its length is known."""

from collections.abc import Iterator
from typing import BinaryIO

BLOCK = 1 << 18
"""Bytes that are read at a time."""


def split_lines(
    stream: BinaryIO, *, max_row_bytes: int, offset: int = 0, end: int | None = None, block: bytes = b""
) -> Iterator[tuple[bytes | None, int]]:
    """Yield lines without their line breaks, each with the position of the byte after it.

    Args:
        stream: The file, at the end of `block`.
        max_row_bytes: Longest line; None takes the place of a longer one.
        offset: Position of the first byte.
        end: Lines that begin at this position or later are not read.
        block: Bytes from `offset` on that were read already.
    """
    left: list[bytes] = []
    size, too_long = 0, False
    limit = float("inf") if end is None else end
    while offset < limit and (block := block or stream.read(BLOCK)):
        *lines, rest = block.split(b"\n")
        if lines and size:
            left.append(lines[0])
            size += len(lines[0])
            offset += size + 1
            yield None if too_long or size > max_row_bytes else b"".join(left), offset
            del lines[0]
            left, size, too_long = [], 0, False
        for line in lines:
            if offset >= limit:
                return
            offset += len(line) + 1
            yield line if len(line) <= max_row_bytes else None, offset
        block = b""
        if rest:
            size += len(rest)
            left.append(rest)
            if size > max_row_bytes:
                left, too_long = [], True
    if size and offset < limit:
        yield None if too_long else b"".join(left), offset + size
