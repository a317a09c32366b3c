"""Stream files: how they are split into shards.

All shard groups should read about as many bytes. If whole files cannot be distributed that evenly, the largest ones are
split into a slice per group: by bytes if they have one row per line and are uncompressed, by rows if they are Parquet.
Files that cannot be split, or are small, are read in full by each of k shards; shard i keeps every k-th row. Which
format can be split, and how, is in the table of formats (`partita.data.formats`).
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from partita.data.formats import FORMATS, is_compressed
from partita.data.formats.base import (
    DEFAULT_OPTIONS,
    DEFAULT_SIZES,
    MAX_ROW_BYTES,
    FileOptions,
    FileSizes,
    FileSlice,
    Position,
    StreamRow,
)
from partita.data.formats.lines import line_ranges
from partita.data.rows import digest
from partita.data.sources.sources import missing, short_names
from partita.data.streams.sharding import unevenness
from partita_schema.errors import DataError

logger = logging.getLogger(__name__)

FINER = 4
"""Number of byte ranges per slice, if they stay large enough: a group mixes the rows of several ranges."""
EVEN = 1.05
"""Groups are even if the longest has at most this many times the mean."""
MAX_UNEVENNESS = 1.25
"""A warning is logged if the longest has more than this many times the mean."""
READ_AGAIN = 1.0
"""Bytes that may be read again to distribute files that cannot be split, as a multiple of all bytes.

It applies only if there are at least as many files as groups.
"""
KNOWN = 1 << 20
"""Local files of up to this many bytes are hashed completely."""
ENDS = 4096
"""Number of bytes hashed at either end of a larger file."""


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
        options: FileOptions = DEFAULT_OPTIONS,
    ) -> None:
        """Split `paths` into shards.

        Args:
            kind: Format of the files.
            paths: Paths or URLs.
            name: Name of the stream, for messages.
            least_shards: Minimum number of shards.
            max_row_bytes: Maximum size of a row in bytes.
            file_sizes: Sizes that decide how files are split.
            options: How the files are written.

        Raises:
            DataError: If there is nothing to read.
        """
        self.name = name
        labels = short_names(paths)
        sizes, marks = zip(*(known(path, label) for path, label in zip(paths, labels, strict=True)), strict=True)
        if not any(size is None or size for size in sizes):
            raise DataError(f"{', '.join(labels[:3])}{' ...' if len(labels) > 3 else ''} has no rows")
        written = [] if options == DEFAULT_OPTIONS else [repr(options)]
        self.fingerprint = digest(kind, *written, *(part for pair in zip(labels, marks, strict=True) for part in pair))
        wholes = [
            FileSlice(path, label, kind, max_row_bytes=max_row_bytes, file_sizes=file_sizes, options=options)
            for path, label in zip(paths, labels, strict=True)
        ]
        slices = cut(wholes, sizes, least_shards)
        self._slices = [file_slice for file_slice, _ in slices]
        self.shards = [file_slice.label for file_slice in self._slices]
        """Label of each shard."""
        self.sizes = [size for _, size in slices]
        """Bytes of each shard; a file of unknown size counts as the mean of the others."""
        warn_if_uneven(name, self.sizes, least_shards)

    def read(self, shard: int, start: Position | None) -> Iterator[tuple[StreamRow, Position]]:
        """Yield the rows of a shard from a position on. Raise DataError if the file cannot be read."""
        file_slice = self._slices[shard]
        return FORMATS[file_slice.kind].read_slice(file_slice, shard, start)


def known(path: str, label: str) -> tuple[int | None, str]:
    """Return a file's size, if known, and a mark of its content."""
    import fsspec  # type: ignore[import-untyped] # it ships no types

    try:
        system, inner_path = fsspec.core.url_to_fs(path)
        info: dict[str, Any] = system.info(inner_path)
        size = info.get("size")
        if "://" in path:
            tag = next((info[key] for key in ("ETag", "etag", "md5Hash", "sha256") if key in info), "")
            return size, f"{size} {tag}"
        with system.open(inner_path, "rb") as stream:
            if size is not None and size <= KNOWN:
                return size, digest(stream.read())
            first = stream.read(ENDS)
            stream.seek(max(0, (size or 0) - ENDS))
            return size, digest(str(size), first, stream.read(ENDS))
    except Exception as error:  # every file system raises its own exceptions
        raise DataError(f"{label} cannot be opened: {error}{missing(path, error)}") from error


def cut(wholes: Sequence[FileSlice], sizes: Sequence[int | None], num_groups: int) -> list[tuple[FileSlice, float]]:
    """Split files into slices that can be distributed evenly, at least one per group, each with its bytes.

    As few files as possible are split, the largest first. The result depends only on the files and the number of
    groups.
    """
    known_sizes = [size for size in sizes if size]
    usual = max(1, sum(known_sizes) // max(1, len(known_sizes)))
    weights = [usual if size is None else size for size in sizes]
    split = files_to_split(wholes, weights, num_groups)
    slices: list[tuple[FileSlice, float]] = []
    for number, (whole, size, weight) in enumerate(zip(wholes, sizes, weights, strict=True)):
        least = num_groups if number in split else 1
        if size and size >= whole.file_sizes.small_bytes and cuttable(whole):
            slices_of_file = byte_slices(whole, size, least)
        elif least > 1 and FORMATS[whole.kind].row_ranges is not None:
            slices_of_file = row_slices(whole, least)
        else:
            slices_of_file = interleaved_slices(whole, least)
        slices += [(file_slice, weight / len(slices_of_file)) for file_slice in slices_of_file]
    return slices


def files_to_split(wholes: Sequence[FileSlice], weights: Sequence[float], num_groups: int) -> set[int]:
    """Return the indices of the files to split so that groups are as even as possible."""
    if num_groups == 1:
        return set()
    largest = sorted((number for number, weight in enumerate(weights) if weight), key=lambda number: -weights[number])
    left, able = READ_AGAIN * sum(weights), []
    for number in largest:
        again = weights[number] * (num_groups - 1)
        if len(wholes) < num_groups or splits_cheaply(wholes[number], weights[number]):
            able.append(number)
        elif again <= left:
            able.append(number)
            left -= again
    return fewest(able, weights, num_groups)


def fewest(able: Sequence[int], weights: Sequence[float], num_groups: int) -> set[int]:
    """Return the shortest prefix of the files in `able` that makes groups even, or as even as possible, when split."""
    best, least = set[int](), float("inf")
    for count in dict.fromkeys(min(count, len(able)) for count in counts_to_try(num_groups, len(able))):
        split = set(able[:count])
        sizes = [weight for number, weight in enumerate(weights) if number not in split]
        sizes += [weights[number] / num_groups for number in sorted(split) for _ in range(num_groups)]
        uneven = unevenness(sizes, num_groups)
        if uneven < least - 1e-9 and len(sizes) >= num_groups:
            best, least = split, uneven
        if least <= EVEN:
            break
    return best


def counts_to_try(num_groups: int, most: int) -> Iterator[int]:
    """Yield every number up to `num_groups`, then its doubles."""
    yield from range(num_groups + 1)
    count = 2 * num_groups
    while count < 2 * most:
        yield count
        count *= 2


def warn_if_uneven(name: str, sizes: Sequence[float], num_groups: int) -> None:
    """Log a warning if one group has far more to read than the mean."""
    uneven = unevenness(sizes, num_groups)
    if uneven > MAX_UNEVENNESS:
        logger.warning(
            "%s: the longest of %d shard groups has %.1f times the bytes of the mean, so steps at the end of an epoch "
            "hold fewer rows; write more files of similar size, or uncompressed JSON lines or Parquet, which can be "
            "split",
            *(name, num_groups, uneven),
        )


def cuttable(whole: FileSlice) -> bool:
    """Return whether the next row can be found from any byte."""
    return FORMATS[whole.kind].splits_at_lines and not is_compressed(whole.path) and whole.options.is_utf8


def splits_cheaply(whole: FileSlice, size: float) -> bool:
    """Return whether a file is small, or its slices can be read without reading the whole file for each."""
    return cuttable(whole) or FORMATS[whole.kind].row_ranges is not None or size < whole.file_sizes.small_bytes


def byte_slices(whole: FileSlice, size: int, number: int) -> list[FileSlice]:
    """Return slices of a file by bytes, `number` of them or a multiple."""
    finer = max(1, min(FINER, size // (whole.file_sizes.fine_bytes * number)))
    ranges = line_ranges(size, number * finer)
    if len(ranges) == 1:
        return [whole]
    return [replace(whole, label=f"{whole.label}@{start}", start=start, end=end) for start, end in ranges]


def row_slices(whole: FileSlice, number: int) -> list[FileSlice]:
    """Return slices of a file by rows."""
    row_ranges = FORMATS[whole.kind].row_ranges
    assert row_ranges is not None
    return [replace(whole, start=start, end=end) for start, end in row_ranges(whole.path, whole.label, number)]


def interleaved_slices(whole: FileSlice, number: int) -> list[FileSlice]:
    """Return slices that each keep every n-th row."""
    return [replace(whole, every=number, first=first) for first in range(number)]
