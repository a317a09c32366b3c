"""Files that are not text, although their extension says so: they are recognized by their first bytes."""

import re

from partita_schema.errors import DataError, shortened

UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
COMPRESSED = (
    (re.compile(rb"\x1f\x8b\x08"), "gzip", ".gz"),
    (re.compile(rb"BZh[1-9]1AY&SY"), "bzip2", ".bz2"),
    (re.compile(rb"\xfd7zXZ\x00"), "xz", ".xz"),
    (re.compile(rb"\x28\xb5\x2f\xfd"), "Zstandard", ".zst"),
)
"""First bytes of compressed files, with the name of the compression and its extension."""
OTHER = (
    (re.compile(rb"PK\x03\x04"), "a zip archive or an Excel file; unpack it, or rename it to .xlsx"),
    (re.compile(rb"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"), "an old Excel or Word file; save it as .xlsx or .csv"),
    (re.compile(rb"PAR1[^\x20-\x7e\t\r\n]"), "a Parquet file; rename it to .parquet"),
    (re.compile(rb"ARROW1\x00"), "an Arrow file; rename it to .arrow"),
    (re.compile(rb"\x89PNG\r"), "a PNG image"),
    (re.compile(rb"\xff\xd8\xff"), "a JPEG image"),
    (re.compile(rb"%PDF-[12]\."), "a PDF document"),
)
"""First bytes of other files, with what they are and what to do."""
LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def refuse_binary(start: bytes, name: str) -> None:
    """Raise DataError if a file that starts with these bytes is compressed, a table of another format, or an image."""
    refuse_pointer(start, name)
    for pattern, compression, extension in COMPRESSED:
        if pattern.match(start):
            raise DataError(
                f"{name} is compressed with {compression}, but its name does not end in {extension}; rename it"
            )
    for pattern, what in OTHER:
        if pattern.match(start):
            raise DataError(f"{name} is not text: it is {what}")


def refuse_pointer(start: bytes, name: str) -> None:
    """Raise DataError if a file that starts with these bytes stands for one that Git LFS has not downloaded."""
    if start.startswith(LFS_POINTER):
        raise DataError(f"{name} is a pointer of Git LFS, not the file itself; run git lfs pull")


def other_content(start: bytes) -> str:
    """Return what a file that starts with these bytes is, where a Parquet or Arrow file is expected."""
    named = [(pattern, f"it is compressed with {compression}; unpack it") for pattern, compression, _ in COMPRESSED]
    named += [(pattern, f"it is {what}") for pattern, what in OTHER]
    known = next((what for pattern, what in named if pattern.match(start)), None)
    if known is not None:
        return known
    text = " ".join(start.decode("utf-8", "ignore").split())
    if text.isprintable() and text:
        return f"it is text that begins with {shortened(text)!r}; name its format at the source, such as type: csv"
    return "it has another format"


def refuse_utf16(start: bytes, name: str) -> None:
    """Raise DataError if a file that starts with these bytes is UTF-16."""
    if start.startswith(UTF16_MARKS):
        raise DataError(f"{name} is UTF-16; write encoding: utf-16 at its source, or save it as UTF-8")
