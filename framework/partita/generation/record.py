"""One line of the journal: the result of a row, and the key that ties it to its prompt."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from partita.data.rows import digest
from partita_schema.common.checksums import unsealed_line
from partita_schema.common.hashing import json_digest

Status = Literal["ok", "error", "skipped"]
STATUSES: tuple[Status, ...] = ("ok", "error", "skipped")

KEY_BYTES = 16


@dataclass(frozen=True)
class PredictionRecord:
    """The result of one row."""

    key: str
    """row_key of the row, in hexadecimal."""
    row: int
    """Index of the row in the dataset, from 0."""
    status: Status
    """ok: answered; error: the model could not answer it; skipped: the row is invalid and was not sent to the model."""
    text: str | None = None
    """The answer."""
    values: dict[str, Any] | None = None
    """Value of each output as parsed when the row was answered."""
    tokens: int = 0
    """Number of generated tokens."""
    finish_reason: Literal["stop", "length"] | None = None
    """stop: the model ended the answer; length: it reached the token limit."""
    logprob: float | None = None
    """Natural logarithm of the answer's probability; None if not requested."""
    scores: dict[str, Any] | None = None
    """Log probability of each label, if labels were scored; for several answers, by output."""
    reward: float | None = None
    """Reward of the answer, if it was chosen among several."""
    samples: list[dict[str, Any]] | None = None
    """All answers that it was chosen from, with text and reward, if they are kept."""
    error: str | None = None
    """Why there is no answer."""
    attempt: int = 1
    """How often the row was tried, including this time."""
    milliseconds: float = 0.0
    """Time of the row's batch divided by its number of rows, in milliseconds."""


RECORD_FIELDS = tuple(field.name for field in fields(PredictionRecord))


def row_key(text: str, *, row: str, fingerprint: str) -> bytes:
    """Return the key of an answer: 16 bytes over the rendered prompt, the row's own key, and the job's fingerprint."""
    return bytes.fromhex(digest(*(part.encode("utf-8", errors="surrogatepass") for part in (text, row, fingerprint))))


def fingerprint_of(inputs: Mapping[str, str]) -> str:
    """Return one hash over all inputs of a fingerprint."""
    return json_digest(dict(inputs))


def json_line(value: Mapping[str, Any]) -> bytes:
    """Return one line of JSON; ASCII-escaped if the text holds lone surrogates, which UTF-8 cannot encode."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False).encode() + b"\n"
    except UnicodeEncodeError:
        return json.dumps(value, allow_nan=False).encode() + b"\n"


def read_record(line: bytes, *, rows: int) -> PredictionRecord | None:
    """Parse a line; None if it is damaged."""
    try:
        record = parse_record(unsealed_line(line))
        whole = len(bytes.fromhex(record.key)) == KEY_BYTES and record.status in STATUSES and 0 <= record.row < rows
    except (ValueError, TypeError):
        return None
    return record if whole else None


def parse_record(raw: dict[str, Any]) -> PredictionRecord:
    """Return the record of a JSON object; keys added by newer versions are ignored."""
    return PredictionRecord(**{name: raw[name] for name in RECORD_FIELDS if name in raw})
