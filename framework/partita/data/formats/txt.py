"""Read text files: a row per line, in the column `text`."""

from collections.abc import Iterator
from functools import partial
from typing import BinaryIO

from partita.data.formats.base import (
    MAX_RAW,
    FileFormat,
    SourceRecord,
    StreamRow,
    bad,
    dump,
    not_utf8,
    too_long,
)
from partita.data.formats.lines import numbered_lines, read_line_slice
from partita.data.formats.text_files import open_text


def read_txt(stream: BinaryIO, name: str, max_row_bytes: int) -> Iterator[SourceRecord]:
    """Yield one row per line; skip empty lines."""
    for number, line, _ in numbered_lines(stream, name, max_row_bytes=max_row_bytes):
        if line is None:
            yield bad(number, too_long(max_row_bytes), "")
            continue
        try:
            text = line.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            yield bad(number, not_utf8(error), line.decode("utf-8", "replace"))
            continue
        if text.strip():
            yield SourceRecord(number, dump({"text": text}), ("text",))


def txt_row(shard: int, number: int, line: bytes) -> StreamRow | None:
    """Return the row of a line; None for a line of white space only."""
    text = line.rstrip(b"\r\n")
    try:
        decoded = text.decode("utf-8")
    except UnicodeDecodeError as error:
        return StreamRow(shard, number, b"", not_utf8(error), text.decode("utf-8", "replace")[:MAX_RAW])
    return StreamRow(shard, number, {"text": decoded}) if decoded.strip() else None


TXT = FileFormat(
    "txt",
    (".txt", ".text"),
    open=partial(open_text, read_txt),
    read_slice=partial(read_line_slice, txt_row),
    splits_at_lines=True,
    stdin=True,
)
