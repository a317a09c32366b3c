"""Read ParlAI's dialogue text: one row per episode, in the column `episode`.

A line is an exchange: tab-separated fields `key:value`, of which `text`, `labels` (or `eval_labels`; several are
separated by |) and `episode_done` are read. Fields that ParlAI's protocol does not know stay in the exchange, and its
row is rejected unless the configuration ignores them by name. `\\n` and `\\t` stand for a line break and a tab,
`__PIPE__` for | in a label, as ParlAI writes them (parlai/utils/misc.py, msg_to_str).
"""

from collections.abc import Iterator
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
from partita_schema.dialogues.formats import PARLAI_FIELDS

LABELS = ("labels", "eval_labels")


def read_parlai(stream: BinaryIO, name: str, max_row_bytes: int) -> Iterator[SourceRecord]:
    """Yield one row per episode, numbered by its first line; an episode with a malformed line is bad as a whole."""
    episode = ParlaiEpisode(max_row_bytes)
    for number, line in numbered_lines(stream, name, max_row_bytes=max_row_bytes):
        if line is None:
            episode.leave_out_line(number)
            continue
        if not line.strip():
            continue
        episode.add(line.rstrip(b"\r\n"), number)
        if episode.done:
            yield episode.record()
            episode = ParlaiEpisode(max_row_bytes)
    if episode.number:
        yield episode.record()


class ParlaiEpisode:
    """Collect lines up to one that ends an episode."""

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
        self._size += len(line)
        try:
            fields = fields_of(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            self._break(f"line {number}: {not_utf8(error)}", line)
            self.done = b"episode_done:True" in line
            return
        self.done = fields.get("episode_done", "").strip().lower() in ("true", "1")
        if not {"text", *LABELS} & set(fields):
            self._break(f"line {number} has neither text: nor labels:; write text:...<tab>labels:...", line)
            return
        if (piece := without_key(line.decode("utf-8"))) is not None:
            self._break(
                f"line {number}: {piece[:60]!r} is not a field; write key:value, and \\t for a tab in a text", line
            )
            return
        if self._size > self._max_bytes:
            self._break("this episode never ends; write episode_done:True in its last line", line)
            self._exchanges, self.done = [], True
            return
        self._exchanges.append(exchange_of(fields))

    def leave_out_line(self, number: int) -> None:
        """Mark the episode as bad because of a line that is too long."""
        self.number = self.number or number
        self._break(f"line {number}: {too_long(self._max_bytes)}", b"")

    def record(self) -> SourceRecord:
        """Return the row."""
        if self._reason:
            return bad(self.number, self._reason, self._raw)
        return SourceRecord(self.number, dump({"episode": self._exchanges}), ("episode",))

    def _break(self, reason: str, line: bytes) -> None:
        if not self._reason:
            self._reason, self._raw = reason, line.decode("utf-8", "replace")


def fields_of(line: str) -> dict[str, str]:
    """Return the values by key, as they are written."""
    pairs = (field.partition(":") for field in line.split("\t"))
    return {key.strip(): value for key, colon, value in pairs if colon}


def without_key(line: str) -> str | None:
    """Return the first part between tabs that is not a field."""
    return next((piece for piece in line.split("\t") if piece.strip() and ":" not in piece), None)


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
