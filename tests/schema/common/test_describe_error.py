"""Exceptions in messages."""

import pytest

from partita_schema.common.text import describe_error


class UnreadableError(Exception):
    """An exception without a text."""

    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (KeyError(), "KeyError"),
        (OSError("the desk is closed"), "OSError: the desk is closed"),
        (UnreadableError(), "UnreadableError: its text cannot be read (ValueError)"),
    ],
)
def test_an_error_is_described_also_if_its_text_cannot_be_read(error: BaseException, text: str) -> None:
    assert describe_error(error) == text
