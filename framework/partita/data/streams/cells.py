"""Rows of CSV and TSV files from any row on."""

import io
from collections.abc import Iterator
from itertools import chain
from typing import BinaryIO

from partita.data.reading.csv_reader import Lines, cell_records, cells_record, checked_header
from partita.data.reading.records import Record, bad
from partita.data.streams.base import Position, StreamRow
from partita.data.streams.pieces import Piece, at_offset, opened

DELIMITERS = {"csv": ",", "tsv": "\t"}


class CountedLines(Lines):
    """Lines that know the byte at which the next row begins."""

    def __init__(self, stream: BinaryIO, *, offset: int, number: int) -> None:
        self._wrapper = io.TextIOWrapper(stream, encoding="utf-8", errors="surrogateescape", newline="")
        first = next(self._wrapper, "") if offset == 0 else ""
        super().__init__(chain([first.removeprefix("\ufeff")] if first else [], self._wrapper))
        self.number = number
        self.offset = offset + (3 if first.startswith("\ufeff") else 0)
        """Byte behind the rows so far."""

    def end_row(self) -> None:
        for line in self.taken:
            self.offset += num_bytes(line)
        super().end_row()

    def give_up_row(self) -> None:
        for line in self.taken[:1]:
            self.offset += num_bytes(line)
        super().give_up_row()

    def detach(self) -> None:
        """Leave the stream open."""
        self._wrapper.detach()


def num_bytes(line: str) -> int:
    return len(line) if line.isascii() else len(line.encode("utf-8", "surrogateescape"))


def read_cells(piece: Piece, shard: int, start: Position | None) -> Iterator[tuple[StreamRow, Position]]:
    """Rows under a header, as the reader of whole files makes them.

    The position is the byte behind the row, the lines and, where the piece is not whole, the rows so far. Of compressed
    files, the bytes before a position are decompressed again.
    """
    offset, passed, index = (*start, 0)[:3] if isinstance(start, list) else (0, 0, 0)
    delimiter = DELIMITERS[piece.kind]
    header = read_header(piece, delimiter)
    if header is None:
        return
    names, head = header
    if not offset:
        offset, passed = head
    part, parts = piece.part, piece.parts
    with opened(piece.path, piece.label) as stream:
        at_offset(stream, offset)
        lines = CountedLines(stream, offset=offset, number=passed + 1)
        try:
            for number, cells, reason in cell_records(lines, delimiter=delimiter):
                if not (cells or reason):
                    continue
                index += 1
                if parts > 1 and (index - 1) % parts != part:
                    continue
                after = [lines.offset, lines.number - 1]
                row = cells_row(cells, reason, names, shard=shard, number=number, delimiter=delimiter)
                yield row, after if parts == 1 else [*after, index]
        finally:
            lines.detach()


def read_header(piece: Piece, delimiter: str) -> tuple[list[str], tuple[int, int]] | None:
    """Names of the columns, and the bytes and lines up to the first row; None for a file without lines."""
    with opened(piece.path, piece.label) as stream:
        lines = CountedLines(stream, offset=0, number=1)
        try:
            for _, cells, reason in cell_records(lines, delimiter=delimiter):
                if cells or reason:
                    return checked_header(cells, reason, piece.label), (lines.offset, lines.number - 1)
        finally:
            lines.detach()
    return None


def cells_row(cells: list[str], reason: str, names: list[str], *, shard: int, number: int, delimiter: str) -> StreamRow:
    if not reason and len(cells) == len(names) and "".join(cells).isascii():
        return StreamRow(shard, number, dict(zip(names, cells, strict=True)))
    record = bad(number, reason, cells[0]) if reason else cells_record(cells, names, number, delimiter)
    return stream_row(record, shard)


def stream_row(record: Record, shard: int) -> StreamRow:
    return StreamRow(shard, record.number, record.row, record.reason, record.raw)
