"""JSON texts: read with one kind of error, and written as UTF-8."""

import json
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text. Raises ValueError, also for text that is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def json_bytes(value: Any) -> bytes:
    """Return JSON in UTF-8; ASCII-escaped if it has lone surrogates, which UTF-8 cannot encode."""
    try:
        return json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return json.dumps(value).encode()
