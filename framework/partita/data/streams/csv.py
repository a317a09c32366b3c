"""Read the rows of CSV and TSV files from any row on."""

from collections.abc import Iterator, Sequence

from partita.data.contract import Position
from partita.data.sources.csv_reader import checked_header, csv_record
from partita.data.sources.csv_rows import CsvRow, CsvRows
from partita.data.sources.lines import opened
from partita.data.sources.records import SourceRecord
from partita.data.streams.base import FileSlice, StreamRow, at_offset

DELIMITERS = {"csv": ",", "tsv": "\t"}


def read_cells(piece: FileSlice, shard: int, start: Position | None) -> Iterator[tuple[StreamRow, Position]]:
    """Yield the rows under a header, as the reader of whole files does.

    A position is the byte after the row, the number of lines and, unless the slice is the whole file, the number of
    rows so far. In compressed files, the bytes before a position are decompressed again.
    """
    offset, passed, index = (*start, 0)[:3] if isinstance(start, list) else (0, 0, 0)
    delimiter = DELIMITERS[piece.kind]
    header = read_header(piece, delimiter)
    if header is None:
        return
    names, head = header
    if not offset:
        offset, passed = head
    part, parts, limit = piece.part, piece.parts, piece.max_row_bytes
    with opened(piece.path, piece.label) as stream:
        at_offset(stream, offset)
        rows = CsvRows(
            stream,
            delimiter=delimiter,
            max_row_bytes=limit,
            offset=offset,
            number=passed + 1,
            block_bytes=piece.file_sizes.block_bytes,
        )
        for row in rows:
            index += 1
            if parts > 1 and (index - 1) % parts != part:
                continue
            after = [row.end, row.next_number - 1]
            yield cells_row(row, names, shard=shard, delimiter=delimiter), after if parts == 1 else [*after, index]


def read_header(piece: FileSlice, delimiter: str) -> tuple[Sequence[str], tuple[int, int]] | None:
    """Return the column names, and the bytes and lines before the first row; None for an empty file."""
    with opened(piece.path, piece.label) as stream:
        limit, block_bytes = piece.max_row_bytes, piece.file_sizes.block_bytes
        for row in CsvRows(stream, delimiter=delimiter, max_row_bytes=limit, block_bytes=block_bytes):
            return checked_header(row, piece.label, delimiter), (row.end, row.next_number - 1)
    return None


def cells_row(row: CsvRow, names: Sequence[str], *, shard: int, delimiter: str) -> StreamRow:
    """Return a row of cells as a row of a stream.

    Args:
        row: The cells.
        names: The column names.
        shard: Index of the shard.
        delimiter: Separator of the cells, for errors.
    """
    if not row.reason and len(row.cells) == len(names) and "".join(row.cells).isascii():
        return StreamRow(shard, row.number, dict(zip(names, row.cells, strict=True)))
    return stream_row(csv_record(row, names, delimiter), shard)


def stream_row(record: SourceRecord, shard: int) -> StreamRow:
    return StreamRow(shard, record.number, record.row, record.reason, record.raw)
