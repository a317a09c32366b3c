"""Tests of documents and lines with checksums: read unchanged, or reported as damaged."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita_schema.common.checksums import DamagedError, sealed, sealed_line, unsealed, unsealed_line
from partita_schema.common.json_text import parse_json

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
documents = st.dictionaries(st.text().filter(lambda key: key != "checksum"), values, min_size=1, max_size=4)


def flipped(data: bytes, place: int) -> bytes:
    return data[: place // 8] + bytes([data[place // 8] ^ (1 << place % 8)]) + data[place // 8 + 1 :]


@given(documents, st.booleans(), st.data())
def test_a_flipped_bit_is_detected_or_has_no_effect(
    document: dict[str, Any], is_line: bool, data: st.DataObject
) -> None:
    written = sealed_line(json.dumps(document).encode()) if is_line else json.dumps(sealed(document)).encode()
    read = unsealed_line if is_line else unsealed
    assert read(written) == document
    place = data.draw(st.integers(0, 8 * len(written) - 1))
    try:
        result = read(flipped(written, place))
    except DamagedError:
        return
    # If the key of the checksum itself is hit, everything else is unchanged.
    assert {key: value for key, value in result.items() if key in document} == document


def test_the_checksum_covers_values_as_json_restores_them() -> None:
    document = {"sizes": {10: (1, 2), 9: None}}
    text = json.dumps(sealed(document), indent=2)
    assert unsealed(text, required=True) == {"sizes": {"10": [1, 2], "9": None}}


def test_the_checksum_does_not_depend_on_the_order_of_keys() -> None:
    written = sealed({"step": 3, "sizes": {"a": 1, "b": 2}})
    turned = dict(reversed(written.items())) | {"sizes": {"b": 2, "a": 1}}
    assert list(turned) != list(written)
    assert unsealed(json.dumps(turned), required=True) == {"step": 3, "sizes": {"a": 1, "b": 2}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{", "is not JSON (Expecting property name"),
        (b"\xff{}", "is not JSON ("),
        (b"[1]", "is not a JSON object"),
        (b"[" * 10**6, "is not JSON (nested too deeply)"),
        (b'{"a": 1, "checksum": "00"}', "is not as it was written (its checksum differs)"),
        (b'{"a": 1, "checksum": null}', "is not as it was written (its checksum differs)"),
        (b'{"a": 1}', "is not as it was written (its checksum differs)"),
    ],
)
def test_damage_is_reported(text: bytes, message: str) -> None:
    with pytest.raises(DamagedError) as caught:
        unsealed(text, required=True)
    assert str(caught.value).startswith(message)


def test_hand_written_files_need_no_checksum() -> None:
    assert unsealed('{"a": 1}') == {"a": 1}
    assert unsealed_line(b'{"a": 1}\n', required=False) == {"a": 1}
    with pytest.raises(DamagedError, match="has no checksum"):
        unsealed_line(b'{"a": 1}\n')


def test_a_value_that_is_nested_too_deeply_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json("[" * 10**6 + "]" * 10**6)
