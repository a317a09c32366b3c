"""File formats: a module for each, and the table that lists them.

To add a format, write a module with a `FileFormat` and add it to `FORMATS`, and its name to the literal of
`FileSource.type` in `partita_schema/sections/sources.py`.
"""

from pathlib import Path

from partita.data.formats.base import FileFormat
from partita.data.formats.csv import CSV, TSV
from partita.data.formats.json import JSON, JSONL
from partita.data.formats.parlai import PARLAI
from partita.data.formats.tables import ARROW, PARQUET
from partita.data.formats.txt import TXT
from partita.data.formats.xlsx import XLSX

FORMATS: dict[str, FileFormat] = {
    file_format.name: file_format for file_format in (CSV, TSV, JSON, JSONL, PARQUET, ARROW, TXT, PARLAI, XLSX)
}
"""All formats by name."""
EXTENSIONS = {extension: file_format.name for file_format in FORMATS.values() for extension in file_format.extensions}
"""Name of the format by file extension."""
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
"""Compression extensions that may follow it, for text formats."""


def format_of(path: str) -> str | None:
    """Return the name of the format by file extension, ignoring a compression extension."""
    name = path.lower()
    for compression in COMPRESSIONS:
        name = name.removesuffix(compression)
    return EXTENSIONS.get(Path(name).suffix)


def is_compressed(path: str) -> bool:
    """Return whether a file extension is that of a compression."""
    return path.lower().endswith(COMPRESSIONS)
