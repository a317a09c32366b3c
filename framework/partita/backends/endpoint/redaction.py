"""Remove the API key from a server's texts, and make messages safe to print.

A server may repeat the key as it is, in part, or encoded. Text is therefore compared without white space and with
its escapes resolved (percent, JSON, HTML), against the key, its base64 and its hexadecimal form.
"""

import base64
import logging
import re
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import unquote

from partita_schema.errors import shortened

REDACTED = "***"
SHORTEST_SECRET = 8
"""Shortest key that is secret; shorter ones, such as EMPTY, are placeholders for local servers."""
READ_OF_A_MESSAGE = 2**16
"""Characters of a message that are searched; at most LONGEST_MESSAGE of them are printed."""
LONGEST_MESSAGE = 500
"""Characters of a message that are printed."""

CONTROLS = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]"
"""Control characters, and marks that reorder or hide text."""
UNPRINTABLE = re.compile(
    r"\x1b\[[0-?]{0,64}[ -/]{0,8}[@-~]?"  # colours and cursor movements
    r"|\x1b[\]PX^_][^\x07\x1b]{0,4096}(?:\x07|\x1b\\)?"  # titles, links and other strings for the terminal
    r"|\x1b.?|" + CONTROLS
)
"""Terminal escape sequences and control characters."""
SURROGATE = re.compile(r"[\ud800-\udfff]")
ESCAPED = (
    r"%(?:25){0,4}([0-9A-Fa-f]{2})"
    r"|\\{1,8}[ux](?:00)?([0-9A-Fa-f]{2})"
    r"|&#[xX]0{0,8}([0-9A-Fa-f]{2});"
    r"|&#0{0,8}([0-9]{2,3});"
    r"|&(quot|amp|lt|gt|apos);"
    r"|\\{1,8}|[\s\u00ad]{1,64}|"
)
"""One escaped character, or what may separate two characters of the key; without terminal escape sequences."""
BETWEEN_SEQUENCES = re.compile(ESCAPED + UNPRINTABLE.pattern)
"""For text in which whole terminal escape sequences may separate two characters of the key ..."""
IN_SEQUENCES = re.compile(ESCAPED + r"\x1b[\[\]PX^_\\]?|" + CONTROLS)
"""... and for text in which the key may be inside of one, of which only the beginning is a separator."""
CLIENT_LOGGERS = ("httpx2", "httpcore2.connection", "httpcore2.http11", "httpcore2.proxy")
NAMED = {"quot": '"', "amp": "&", "lt": "<", "gt": ">", "apos": "'"}


class Redaction:
    """Removes an API key from texts."""

    def __init__(self, key: str | None) -> None:
        self._key = key or ""
        secret = len(self._key) >= SHORTEST_SECRET
        self._forms = tuple(dict.fromkeys(_forms(self._key))) if secret else ()

    def message(self, text: str) -> str:
        """Return a one-line message that is safe to print, shortened, without the key or a third of it."""
        text = UNPRINTABLE.sub("", text[:READ_OF_A_MESSAGE])
        line = " ".join(SURROGATE.sub("\ufffd", self._hide(text, share=3)).split())
        if self._key and not self._forms:
            line = re.sub(rf"(?<!\w){re.escape(self._key)}(?!\w)", REDACTED, line)
        return shortened(line, LONGEST_MESSAGE)

    def answer(self, text: str) -> str:
        """Return an answer without the key or half of it, otherwise unchanged."""
        return self._hide(text, share=2)

    def _hide(self, text: str, *, share: int) -> str:
        """Return the text without parts of the key of at least its length divided by `share`."""
        if not self._forms:
            return text
        spans = self._spans(text, BETWEEN_SEQUENCES, share=share)
        if "\x1b" in text:
            spans += self._spans(text, IN_SEQUENCES, share=share)
        pieces: list[str] = []
        end = 0
        for start, last in sorted(spans):
            if not pieces or start > end:
                pieces += [text[end:start], REDACTED]
            end = max(end, last)
        return "".join([*pieces, text[end:]])

    def _spans(self, text: str, escaped: re.Pattern[str], *, share: int) -> list[tuple[int, int]]:
        """Return the spans of parts of the key, in a text with these escapes and separators."""
        plain, offsets = _unescape(text, escaped)
        found = [span for form in self._forms for span in _find_shared_spans(plain, form, share=share)]
        return [(offsets.start(first), offsets.end(last)) for first, last in found]


@contextmanager
def redacted_logs(redaction: Redaction) -> Iterator[None]:
    """Redact what the HTTP client's libraries log of responses in this context."""

    def redact(record: logging.LogRecord) -> bool:
        record.msg, record.args = redaction.message(record.getMessage()), ()
        return True

    loggers = [logging.getLogger(name) for name in CLIENT_LOGGERS]
    for logger in loggers:
        logger.addFilter(redact)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(redact)


class _OffsetMap:
    """Maps character offsets of an unescaped text to offsets of the original text."""

    def __init__(self) -> None:
        self.plain, self.text = array("q"), array("q")

    def add(self, plain: int, text: int) -> None:
        self.plain.append(plain)
        self.text.append(text)

    def start(self, position: int) -> int:
        """Return the offset at which a character begins."""
        segment = bisect_right(self.plain, position) - 1
        return self.text[segment] + position - self.plain[segment]

    def end(self, position: int) -> int:
        """Return the offset at which the character before `position` ends."""
        segment = bisect_right(self.plain, position - 1) - 1
        if self.plain[segment + 1] == position:
            return self.text[segment + 1]
        return self.text[segment] + position - self.plain[segment]


def _unescape(text: str, escaped: re.Pattern[str]) -> tuple[str, _OffsetMap]:
    """Return the text with escapes resolved and separators removed, and the map of its offsets."""
    parts: list[str] = []
    offsets = _OffsetMap()
    length = end = 0
    offsets.add(0, 0)
    for match in escaped.finditer(text):
        character = _character(match)
        if match.start() > end:
            parts.append(text[end : match.start()])
            length += match.start() - end
        offsets.add(length, match.start())
        parts.append(character)
        length, end = length + len(character), match.end()
        offsets.add(length, end)
    parts.append(text[end:])
    offsets.add(length + len(text) - end, len(text))
    return "".join(parts), offsets


def _character(match: re.Match[str]) -> str:
    percent, escaped, hexadecimal, decimal, name = match.groups()
    if name:
        return NAMED[name]
    if decimal:
        return chr(int(decimal))
    digits = percent or escaped or hexadecimal
    return chr(int(digits, 16)) if digits else ""


def _find_shared_spans(plain: str, form: str, *, share: int) -> list[tuple[int, int]]:
    """Return the spans of `plain` that match a part of `form` of at least its length divided by `share`.

    A part has a minimum length of a few characters. Any such part contains a whole block of half its length at one
    of a few offsets, and these blocks are searched for.
    """
    least = min(len(form), max(SHORTEST_SECRET, -(-len(form) // share)))
    block = (least + 1) // 2
    spans: list[tuple[int, int]] = []
    for offset in range(0, len(form) - block + 1, block):
        position = plain.find(form[offset : offset + block])
        while position >= 0:
            first, last = _grow_span(plain, form, position, offset, block)
            if last - first >= least:
                spans.append((first, last))
            position = plain.find(form[offset : offset + block], max(position + 1, last - block + 1))
    return spans


def _grow_span(plain: str, form: str, position: int, offset: int, length: int) -> tuple[int, int]:
    """Extend a match of `length` characters in both directions, and return its span in `plain`."""
    back = 0
    while back < min(position, offset) and plain[position - back - 1] == form[offset - back - 1]:
        back += 1
    last, end = position + length, offset + length
    while last < len(plain) and end < len(form) and plain[last] == form[end]:
        last, end = last + 1, end + 1
    return position - back, last


def _forms(key: str) -> list[str]:
    """Return the forms of the key: itself, in one case, in hexadecimal, and in base64 at any alignment."""
    plain = _unescape(key, BETWEEN_SEQUENCES)[0]
    forms = [plain, plain.lower(), plain.upper(), unquote(plain)]
    data = key.encode()
    forms += [data.hex(), data.hex().upper()]
    for before in range(3):
        # Characters that depend on the bytes next to the key are left out.
        encoded = base64.b64encode(bytes(before) + data).decode().rstrip("=")
        inner = encoded[(0, 2, 3)[before] : 4 * ((before + len(data)) // 3)]
        forms += [inner, inner.replace("+", "-").replace("/", "_")]
    return [form for form in forms if len(form) >= SHORTEST_SECRET]
