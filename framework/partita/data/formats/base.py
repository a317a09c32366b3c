"""What every file format uses: records, slices of files, and the record that describes a format.

A malformed row does not affect others: reading continues at the next line. A problem with the whole file (another
encoding, no header, a malformed JSON array) is a DataError.
"""

import codecs
import gzip
import json
import lzma
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal, NamedTuple, Protocol

from partita.data.formats.encodings import utf8_stream
from partita.data.rows import Rows
from partita_schema.common.text import first_repeated
from partita_schema.errors import DataError, shortened

MAX_RAW = 500
"""Maximum number of characters stored of a bad row."""
MAX_ROW_BYTES = 64_000_000
"""Default of `data.max_row_bytes`: maximum bytes of a line, or of a row that spans several lines."""
MAX_VALUES = 1_000_000
"""Maximum number of cells or JSON values in a row: each takes about a hundred bytes of memory."""
BLOCK = 1 << 18
"""Bytes that are read at a time."""
SKIP = 1 << 20
"""Bytes that are skipped at a time in a file that cannot seek."""
BOM = b"\xef\xbb\xbf"

Quoting = Literal["minimal", "none"]
Position = int | list[Any]
"""Start of a row in its shard, in the source's own terms: a byte, a row, a row group and a row. Checkpoints keep it."""


class SourceRecord(NamedTuple):
    """A row of a text file, or the reason why it is bad."""

    number: int
    """Line in the file where the row starts, from 1."""
    row: bytes = b""
    """The row as a JSON object in UTF-8."""
    columns: tuple[str, ...] = ()
    """Column names of the row."""
    reason: str = ""
    """Why the row is bad; empty for a good one."""
    raw: str = ""
    """The content of a bad row."""


class StreamRow(NamedTuple):
    """A row of a shard, or the reason why it is bad. Can be pickled for other processes."""

    shard: int
    """Index of the shard."""
    number: int
    """Identifies the row in its shard: the line or row number from 1; in a part of a file, the row's first byte."""
    row: bytes | dict[str, Any]
    """The row, as a JSON object in UTF-8 or as a mapping."""
    reason: str = ""
    """Why the row cannot be read; empty for a good one."""
    raw: str = ""
    """The content of a bad row."""
    is_repeated: bool = False
    """Whether an earlier pass over its source in the same epoch has given it, as in a mix."""


@dataclass(frozen=True)
class FileSizes:
    """Sizes that decide how files are split, and how much is read at a time."""

    small_bytes: int = 1 << 20
    """Smaller files are read by every shard, not split: that is cheap, and lines keep their numbers."""
    fine_bytes: int = 16 << 20
    """Minimum size of a slice of a larger file, if shard groups are balanced without smaller ones."""
    block_bytes: int = BLOCK
    """Bytes of lines that are read at a time."""


DEFAULT_SIZES = FileSizes()


@dataclass(frozen=True)
class FileOptions:
    """How files are written; None if it is detected from their content, or has no effect on their format."""

    encoding: str | None = None
    """Encoding of text, by its name in Python."""
    delimiter: str | None = None
    """Character between cells."""
    quoting: Quoting | None = None
    """Whether quotes enclose cells."""
    header: tuple[str, ...] | None = None
    """Names of the columns of a table without a header line."""
    sheet: str | None = None
    """Name of a sheet. Default: the first."""

    @property
    def is_utf8(self) -> bool:
        """Whether bytes need no conversion, as far as the options say."""
        return self.encoding is None or codecs.lookup(self.encoding).name in ("utf-8", "utf-8-sig", "ascii")


DEFAULT_OPTIONS = FileOptions()


@dataclass(frozen=True)
class FileSlice:
    """A file or a part of it."""

    path: str
    """Path or URL of the file."""
    label: str
    """Name of the file in keys, with the first byte of a byte range."""
    kind: str
    """Name of the format."""
    start: int | None = None
    """First byte, or first row of Parquet, of a range; None for a whole file."""
    end: int | None = None
    """The byte, or row, after the range."""
    every: int = 1
    """Keep every n-th row of the range, from the row `first` on."""
    first: int = 0
    max_row_bytes: int = MAX_ROW_BYTES
    """Maximum size of a line in bytes; a longer one is a bad row."""
    file_sizes: FileSizes = DEFAULT_SIZES
    options: FileOptions = DEFAULT_OPTIONS
    """How the file is written."""


Reader = Callable[[BinaryIO, str, int], Iterator[SourceRecord]]
"""Reads a text file from its start: takes its bytes, its name and the maximum size of a row in bytes."""
SliceReader = Callable[[FileSlice, int, Position | None], Iterator[tuple[StreamRow, Position]]]
"""Reads a slice from a position on (None: its start), as rows of the shard with this index, each with the position
after it. The same slice from the same position yields the same rows."""


class RowsOpener(Protocol):
    """Opens the rows of files by index."""

    def __call__(self, paths: Sequence[str], names: Sequence[str], *, max_row_bytes: int, options: FileOptions) -> Rows:
        """Return the rows of files.

        Args:
            paths: Paths or URLs.
            names: Name of each file in keys.
            max_row_bytes: Maximum size of a row of a text file in bytes.
            options: How the files are written.

        Raises:
            DataError: If a file cannot be read, or no row is good.
        """


@dataclass(frozen=True)
class FileFormat:
    """How the files of a format are read; `partita.data.formats.FORMATS` lists all of them."""

    name: str
    """The value of `data.source.type`."""
    extensions: tuple[str, ...]
    """File extensions."""
    open: RowsOpener
    """Reads files by index."""
    read_slice: SliceReader
    """Reads files in order, for streams."""
    splits_at_lines: bool = False
    """Whether `read_slice` reads any range of bytes of an uncompressed file: the rows whose lines start in it."""
    row_ranges: Callable[[str, str, int], list[tuple[int, int]]] | None = None
    """row_ranges(path, label, number): ranges of rows of similar length, if `read_slice` reads such ranges."""
    stdin: bool = False
    """Whether the format can be read from standard input."""
    hub_builder: str = ""
    """Builder of `datasets` whose files `read_slice` reads, so that streams of Hub datasets resume at once."""


@contextmanager
def opened(path: str, label: str, *, options: FileOptions = DEFAULT_OPTIONS) -> Iterator[BinaryIO]:
    """Open a file and yield its decompressed bytes, in UTF-8 if `options` name another encoding.

    Raises:
        DataError: If opening or reading fails.
    """
    import fsspec  # type: ignore[import-untyped] # it ships no types

    try:
        file = fsspec.open(path, "rb", compression="infer")
    except ValueError as error:  # a compression whose library is not installed
        raise DataError(f"{label} cannot be read: {error}") from error
    try:
        with file as stream:
            yield stream if options.is_utf8 else utf8_stream(stream, label, encoding=str(options.encoding))
    except (OSError, EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise DataError(f"{label} cannot be read: {error}") from error
    except Exception as error:
        if type(error).__module__.partition(".")[0] in FOREIGN:
            raise DataError(f"{label} cannot be read: {error}") from error
        raise


FOREIGN = frozenset(
    ("zstandard", "zstd", "fsspec", "aiohttp", "requests", "httpx", "huggingface_hub", "botocore", "s3fs", "gcsfs")
)
"""Libraries used by fsspec whose exceptions are not OSError."""


def seek(stream: BinaryIO, offset: int) -> None:
    """Move a newly opened stream to a byte, by reading if it cannot seek."""
    if not offset:
        return
    try:
        if stream.seekable():
            stream.seek(offset)
            return
    except (OSError, ValueError):  # some streams claim to be seekable and are not
        pass
    left = offset
    while left and (data := stream.read(min(left, SKIP))):
        left -= len(data)


def read_from_start(
    read: Reader, file_slice: FileSlice, shard: int, start: Position | None
) -> Iterator[tuple[StreamRow, Position]]:
    """Yield the rows of a slice; a position is the number of rows so far, which are read again on resume.

    With `functools.partial(read_from_start, read)`, a reader of whole files is the `read_slice` of its format.

    Args:
        read: Reads the file.
        file_slice: The file slice.
        shard: Index of the shard.
        start: Position to start at.
    """
    passed = start if isinstance(start, int) else 0
    with opened(file_slice.path, file_slice.label, options=file_slice.options) as stream:
        for index, record in enumerate(read(stream, file_slice.label, file_slice.max_row_bytes)):
            if index >= passed and index % file_slice.every == file_slice.first:
                yield stream_row(record, shard), index + 1


def stream_row(record: SourceRecord, shard: int) -> StreamRow:
    """Return a record as a row of a shard."""
    return StreamRow(shard, record.number, record.row, record.reason, record.raw)


def too_long(max_row_bytes: int) -> str:
    """Return the reason for a line above the limit."""
    return f"the line is longer than {max_row_bytes:,} bytes; write a larger data.max_row_bytes if it is meant"


write_json = json.JSONEncoder(ensure_ascii=False).encode
"""Like json.dumps, which creates an encoder for each row."""


def bad(number: int, reason: str, raw: str) -> SourceRecord:
    """Return the record of a bad row."""
    return SourceRecord(number, reason=reason, raw=raw[:MAX_RAW].encode("utf-8", "replace").decode())


def dump(row: dict[str, Any]) -> bytes:
    """Return a row as JSON in UTF-8."""
    return write_json(row).encode("utf-8") + b"\n"


WRITE_HEADER = "write a line with the names of the columns before it"
NAME_COLUMNS = {
    **dict.fromkeys(("csv", "tsv"), f"{WRITE_HEADER}, or name them in header: [...] at the source"),
    "xlsx": WRITE_HEADER,
}
"""Advice if the first line of a table is a row, by format."""


def column_names(cells: Sequence[str], name: str) -> tuple[str, ...]:
    """Return the names of the columns of a table from its header; an empty cell is named by its number.

    Raises:
        DataError: Two names are equal.
    """
    names = tuple(cell.strip() or f"column {number}" for number, cell in enumerate(cells, start=1))
    twice = first_repeated(names)
    if twice is not None:
        raise DataError(f"{name}: the header names {shortened(twice)!r} twice; rename one")
    return names


WRITE_ENCODING = "write its encoding at the source, such as encoding: cp1252, or save the file as UTF-8"


def not_utf8(error: UnicodeDecodeError) -> str:
    """Return the reason for bytes that are not UTF-8, and what to do."""
    return f"not UTF-8: byte 0x{error.object[error.start]:02x} at position {error.start + 1}; {WRITE_ENCODING}"
