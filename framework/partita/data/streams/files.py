"""Files as a stream: how they are cut into shards, and which reader reads them.

All lanes are to read about as many bytes. Where files as they are cannot be dealt to lanes so evenly, the largest are
split into one part for each lane: one row a line, uncompressed, by bytes; Parquet by rows. What cannot be cut, or is
small, is dealt: shard i of k reads the whole file and keeps every k-th row.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from partita.data.reading.records import MAX_ROW_BYTES
from partita.data.reading.sources import COMPRESSIONS, missing, short_names
from partita.data.rows import digest
from partita.data.streams.base import Position, StreamRow
from partita.data.streams.cells import read_cells
from partita.data.streams.file_slices import DEFAULT_SIZES, FileSizes, FileSlice
from partita.data.streams.lines import line_pieces, read_lines
from partita.data.streams.sharding import unevenness
from partita.data.streams.tables import read_arrow, read_parquet, row_pieces
from partita.data.streams.whole import read_whole
from partita_schema.errors import DataError

logger = logging.getLogger(__name__)

Read = Callable[[FileSlice, int, Position | None], Iterator[tuple[StreamRow, Position]]]
READ: dict[str, Read] = {
    "jsonl": read_lines,
    "txt": read_lines,
    "csv": read_cells,
    "tsv": read_cells,
    "parquet": read_parquet,
    "arrow": read_arrow,
}
"""Readers by format; every other one is read from its beginning."""
FINER = 4
"""Parts for each one that evenness asks for, where they stay that large: a lane mixes the rows of several."""
EVEN = 1.05
"""Lanes are even where the longest has no more than so many times the mean."""
TOLD = 1.25
"""Where it has more than so many times the mean, a warning says so."""
READ_AGAIN = 1.0
"""Files that cannot be cut are dealt, where there are enough others, as long as that reads no more than so many times
all bytes in addition."""
KNOWN = 1 << 20
"""Local files of at most so many bytes are part of their fingerprint as a whole."""
ENDS = 4096
"""Bytes at either end of a larger one that are part of its fingerprint."""


class FileStream:
    """Rows of files, in shards."""

    def __init__(
        self,
        kind: str,
        paths: Sequence[str],
        *,
        name: str,
        least_shards: int,
        max_row_bytes: int = MAX_ROW_BYTES,
        file_sizes: FileSizes = DEFAULT_SIZES,
    ) -> None:
        """Raises DataError where there is nothing to read."""
        self.name = name
        labels = short_names(paths)
        sizes, marks = zip(*(known(path, label) for path, label in zip(paths, labels, strict=True)), strict=True)
        if not any(size is None or size for size in sizes):
            raise DataError(f"{', '.join(labels[:3])}{' ...' if len(labels) > 3 else ''} has no rows")
        self.fingerprint = digest(kind, *(part for told in zip(labels, marks, strict=True) for part in told))
        wholes = [
            FileSlice(path, label, kind, max_row_bytes=max_row_bytes, file_sizes=file_sizes)
            for path, label in zip(paths, labels, strict=True)
        ]
        found = cut(wholes, sizes, least_shards)
        self._pieces = [piece for piece, _ in found]
        self.shards = [piece.label for piece in self._pieces]
        """Label of each shard."""
        self.sizes = [size for _, size in found]
        """Bytes of each shard; a file whose size nobody tells counts as the mean of the others."""
        tell_uneven(name, self.sizes, least_shards)

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
            if size is not None and size <= KNOWN:
                return size, digest(stream.read())
            first = stream.read(ENDS)
            stream.seek(max(0, (size or 0) - ENDS))
            return size, digest(str(size), first, stream.read(ENDS))
    except Exception as error:  # every file system raises its own
        raise DataError(f"{label} cannot be opened: {error}{missing(path, error)}") from error


def cut(wholes: Sequence[FileSlice], sizes: Sequence[int | None], lanes: int) -> list[tuple[FileSlice, float]]:
    """Pieces of files and their bytes, at least as many as lanes, which can be dealt to them evenly.

    As few files as possible are split, the largest first; which ones, files and lanes alone decide.
    """
    known_sizes = [size for size in sizes if size]
    usual = max(1, sum(known_sizes) // max(1, len(known_sizes)))
    weights = [usual if size is None else size for size in sizes]
    split = files_to_split(wholes, weights, lanes)
    found: list[tuple[FileSlice, float]] = []
    for number, (whole, size, weight) in enumerate(zip(wholes, sizes, weights, strict=True)):
        parts = lanes if number in split else 1
        if size and size >= whole.file_sizes.small_bytes and cuttable(whole):
            pieces = byte_pieces(whole, size, parts)
        elif whole.kind == "parquet" and parts > 1:
            pieces = row_range_pieces(whole, parts)
        else:
            pieces = dealt(whole, parts)
        found += [(piece, weight / len(pieces)) for piece in pieces]
    return found


def files_to_split(wholes: Sequence[FileSlice], weights: Sequence[float], lanes: int) -> set[int]:
    """Numbers of the files that must be split for even lanes, or for lanes that are as even as can be."""
    if lanes == 1:
        return set()
    largest = sorted((number for number, weight in enumerate(weights) if weight), key=lambda number: -weights[number])
    left, able = READ_AGAIN * sum(weights), []
    for number in largest:
        again = weights[number] * (lanes - 1)
        if len(wholes) < lanes or splits_cheaply(wholes[number], weights[number]):
            able.append(number)
        elif again <= left:
            able.append(number)
            left -= again
    return fewest(able, weights, lanes)


def fewest(able: Sequence[int], weights: Sequence[float], lanes: int) -> set[int]:
    """The fewest of some files, from the first on, whose splitting makes lanes even, or as even as can be."""
    best, least = set[int](), float("inf")
    for count in dict.fromkeys(min(count, len(able)) for count in counts_to_try(lanes, len(able))):
        split = set(able[:count])
        rest = [weight for number, weight in enumerate(weights) if number not in split]
        each = sum(weights[number] for number in split) / lanes
        longest = each + unevenness(rest, lanes) * sum(rest) / lanes
        uneven = longest * lanes / sum(weights)
        if uneven < least - 1e-9 and len(rest) + count * lanes >= lanes:
            best, least = split, uneven
        if least <= EVEN:
            break
    return best


def counts_to_try(lanes: int, most: int) -> Iterator[int]:
    """Every number up to that of lanes, and then each twice the last."""
    yield from range(lanes + 1)
    count = 2 * lanes
    while count < 2 * most:
        yield count
        count *= 2


def tell_uneven(name: str, sizes: Sequence[float], lanes: int) -> None:
    """Warn where a lane has far more to read than the others."""
    uneven = unevenness(sizes, lanes)
    if uneven > TOLD:
        logger.warning(
            "%s: the longest of %d lanes has %.1f times the bytes of the mean, so steps at the end of an epoch hold "
            "fewer rows; write more files of like size, or uncompressed JSON lines or Parquet, which can be cut",
            *(name, lanes, uneven),
        )


def cuttable(whole: FileSlice) -> bool:
    """Whether rows can be found from any byte on."""
    return whole.kind in ("jsonl", "txt") and not whole.path.lower().endswith(COMPRESSIONS)


def splits_cheaply(whole: FileSlice, size: float) -> bool:
    """Whether the parts of a file can be read without reading all of it for each, or it is small."""
    return cuttable(whole) or whole.kind == "parquet" or size < whole.file_sizes.small_bytes


def byte_pieces(whole: FileSlice, size: int, parts: int) -> list[FileSlice]:
    """A file in parts by bytes, as many as asked for or a multiple of that."""
    finer = max(1, min(FINER, size // (whole.file_sizes.fine_bytes * parts)))
    ranges = line_pieces(size, parts * finer)
    if len(ranges) == 1:
        return [whole]
    return [replace(whole, label=f"{whole.label}@{start}", start=start, end=end) for start, end in ranges]


def row_range_pieces(whole: FileSlice, parts: int) -> list[FileSlice]:
    """A Parquet file in parts by rows."""
    return [replace(whole, start=start, end=end) for start, end in row_pieces(whole.path, whole.label, parts)]


def dealt(piece: FileSlice, parts: int) -> list[FileSlice]:
    """Pieces that each keep every so many-th row."""
    return [replace(piece, part=part, parts=parts) for part in range(parts)]
