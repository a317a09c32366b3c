"""Files as a stream: how they are cut into shards, and which reader reads them.

One row a line, uncompressed, is cut by bytes; Parquet by row groups. What cannot be cut, or is small, is dealt: shard i
of k reads the whole file and keeps every k-th row.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from partita.data.reading.sources import COMPRESSIONS, short_names
from partita.data.rows import digest
from partita.data.streams.base import Position, StreamRow
from partita.data.streams.cells import read_cells
from partita.data.streams.lines import line_pieces, read_lines
from partita.data.streams.pieces import Piece
from partita.data.streams.tables import group_pieces, read_arrow, read_parquet
from partita.data.streams.whole import read_whole
from partita_schema.errors import DataError

Read = Callable[[Piece, int, Position | None], Iterator[tuple[StreamRow, Position]]]
READ: dict[str, Read] = {
    "jsonl": read_lines,
    "txt": read_lines,
    "csv": read_cells,
    "tsv": read_cells,
    "parquet": read_parquet,
    "arrow": read_arrow,
}
"""Readers by format; every other one is read from its beginning."""
SMALL = 1 << 20
"""Files of fewer bytes are dealt, not cut: reading them several times costs nothing, and lines keep their numbers."""
FINE = 16 << 20
"""Parts of a file that is larger than its share hold at least so many bytes."""
FINER = 4
"""Shards for each one asked for, where parts stay that large: a lane mixes the rows of several."""
ENDS = 4096
"""Bytes at either end of a local file that are part of its fingerprint."""


class FileStream:
    """Rows of files, in shards."""

    def __init__(self, kind: str, paths: Sequence[str], *, name: str, least_shards: int) -> None:
        """Raises DataError where there is nothing to read."""
        self.name = name
        labels = short_names(paths)
        sizes, marks = zip(*(known(path, label) for path, label in zip(paths, labels, strict=True)), strict=True)
        if not any(size is None or size for size in sizes):
            raise DataError(f"{', '.join(labels[:3])}{' ...' if len(labels) > 3 else ''} has no rows")
        self.fingerprint = digest(kind, *(part for told in zip(labels, marks, strict=True) for part in told))
        wholes = [Piece(path, label, kind) for path, label in zip(paths, labels, strict=True)]
        self._pieces = cut(wholes, sizes, least_shards)
        self.shards = [piece.label for piece in self._pieces]
        """Label of each shard."""

    def read(self, shard: int, start: Position | None) -> Iterator[tuple[StreamRow, Position]]:
        """Rows of a shard from a position on. Raises DataError where the file cannot be read."""
        piece = self._pieces[shard]
        return READ.get(piece.kind, read_whole)(piece, shard, start)


def known(path: str, label: str) -> tuple[int | None, str]:
    """A file's size if it is known, and what is known of its content."""
    import fsspec  # type: ignore[import-untyped] # it ships no types

    try:
        system, place = fsspec.core.url_to_fs(path)
        told: dict[str, Any] = system.info(place)
        size = told.get("size")
        if "://" in path:
            tag = next((told[key] for key in ("ETag", "etag", "md5Hash", "sha256") if key in told), "")
            return size, f"{size} {tag}"
        with system.open(place, "rb") as stream:
            first = stream.read(ENDS)
            stream.seek(max(0, (size or 0) - ENDS))
            return size, digest(str(size), first, stream.read(ENDS))
    except Exception as error:  # every file system raises its own
        raise DataError(f"{label} cannot be opened: {error}") from error


def cut(wholes: Sequence[Piece], sizes: Sequence[int | None], least_shards: int) -> list[Piece]:
    """Pieces of files, at least so many: a file has as many as its share of all bytes, and at least one.

    Where there are enough files, only those much larger than the others are cut.
    """
    known_sizes = [size for size in sizes if size]
    usual = max(1, sum(known_sizes) // max(1, len(known_sizes)))
    weights = [usual if size is None else size for size in sizes]
    share = sum(weights) / least_shards * (2 if len(wholes) >= least_shards else 1)
    found: list[Piece] = []
    for whole, size, weight in zip(wholes, sizes, weights, strict=True):
        wanted = max(1, math.ceil(weight / share - 1e-9))
        if size and size >= SMALL and cuttable(whole):
            found += byte_pieces(whole, size, wanted)
        elif whole.kind == "parquet" and wanted > 1:
            found += row_group_pieces(whole, wanted)
        elif len(wholes) < least_shards or (size is not None and size < SMALL):
            found += dealt(whole, wanted)
        else:
            found.append(whole)
    return found


def cuttable(whole: Piece) -> bool:
    """Whether rows can be found from any byte on."""
    return whole.kind in ("jsonl", "txt") and not whole.path.lower().endswith(COMPRESSIONS)


def byte_pieces(whole: Piece, size: int, wanted: int) -> list[Piece]:
    pieces = max(wanted, min(FINER * wanted, size // FINE))
    if pieces == 1:
        return [whole]
    ranges = line_pieces(size, pieces)
    return [replace(whole, label=f"{whole.label}@{start}", start=start, end=end) for start, end in ranges]


def row_group_pieces(whole: Piece, wanted: int) -> list[Piece]:
    ranges = group_pieces(whole.path, whole.label, FINER * wanted)
    parts = -(-wanted // len(ranges))
    return [piece for start, end in ranges for piece in dealt(replace(whole, start=start, end=end), parts)]


def dealt(piece: Piece, parts: int) -> list[Piece]:
    """Pieces that each keep every so many-th row."""
    return [replace(piece, part=part, parts=parts) for part in range(parts)]
