"""Values are written as people read them."""

from typing import Any

import pytest

from partita_schema.common.text import value_text


@pytest.mark.parametrize(
    ("value", "text", "short"),
    [
        ("a b", "a b", "a b"),
        (0.000123456, "0.000123456", "0.0001235"),
        (1234567.5, "1234567.5", "1.235e+06"),
        (20_000, "20000", "20000"),
        (True, "true", "true"),
        (None, "null", "null"),
        ({"type": "lora", "names": ["é"]}, '{"type": "lora", "names": ["é"]}', '{"type": "lora", "names": ["é"]}'),
    ],
)
def test_a_text_is_as_it_is_and_other_values_are_json(value: Any, text: str, short: str) -> None:
    assert value_text(value) == text
    assert value_text(value, digits=4) == short
