"""Tests of hashing text to integers."""

from hashlib import blake2b

import pytest

from partita_schema.common.hashing import hash_to_int


@pytest.mark.parametrize("num_bytes", [4, 6, 7, 8])
def test_the_integer_of_a_text_is_its_blake2b_hash(num_bytes: int) -> None:
    digest = blake2b(b"7:row 3", digest_size=num_bytes).digest()

    assert hash_to_int("7:row 3", num_bytes=num_bytes) == int.from_bytes(digest, "big") < 256**num_bytes


def test_text_that_is_not_valid_utf8_can_be_hashed() -> None:
    assert hash_to_int("\ud800") == hash_to_int("?")
