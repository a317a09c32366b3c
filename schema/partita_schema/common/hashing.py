"""Hashes that are the same in every process and on every machine."""

import json
from collections.abc import Callable
from hashlib import blake2b, sha256
from typing import Any


def hash_to_int(text: str, *, num_bytes: int = 8) -> int:
    """Return an integer of `num_bytes` bytes that depends only on the text, the same on every machine."""
    return int.from_bytes(blake2b(text.encode("utf-8", "replace"), digest_size=num_bytes).digest(), "big")


def json_digest(value: Any, *, default: Callable[[Any], Any] | None = None) -> str:
    """Return the SHA-256 of a value as JSON, independent of the order of keys. `default` as for `json.dumps`."""
    return sha256(json.dumps(value, sort_keys=True, default=default).encode()).hexdigest()
