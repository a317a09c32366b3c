"""Integers from text, for seeds and choices that depend on names and not on the order in which they are drawn."""

from hashlib import blake2b


def hash_to_int(text: str, *, num_bytes: int = 8) -> int:
    """Return an integer of `num_bytes` bytes that depends only on the text, the same on every machine."""
    return int.from_bytes(blake2b(text.encode("utf-8", "replace"), digest_size=num_bytes).digest(), "big")
