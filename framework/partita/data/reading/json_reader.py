"""Rows of JSON and JSON lines files: every row stays the text that it is."""

import io
import json
from collections.abc import Iterator
from typing import Any, BinaryIO

from partita.data.reading.records import MAX_ROW_CHARACTERS, Record, bad, not_utf8, refuse_utf16
from partita_schema.errors import DataError

READ_SIZE = 1 << 20
"""Bytes of a JSON array that are read at a time."""


def read_jsonl(stream: BinaryIO, name: str) -> Iterator[Record]:
    """One JSON object a line; empty lines are passed over."""
    for number, line in enumerate(stream, start=1):
        if number == 1:
            refuse_utf16(line, name)
            line = line.removeprefix(b"\xef\xbb\xbf")
        text = line.strip()
        if text:
            yield json_record(text, number)


def json_record(text: bytes, number: int) -> Record:
    """The row in a piece of JSON."""
    try:
        value = json.loads(text.decode("utf-8"))
    except UnicodeDecodeError as error:
        return bad(number, not_utf8(error), text.decode("utf-8", "replace"))
    except (ValueError, RecursionError) as error:
        where = f" at character {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else ""
        return bad(number, f"not JSON: {said(error).removesuffix(' at')}{where}", text.decode("utf-8", "replace"))
    return checked_object(value, text, number)


def checked_object(value: Any, text: bytes, number: int) -> Record:
    if not isinstance(value, dict):
        kind = {list: "a list", str: "a text", type(None): "null", bool: "a truth value"}.get(type(value), "a number")
        return bad(number, f"a row is a JSON object, this is {kind}", text.decode())
    if b"\\u" in text and has_lone_surrogate(value):
        return bad(number, "not Unicode: half of a surrogate pair", text.decode())
    return Record(number, text + b"\n", tuple(value))


def has_lone_surrogate(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False


def read_json(stream: BinaryIO, name: str) -> Iterator[Record]:
    """A JSON array of objects, an object of columns, an object that holds one array of rows, or one object a line.

    An array is read piece by piece; the other whole-file forms are held in memory.
    """
    start = b""
    while not start.strip(b"\xef\xbb\xbf \t\r\n"):
        if not (more := stream.read(READ_SIZE)):
            return
        start += more
    refuse_utf16(start, name)
    rest = chained(start.removeprefix(b"\xef\xbb\xbf"), stream)
    if start.strip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
        yield from read_array(rest, name)
    elif is_object(start.lstrip(b"\xef\xbb\xbf \t\r\n").split(b"\n", 1)[0]) and b"\n" in start.strip():
        yield from read_jsonl(rest, name)
    else:
        yield from read_whole(rest, name)


def chained(start: bytes, stream: BinaryIO) -> BinaryIO:
    """A stream of `start` and what is left of another one."""

    class Chained(io.RawIOBase):
        left = start

        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any) -> int:
            data = self.left[: len(buffer)] if self.left else stream.read(len(buffer))
            self.left = self.left[len(data) :]
            buffer[: len(data)] = data
            return len(data)

    return io.BufferedReader(Chained(), READ_SIZE)


def is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def read_array(stream: BinaryIO, name: str) -> Iterator[Record]:
    """Objects of a JSON array, one at a time; a row's number is its place in the array."""
    text = io.TextIOWrapper(stream, encoding="utf-8")
    decoder = json.JSONDecoder()
    buffer, place, number, size = "", 0, 0, READ_SIZE
    started = False
    try:
        while True:
            while place < len(buffer) and buffer[place] in " \t\r\n":
                place += 1
            if place == len(buffer):
                buffer, place = text.read(size), 0
                if not buffer:
                    raise DataError(f"{name}: the JSON array is not closed after row {number}; is the file cut off?")
            elif not started:
                started, place = True, place + 1
            elif buffer[place] == "]":
                return
            elif buffer[place] == "," and number:
                place += 1
            else:
                value, end = decode_next(decoder, buffer, place)
                # A number at the end of the buffer may go on behind it, so an object or a list is asked for.
                if end is None or (end == len(buffer) and not isinstance(value, dict | list)):
                    more = text.read(size)
                    if not more or len(buffer) - place > MAX_ROW_CHARACTERS:
                        raise DataError(f"{name}: row {number + 1} of the JSON array is broken: {said(value)}")
                    buffer, place, size = buffer[place:] + more, 0, size * 2
                    continue
                number += 1
                yield checked_object(value, buffer[place:end].encode("utf-8"), number)
                place, size = end, READ_SIZE
    except UnicodeDecodeError as error:
        raise DataError(f"{name} is {not_utf8(error)}; save it as UTF-8, or as JSON lines") from None
    finally:
        text.detach()


def decode_next(decoder: json.JSONDecoder, buffer: str, place: int) -> tuple[Any, int | None]:
    """A value and its end; the error and None where there is no whole value yet."""
    try:
        return decoder.raw_decode(buffer, place)
    except (ValueError, RecursionError) as error:
        return error, None


def said(error: Any) -> str:
    """What a JSON error says, without a position that counts from the middle of the file."""
    return error.msg if isinstance(error, json.JSONDecodeError) else str(error)


def read_whole(stream: BinaryIO, name: str) -> Iterator[Record]:
    """Rows of a JSON object: lists by column, one list of rows, or a single row."""
    try:
        value = json.loads(stream.read().decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"{name} is {not_utf8(error)}; save it as UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{name} is neither a JSON array nor an object a line: {error}") from None
    if not isinstance(value, dict):
        raise DataError(f"{name} holds a single value; write an array of objects, or an object a line")
    for number, row in enumerate(rows_of_object(value), start=1):
        yield checked_object(row, json.dumps(row).encode(), number)


def rows_of_object(value: dict[str, Any]) -> list[Any]:
    lists = [part for part in value.values() if isinstance(part, list)]
    if len(value) == 1 and lists and all(isinstance(row, dict) for row in lists[0]):
        return lists[0]
    if lists and len(lists) == len(value) and len({len(part) for part in lists}) == 1:
        return [dict(zip(value, cells, strict=True)) for cells in zip(*lists, strict=True)]
    return [value]
