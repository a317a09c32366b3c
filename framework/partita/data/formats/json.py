"""Read JSON files and JSON lines; every row keeps its text."""

import io
import json
import re
from collections.abc import Iterator
from functools import partial
from typing import Any, BinaryIO, TextIO

from partita.data.formats.base import (
    BOM,
    MAX_RAW,
    MAX_VALUES,
    FileFormat,
    SourceRecord,
    StreamRow,
    bad,
    not_utf8,
    read_from_start,
    too_long,
)
from partita.data.formats.encodings import chained
from partita.data.formats.lines import numbered_lines, read_line_slice
from partita.data.formats.signatures import refuse_binary, refuse_utf16
from partita.data.formats.text_files import open_text
from partita_schema.cells import RepeatedKeyError, without_repeats
from partita_schema.errors import DataError
from partita_schema.json_values import MAX_DEPTH, NOT_UNICODE, TOO_DEEP, is_too_deep

BLANKS = BOM + b" \t\r\n"
"""Bytes that may precede JSON: a byte order mark, spaces and line breaks."""
READ_SIZE = 1 << 20
"""Bytes of a JSON array that are read at a time."""
PASSED = re.compile(r"[ \t\r\n]*"), re.compile(r"[ \t\r\n,]*")
"""Text in a JSON array before its first value, and before the next ones."""
STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"')
TOO_MANY = f"a row holds more than {MAX_VALUES:,} values"
CUT_OFF = 16
"""Number of characters before the end of a text within which a decoding error may mean truncation."""


DECODER = json.JSONDecoder(object_pairs_hook=without_repeats)


def repeated_key(text: bytes) -> str | None:
    """Return which key occurs twice in an object of a JSON text; None if none does, or it is no JSON."""
    try:
        DECODER.decode(text.decode("utf-8"))
    except RepeatedKeyError as error:
        return str(error)
    except (ValueError, RecursionError):
        return None
    return None


def read_jsonl(stream: BinaryIO, name: str, max_row_bytes: int) -> Iterator[SourceRecord]:
    """Yield one JSON object per line; skip empty lines."""
    for number, line, _ in numbered_lines(stream, name, max_row_bytes=max_row_bytes):
        if line is None:
            yield bad(number, too_long(max_row_bytes), "")
        elif text := line.strip():
            yield json_record(text, number)


def jsonl_row(shard: int, number: int, line: bytes) -> StreamRow:
    """Return the row of a line as bytes, which are not parsed here."""
    text = line.strip()
    if not text.isascii():
        try:
            text.decode("utf-8")
        except UnicodeDecodeError as error:
            return StreamRow(shard, number, b"", not_utf8(error), text.decode("utf-8", "replace")[:MAX_RAW])
    return StreamRow(shard, number, text)


def json_record(text: bytes, number: int) -> SourceRecord:
    """Parse a JSON text as a row."""
    value, reason = json_row(text)
    return record_of(value, reason, text, number)


def record_of(value: Any, reason: str, text: bytes, number: int) -> SourceRecord:
    """Return the record of a JSON value.

    Args:
        value: The value; an object if there is no reason.
        reason: Why the row is bad; empty for a good one.
        text: The JSON text.
        number: Line where it starts.
    """
    if reason:
        return bad(number, reason, text[: 4 * MAX_RAW].decode("utf-8", "replace"))
    return SourceRecord(number, text + b"\n", tuple(value))


def json_row(text: bytes) -> tuple[Any, str]:
    """Return the object in a JSON text, or the reason why there is none."""
    if holds_too_much(text):
        return None, TOO_MANY
    try:
        value = DECODER.decode(text.decode("utf-8"))
    except UnicodeDecodeError as error:
        return None, not_utf8(error)
    except RecursionError:
        return None, TOO_DEEP
    except RepeatedKeyError as error:
        return None, str(error)
    except ValueError as error:
        where = f" at character {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else ""
        return None, f"not JSON: {message_of_error(error).removesuffix(' at')}{where}"
    return value, wrong_object(value, text)


def holds_too_much(text: bytes) -> bool:
    """Return whether a JSON text has too many values: they could take a hundred times its size in memory."""
    if len(text) <= MAX_VALUES or num_marks(text) <= MAX_VALUES:
        return False
    return num_marks(STRING.sub(b"", text)) > MAX_VALUES


def num_marks(text: bytes) -> int:
    return text.count(b",") + text.count(b"[") + text.count(b"{")


def wrong_object(value: Any, text: bytes) -> str:
    """Return why a value cannot be a row; empty if it can."""
    if not isinstance(value, dict):
        kind = {list: "a list", str: "a text", type(None): "null", bool: "a truth value"}.get(type(value), "a number")
        return f"a row is a JSON object, this is {kind}"
    # JSON of N levels has at least N brackets. Values without text were too deep to be written.
    if (not text or text.count(b"{") + text.count(b"[") > MAX_DEPTH) and is_too_deep(value):
        return TOO_DEEP
    if b"\\u" in text and has_lone_surrogate(value):
        return NOT_UNICODE
    return ""


def has_lone_surrogate(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False


def read_json(stream: BinaryIO, name: str, max_row_bytes: int) -> Iterator[SourceRecord]:
    """Yield the rows of a JSON array, an object of columns, an object with one array of rows, or one object per line.

    An array is read incrementally; the other whole-file forms are held in memory.

    Raises:
        DataError: The text is not JSON, or more than `max_row_bytes` long where it is held in memory.
    """
    start, more = b"", b""
    while not more.strip(BLANKS):
        if not (more := stream.read(READ_SIZE)):
            return
        start += more
        if len(start) > max_row_bytes and not more.strip(BLANKS):
            raise DataError(f"{name} starts with more than {max_row_bytes:,} bytes of blanks")
    refuse_binary(start, name)
    refuse_utf16(start, name)
    while is_only_first_line(start) and len(start) <= max_row_bytes and (more := stream.read(READ_SIZE)):
        start += more
    rest = chained(start.removeprefix(BOM), stream, buffer_size=READ_SIZE)
    if start.strip(BLANKS).startswith(b"["):
        yield from read_array(rest, name, max_row_bytes)
    elif is_object(start.lstrip(BLANKS).split(b"\n", 1)[0]) and b"\n" in start.strip():
        yield from read_jsonl(rest, name, max_row_bytes)
    else:
        yield from read_whole(rest, name, max_row_bytes)


def is_only_first_line(start: bytes) -> bool:
    """Return whether nothing follows the first line in the start of a file, and this line begins an object."""
    text = start.strip(BLANKS)
    return text.startswith(b"{") and b"\n" not in text


def is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except RecursionError:
        return line.startswith(b"{")
    except ValueError:
        return False


def read_array(stream: BinaryIO, name: str, max_row_bytes: int) -> Iterator[SourceRecord]:
    """Yield the objects of a JSON array, one at a time; a row's number is its position in the array.

    Raises:
        DataError: The text is not a JSON array, or is cut off.
    """
    text = io.TextIOWrapper(stream, encoding="utf-8")
    array, number = ArrayText(text, name, max_row_bytes=max_row_bytes), 0
    try:
        array.next_character(PASSED[0])
        array.index += 1
        while (character := array.next_character(PASSED[number > 0])) != "]":
            if not character:
                raise DataError(f"{name}: the JSON array is not closed after row {number}; is the file cut off?")
            number += 1
            value, row = array.read_value(number)
            reason = str(value) if isinstance(value, RepeatedKeyError) else wrong_object(value, row)
            yield record_of(value, reason, row, number)
        array.index += 1
        if array.next_character(PASSED[0]):
            raise DataError(f"{name}: the JSON array ends after row {number}, and more follows; write one array")
    except UnicodeDecodeError as error:
        raise DataError(f"{name} is {not_utf8(error)}") from None
    finally:
        text.detach()


class ArrayText:
    """The text of a JSON array, of which a part is in memory."""

    def __init__(self, text: TextIO, name: str, *, max_row_bytes: int) -> None:
        """Read an array from its beginning.

        Args:
            text: The file.
            name: Name of the file, for errors.
            max_row_bytes: Maximum size of a value.
        """
        self.text, self.name, self.max_row_bytes = text, name, max_row_bytes
        self.buffer, self.index = "", 0
        self.line = 1
        """Line where the buffer starts."""

    def next_character(self, passed: re.Pattern[str]) -> str:
        """Move past this text; return the character after it, and "" at the end of the file."""
        while True:
            self.index = passed.match(self.buffer, self.index).end()  # type: ignore[union-attr] # it matches nothing, too
            if self.index < len(self.buffer):
                return self.buffer[self.index]
            if not self.read_more(READ_SIZE):
                return ""

    def read_more(self, size: int) -> bool:
        """Forget the text before the index, and read more; return whether there was more."""
        more = self.text.read(size)
        self.line += self.buffer.count("\n", 0, self.index)
        self.buffer, self.index = self.buffer[self.index :] + more, 0
        return bool(more)

    def read_value(self, number: int) -> tuple[Any, bytes]:
        """Return the value at the index, with its text, and move past it. Raise DataError if it is broken.

        A complete value with a repeated key is a RepeatedKeyError.
        """
        size, broken = READ_SIZE, f"{self.name}: row {number} of the JSON array"
        while True:
            value, end = decode_next(self.buffer, self.index)
            # A number at the end of the buffer may continue in the next block; an object or a list cannot.
            if end is not None and (end < len(self.buffer) or isinstance(value, dict | list | RepeatedKeyError)):
                row = self.buffer[self.index : end].encode("utf-8")
                self.index = end
                return value, row
            left = self.buffer[self.index :]
            if len(left) > self.max_row_bytes:
                raise DataError(f"{broken} is longer than {self.max_row_bytes:,} bytes; write it as JSON lines")
            if holds_too_much(left.encode("utf-8", "replace")):
                raise DataError(f"{broken}: {TOO_MANY}; write it as JSON lines")
            where = where_broken(value, self.buffer, self.line)
            if not may_continue(value, self.buffer) or not self.read_more(size):
                raise DataError(f"{broken} is broken{where}")
            size *= 2


def decode_next(buffer: str, index: int, decoder: json.JSONDecoder = DECODER) -> tuple[Any, int | None]:
    """Return a value and its end; the error and None if the value is incomplete.

    A complete value with a repeated key is a RepeatedKeyError.
    """
    try:
        return decoder.raw_decode(buffer, index)
    except RepeatedKeyError as error:
        value, end = decode_next(buffer, index, json.JSONDecoder())
        return (value, None) if end is None else (error, end)
    except (ValueError, RecursionError) as error:
        return error, None


def where_broken(error: Any, buffer: str, line: int) -> str:
    """Return where and why a value of an array is broken.

    Args:
        error: The error; another value if the file ends within it.
        buffer: The text that was decoded.
        line: Line where that text starts.
    """
    if not isinstance(error, json.JSONDecodeError):
        return f": {message_of_error(error)}"
    is_cut_off = error.msg.startswith("Unterminated string") or not buffer[error.pos :].strip()
    end = "; is the file cut off?" if is_cut_off else ""
    return f" in line {line + buffer.count(chr(10), 0, error.pos)}: {message_of_error(error)}{end}"


def may_continue(failure: Any, buffer: str) -> bool:
    """Return whether a value that could not be decoded may be complete after reading more of the file."""
    if isinstance(failure, json.JSONDecodeError):
        return failure.msg.startswith("Unterminated string") or failure.pos >= len(buffer) - CUT_OFF
    return not isinstance(failure, Exception)


def message_of_error(error: Any) -> str:
    """Return the message of a JSON error, without its position, which does not count from the start of the file."""
    if isinstance(error, RecursionError):
        return TOO_DEEP
    return error.msg if isinstance(error, json.JSONDecodeError) else str(error)


def read_whole(stream: BinaryIO, name: str, max_row_bytes: int) -> Iterator[SourceRecord]:
    """Yield the rows of a JSON object: lists by column, one list of rows, or a single row.

    Raises:
        DataError: The text is not JSON, or holds too much for one object.
    """
    text = stream.read(max_row_bytes + 1)
    if len(text) > max_row_bytes or holds_too_much(text):
        raise DataError(
            f"{name}: a JSON file that is one object of more than {max_row_bytes:,} bytes or {MAX_VALUES:,} values is "
            "not read; write JSON lines"
        )
    try:
        value = DECODER.decode(text.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"{name} is {not_utf8(error)}") from None
    except RepeatedKeyError as error:
        raise DataError(f"{name}: {error}") from None
    except (ValueError, RecursionError) as error:
        what = TOO_DEEP if isinstance(error, RecursionError) else error
        raise DataError(f"{name} is neither a JSON array nor an object a line: {what}") from None
    if not isinstance(value, dict):
        raise DataError(f"{name} holds a single value; write an array of objects, or an object a line")
    for number, row in enumerate(rows_of_object(value), start=1):
        text_of_row = row_text(row)
        yield record_of(row, wrong_object(row, text_of_row), text_of_row, number)


def row_text(row: Any) -> bytes:
    """Return the row as JSON; empty if it is nested too deeply."""
    return b"" if is_too_deep(row) else json.dumps(row).encode()


def rows_of_object(value: dict[str, Any]) -> list[Any]:
    if is_dialogue(value):
        return [value]
    lists = [part for part in value.values() if isinstance(part, list)]
    if len(value) == 1 and lists and all(isinstance(row, dict) for row in lists[0]):
        return lists[0]
    if lists and len(lists) == len(value) and len({len(part) for part in lists}) == 1:
        return [dict(zip(value, cells, strict=True)) for cells in zip(*lists, strict=True)]
    return [value]


def is_dialogue(value: dict[str, Any]) -> bool:
    """Return whether an object is one dialogue, whose messages are in one of the usual columns."""
    messages = value.get("messages", value.get("conversations"))
    if not isinstance(messages, list):
        return False
    return all(isinstance(message, dict) and ("role" in message or "from" in message) for message in messages)


JSON = FileFormat(
    "json", (".json",), open=partial(open_text, read_json), read_slice=partial(read_from_start, read_json), stdin=True
)
JSONL = FileFormat(
    "jsonl",
    (".jsonl", ".ndjson"),
    open=partial(open_text, read_jsonl),
    read_slice=partial(read_line_slice, jsonl_row),
    splits_at_lines=True,
    stdin=True,
    hub_builder="json",
)
