"""Encodings of text files: streams that are converted to UTF-8, and the encoding of a file from its first bytes."""

import codecs
import io
import re
from typing import Any, BinaryIO, cast

from partita_schema.errors import DataError

BLOCK = 1 << 18
"""Bytes that are converted at a time."""
SAMPLE = 1 << 20
"""Bytes at the beginning of a file from which its encoding is detected."""
MARKS = (
    (b"\xff\xfe\x00\x00", "utf-32"),
    (b"\x00\x00\xfe\xff", "utf-32"),
    (b"\xff\xfe", "utf-16"),
    (b"\xfe\xff", "utf-16"),
)
"""Byte order marks, with the encoding."""
MULTIBYTE = re.compile(rb"[\xc2-\xdf][\x80-\xbf]|[\xe0-\xef][\x80-\xbf]{2}|[\xf0-\xf4][\x80-\xbf]{3}")
"""A character of UTF-8 of several bytes."""
ODD = frozenset((0x81, 0x8D, 0x8F, 0x90, 0x9D, 0xFF))
"""Bytes that cp1252 does not have, or that stand for a character which is rarer than a damaged byte."""


def encoding_of(sample: bytes) -> str:
    """Return the encoding of a table from its first bytes.

    UTF-16 has a byte order mark or is mostly ASCII. Text with bytes that are not UTF-8, and without any character of
    several bytes in UTF-8, is cp1252 (Windows), which contains all printable characters of latin-1. Else the file is
    UTF-8, and its rows with other bytes are bad.
    """
    marked = next((encoding for mark, encoding in MARKS if sample.startswith(mark)), None)
    if marked is not None:
        return marked
    pairs = len(sample) // 2
    for encoding, zeros in (("utf-16-le", sample[1::2].count(0)), ("utf-16-be", sample[::2].count(0))):
        if pairs and zeros > 0.7 * pairs:
            return encoding
    try:
        codecs.getincrementaldecoder("utf-8")().decode(sample)  # not final: the sample may end inside a character
    except UnicodeDecodeError:
        high = {byte for byte in sample if byte >= 0x80}
        if not MULTIBYTE.search(sample) and not high & ODD:
            return "cp1252"
    return "utf-8"


class Utf8Stream(io.RawIOBase):
    """The text of a stream in UTF-8. A byte that the encoding does not have remains, so that its row is bad."""

    def __init__(self, stream: BinaryIO, name: str, *, encoding: str) -> None:
        super().__init__()
        self._stream = stream
        self._name = name
        self._encoding = encoding
        self._decoder = codecs.getincrementaldecoder(encoding)(errors="surrogateescape")
        self._left = b""
        self._at_end = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._left and not self._at_end:
            block = self._stream.read(BLOCK)
            self._at_end = not block
            try:
                self._left = self._decoder.decode(block, final=self._at_end).encode("utf-8", "surrogateescape")
            except UnicodeError as error:
                raise DataError(f"{self._name} is not {self._encoding} ({error}); write another encoding") from error
        part = self._left[: len(buffer)]
        buffer[: len(part)] = part
        self._left = self._left[len(part) :]
        return len(part)


def utf8_stream(stream: BinaryIO, name: str, *, encoding: str) -> BinaryIO:
    """Return the text of a stream in UTF-8.

    Args:
        stream: The stream.
        name: Name of the file, for errors.
        encoding: Name of its encoding in Python.
    """
    return cast(BinaryIO, io.BufferedReader(Utf8Stream(stream, name, encoding=encoding), BLOCK))


def chained(start: bytes, stream: BinaryIO, *, buffer_size: int = BLOCK) -> BinaryIO:
    """Return a stream of `start` followed by the rest of `stream`."""

    class Chained(io.RawIOBase):
        left = start

        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any) -> int:
            data = self.left[: len(buffer)] if self.left else stream.read(len(buffer))
            self.left = self.left[len(data) :]
            buffer[: len(data)] = data
            return len(data)

    return cast(BinaryIO, io.BufferedReader(Chained(), buffer_size))
