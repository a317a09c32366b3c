"""The encoding, delimiter and quoting of CSV and TSV files: as configured, or detected from their first rows."""

import codecs
import io
import logging
from collections.abc import Iterator
from functools import cache
from itertools import islice, product
from typing import BinaryIO, NamedTuple

from partita.data.formats.base import MAX_ROW_BYTES, FileOptions, Quoting
from partita.data.formats.csv_rows import CsvRow, CsvRows
from partita.data.formats.encodings import SAMPLE, chained, encoding_of, utf8_stream
from partita.data.formats.signatures import refuse_binary

logger = logging.getLogger(__name__)

DELIMITERS = {",": "','", ";": "';'", "\t": "a tab", "|": "'|'"}
"""Delimiters that are tried, with their names in messages."""
SAMPLE_ROWS = 200
"""Number of rows from which a delimiter is detected."""
MIN_SHARE = 0.9
"""Minimum share of rows with as many cells as the header, of a delimiter that fits."""


class Dialect(NamedTuple):
    """How a table is written."""

    delimiter: str
    quoting: Quoting = "minimal"
    encoding: str = "utf-8"


def opened_dialect(stream: BinaryIO, name: str, *, default: str, options: FileOptions) -> tuple[BinaryIO, Dialect]:
    """Return the stream from its beginning in UTF-8, and its dialect.

    Options that are not set are detected from the first rows, and logged once per file if they differ from the default.

    Args:
        stream: The file; already converted if `options` name its encoding.
        name: Name of the file, for messages.
        default: Delimiter of the format.
        options: What the configuration says.

    Raises:
        DataError: The file is not text.
    """
    sample = b""
    while len(sample) < SAMPLE and (block := stream.read(SAMPLE - len(sample))):
        sample += block
    refuse_binary(sample, name)
    is_cut = len(sample) == SAMPLE
    whole = chained(sample, stream)
    encoding = options.encoding or encoding_of(sample)
    if options.encoding is None and encoding != "utf-8":
        whole = utf8_stream(whole, name, encoding=encoding)
        text = codecs.getincrementaldecoder(encoding)("replace").decode(sample)
        sample = text.encode("utf-8", "replace")
    dialect = found(sample, default=default, options=options, is_cut=is_cut)._replace(encoding=encoding)
    note(name, dialect, default, options)
    return whole, dialect


def found(sample: bytes, *, default: str, options: FileOptions, is_cut: bool) -> Dialect:
    """Return the dialect of a table in UTF-8.

    The default is used if its rows have two cells or more, as many as the header; else the first dialect for which that
    is so. If that is so of no dialect, and the default reads the header as one cell, the dialect that most rows fit is
    used: the other rows are bad. Else the default.

    Args:
        sample: The beginning of the file.
        default: Delimiter of the format.
        options: What the configuration says.
        is_cut: Whether the file may be longer than the sample.
    """
    delimiters = (
        [options.delimiter] if options.delimiter else [default, *(mark for mark in DELIMITERS if mark != default)]
    )
    quotings: list[Quoting] = [options.quoting] if options.quoting else ["minimal", "none"]
    dialects = [Dialect(delimiter, quoting) for quoting, delimiter in product(quotings, delimiters)]
    shares: dict[Dialect, float | None] = {}
    for dialect in dialects:
        share = shares[dialect] = fitting_share(sample, dialect, is_cut=is_cut)
        if share is not None and share >= MIN_SHARE:
            return dialect
    best = max(dialects, key=lambda dialect: shares[dialect] or 0.0)
    return best if shares[dialects[0]] is None and shares[best] else dialects[0]


def fitting_share(sample: bytes, dialect: Dialect, *, is_cut: bool) -> float | None:
    """Return the share of rows with as many cells as the header, or None if that has fewer than two."""
    rows = sample_rows(sample, dialect, is_cut=is_cut)
    header = next(rows, None)
    if header is None or header.reason or len(header.cells) < 2:
        return None
    first = list(islice(rows, SAMPLE_ROWS))
    good = sum(not row.reason and len(row.cells) == len(header.cells) for row in first)
    return good / len(first) if first else 1.0


def sample_rows(sample: bytes, dialect: Dialect, *, is_cut: bool) -> Iterator[CsvRow]:
    """Yield the rows of a sample, without the last one if it may be cut off."""
    rows = CsvRows(
        io.BytesIO(sample), delimiter=dialect.delimiter, quoting=dialect.quoting, max_row_bytes=MAX_ROW_BYTES
    )
    for row in rows:
        if is_cut and row.end >= len(sample):
            return
        yield row


@cache
def note(name: str, dialect: Dialect, default: str, options: FileOptions) -> None:
    """Log the detected options that differ from the default, once per file.

    Args:
        name: Name of the file.
        dialect: Its dialect.
        default: Delimiter of its format.
        options: What the configuration says.
    """
    if text := differences(dialect, default, options):
        logger.info("%s: found %s; write it at the source if that is wrong", name, text)


def differences(dialect: Dialect, default: str, options: FileOptions) -> str:
    """Return the detected options that differ from the default; empty if none does.

    Args:
        dialect: The dialect of a file.
        default: Delimiter of its format.
        options: What the configuration says.
    """
    parts = []
    if options.delimiter is None and dialect.delimiter != default:
        parts.append(f"delimiter {DELIMITERS[dialect.delimiter]}")
    if options.encoding is None and dialect.encoding != "utf-8":
        parts.append(f"encoding {dialect.encoding}")
    if options.quoting is None and dialect.quoting != "minimal":
        parts.append("quoting none")
    return ", ".join(parts)
