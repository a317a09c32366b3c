"""Read ParlAI's dialogue text: one row per episode, in the column `episode`.

A line is an exchange: tab-separated fields `key:value`, of which `text`, `labels` (or `eval_labels`; several are
separated by |) and `episode_done` are read. Fields that ParlAI's protocol does not know stay in the exchange, and its
row is rejected unless the configuration ignores them by name. `\\n` and `\\t` stand for a line break and a tab,
`__PIPE__` for | in a label, as ParlAI writes them (parlai/utils/misc.py, msg_to_str).
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, BinaryIO

from partita.data.formats.base import (
    FileFormat,
    SourceRecord,
    bad,
    dump,
    not_utf8,
    read_from_start,
    too_long,
)
from partita.data.formats.lines import numbered_lines
from partita.data.formats.text_files import open_text
from partita_schema.common.text import first_repeated
from partita_schema.dialogues.formats import PARLAI_FIELDS
from partita_schema.errors import shortened

LABELS = ("labels", "eval_labels")
MAX_END = 64
"""Bytes that are kept of a field of a line that is too long."""


def read_parlai(stream: BinaryIO, name: str, max_row_bytes: int) -> Iterator[SourceRecord]:
    """Yield one row per episode, numbered by its first line; an episode with a malformed line is bad as a whole."""
    episode = ParlaiEpisode(max_row_bytes)
    for number, line, rest in numbered_lines(stream, name, max_row_bytes=max_row_bytes, shorten=episode_end):
        if line is None:
            episode.leave_out_line(rest, number)
        elif line.strip():
            episode.add(line.rstrip(b"\r\n"), number)
        if episode.done:
            yield episode.record()
            episode = ParlaiEpisode(max_row_bytes)
    if episode.number:
        yield episode.record()


class ParlaiEpisode:
    """Collect lines up to one that ends an episode. After a malformed line, the others are only skipped."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.number = 0
        """Number of the first line; 0 before there is one."""
        self.done = False
        self._exchanges: list[dict[str, Any]] = []
        self._reason, self._raw, self._size = "", "", 0

    def add(self, line: bytes, number: int) -> None:
        """Add a line."""
        self.number = self.number or number
        text = line.decode("utf-8", "replace")
        fields = fields_of(text)
        self.done = is_done(fields)
        if self._reason:
            return
        self._size += len(line)
        self._reason = self._problem(line, number)
        if self._reason:
            self._raw, self._exchanges = text, []
        else:
            self._exchanges.append(exchange_of(fields))

    def leave_out_line(self, rest: bytes, number: int) -> None:
        """Mark the episode as bad because of a line that is too long, of which `episode_end` has kept the rest."""
        self.number = self.number or number
        self.done = is_done(fields_of(rest.decode("utf-8", "replace")))
        self._reason, self._exchanges = self._reason or f"line {number}: {too_long(self._max_bytes)}", []

    def record(self) -> SourceRecord:
        """Return the row."""
        if self._reason:
            return bad(self.number, self._reason, self._raw)
        return SourceRecord(self.number, dump({"episode": self._exchanges}), ("episode",))

    def _problem(self, line: bytes, number: int) -> str:
        """Return why the episode is bad with this line; empty if it is not."""
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError as error:
            return f"line {number}: {not_utf8(error)}"
        if not {"text", *LABELS} & set(fields_of(text)):
            return f"line {number} has neither text: nor labels:; write text:...<tab>labels:..."
        if (piece := without_key(text)) is not None:
            return f"line {number}: {piece[:60]!r} is not a field; write key:value, and \\t for a tab in a text"
        if (twice := repeated_field(text)) is not None:
            return f"line {number} has the field {shortened(twice)!r} twice; remove or rename one"
        if self._size > self._max_bytes:
            return (
                f"the episode is longer than {self._max_bytes:,} bytes; write episode_done:True in its last line, or a "
                "larger data.max_row_bytes if it is meant"
            )
        return ""


def episode_end(start: bytes) -> bytes:
    """Return what the start of a line says about the end of its episode: its last field `episode_done`, and its last
    field, which may be incomplete. Longer fields are truncated, to more than `episode_done:True` needs."""
    *fields, last = (field[:MAX_END] for field in start.split(b"\t"))
    ends = [field for field in fields if field.partition(b":")[0].strip() == b"episode_done"]
    return b"\t".join([*ends[-1:], last])


def is_done(fields: Mapping[str, str]) -> bool:
    """Return whether the fields of a line end its episode."""
    return fields.get("episode_done", "").strip().lower() in ("true", "1")


def fields_of(line: str) -> dict[str, str]:
    """Return the values by key, as they are written."""
    pairs = (field.partition(":") for field in line.split("\t"))
    return {key.strip(): value for key, colon, value in pairs if colon}


def without_key(line: str) -> str | None:
    """Return the first part between tabs that is not a field."""
    return next((piece for piece in line.split("\t") if piece.strip() and ":" not in piece), None)


def repeated_field(line: str) -> str | None:
    """Return the first key that a line has twice."""
    return first_repeated(field.partition(":")[0].strip() for field in line.split("\t") if ":" in field)


def exchange_of(fields: dict[str, str]) -> dict[str, Any]:
    exchange: dict[str, Any] = {key: unescaped(value) for key, value in fields.items() if key not in PARLAI_FIELDS}
    if "text" in fields:
        exchange["text"] = unescaped(fields["text"])
    written = next((fields[key] for key in LABELS if key in fields), None)
    if written:
        exchange["labels"] = [unescaped(label) for label in written.split("|")]
    return exchange


def unescaped(text: str) -> str:
    return text.replace("\\t", "\t").replace("\\n", "\n").replace("__PIPE__", "|")


PARLAI = FileFormat(
    "parlai", (".parlai",), open=partial(open_text, read_parlai), read_slice=partial(read_from_start, read_parlai)
)
