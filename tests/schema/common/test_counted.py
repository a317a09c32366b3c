"""Tests of singular and plural nouns after numbers in messages."""

import pytest

from partita_schema.common.text import counted


@pytest.mark.parametrize(
    ("number", "noun", "plural", "text"),
    [
        (0, "row", None, "0 rows"),
        (1, "row", None, "1 row"),
        (2, "row", None, "2 rows"),
        (1, "batch", "batches", "1 batch"),
        (12_000, "batch", "batches", "12,000 batches"),
    ],
)
def test_a_noun_is_plural_except_after_1(number: int, noun: str, plural: str | None, text: str) -> None:
    assert counted(number, noun, plural) == text
