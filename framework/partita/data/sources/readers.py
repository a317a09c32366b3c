"""Readers by text format."""

from collections.abc import Iterator
from typing import BinaryIO

from partita.data.sources.csv_reader import read_csv, read_tsv
from partita.data.sources.json_reader import read_json, read_jsonl
from partita.data.sources.lines import split_lines
from partita.data.sources.parlai_reader import read_parlai
from partita.data.sources.records import (
    MAX_ROW_BYTES,
    Reader,
    SourceRecord,
    bad,
    dump,
    not_utf8,
    refuse_utf16,
    too_long,
)


def read_txt(stream: BinaryIO, name: str, max_row_bytes: int = MAX_ROW_BYTES) -> Iterator[SourceRecord]:
    """Yield one row per line, in the column `text`; skip empty lines."""
    number = 0
    for line, _, count in split_lines(stream, max_row_bytes=max_row_bytes):
        number += count
        if line is None:
            yield bad(number, too_long(max_row_bytes), "")
            continue
        if number == 1:
            refuse_utf16(line, name)
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            yield bad(number, not_utf8(error), line.decode("utf-8", "replace"))
            continue
        if text.strip():
            yield SourceRecord(number, dump({"text": text}), ("text",))


READERS: dict[str, Reader] = {
    "csv": read_csv,
    "tsv": read_tsv,
    "json": read_json,
    "jsonl": read_jsonl,
    "txt": read_txt,
    "parlai": read_parlai,
}
