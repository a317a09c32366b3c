import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.outputs.base import ReadError
from partita.outputs.decode import Decoder
from partita.outputs.find_json import find_json
from partita_schema.errors import ConfigError

JSON = {"name": "order", "type": "json"}
ADDRESS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "items": {"type": "array", "items": {"type": "integer"}}},
    "required": ["city"],
}
WITH_SCHEMA = JSON | {"decoder": {"json_schema": ADDRESS}}
SEVERAL = (
    {"name": "mood", "type": "category", "decoder": {"labels": ["good", "bad"], "fallback_label": "bad"}},
    {"name": "stars", "type": "number", "decoder": {"maximum": 5}},
    {"name": "why", "type": "text"},
    {"name": "more", "type": "json"},
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@pytest.fixture(scope="module")
def decoder_of(make_config: Any) -> Any:
    return lambda *outputs, **labels: Decoder(make_config(*outputs), labels=labels)


def test_text_is_stripped(decoder_of: Any) -> None:
    assert decoder_of().decode("  hello \n").values == {"answer": "hello"}


@pytest.mark.parametrize(
    "text",
    [
        '{"city": "Oslo"}',
        'Here you are:\n```json\n{"city": "Oslo"}\n```\nAnything else?',
        '```\n{"city": "Oslo"}```',
        'The {result} is: {"city": "Oslo"} and so on {"city": "Rome"}',
        '[1, 2] is no address, {"city": "Oslo"} is',
    ],
)
def test_the_first_json_value_that_matches_the_schema_is_read(decoder_of: Any, text: str) -> None:
    decoded = decoder_of(WITH_SCHEMA).decode(text)
    assert (decoded.values, decoded.errors) == ({"order": {"city": "Oslo"}}, {})


def test_json_without_a_schema_may_be_any_value(decoder_of: Any) -> None:
    decoder = decoder_of(JSON)
    assert [decoder.decode(text).values["order"] for text in ("3", '"a"', "[1]", "null")] == [3, "a", [1], None]
    assert decoder.decode("null").errors == {}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("no idea", "no JSON value in 'no idea'"),
        ('{"city": "Oslo", "items": [', 'the JSON value is cut off: \'{"city": "Oslo", "items": [\''),
        ('{"a": {"city": "Oslo"}, "b": ', "the JSON value is cut off"),
        ('{"city": "Os', "the JSON value is cut off"),
        ('{"city": 7}', "city: 7 is not of type 'string'"),
        ('{"city": "Oslo", "items": [1, "x"]}', "items[1]: 'x' is not of type 'integer'"),
        ("{}", "'city' is a required property"),
        ("[" * 5000, "nested too deeply"),
        ("[" * 200 + "]" * 200, "nested too deeply"),
        ("NaN", "no JSON value"),
        ("9" * 5000, "no JSON value"),
    ],
)
def test_errors_in_json_are_reported(decoder_of: Any, text: str, reason: str) -> None:
    decoded = decoder_of(WITH_SCHEMA).decode(text)
    assert decoded.values == {"order": None}
    assert reason in decoded.errors["order"]


def test_no_part_of_a_broken_object_is_used_in_its_place(decoder_of: Any) -> None:
    assert decoder_of(JSON).decode('{"a": {"b": 1}, \'c\': 2}').errors


def test_lone_surrogates_are_replaced(decoder_of: Any) -> None:
    assert decoder_of(JSON).decode('{"a": "\\ud800"}').values == {"order": {"a": "?"}}


def test_several_outputs_are_parts_of_one_object(decoder_of: Any) -> None:
    answer = {"mood": "Good", "stars": 4, "why": " nice ", "more": {"a": 1}}
    decoded = decoder_of(*SEVERAL).decode(f"Sure! {json.dumps(answer)} Bye.")
    assert decoded.values == {"mood": "good", "stars": 4, "why": "nice", "more": {"a": 1}}
    assert decoded.errors == {}
    assert decoded.raw == {"mood": "Good", "stars": "4", "why": " nice ", "more": '{"a":1}'}


def test_parts_are_converted_to_the_type_of_their_output(decoder_of: Any) -> None:
    decoded = decoder_of(*SEVERAL).decode('{"mood": "very good", "stars": "5 of 5", "why": 3, "more": "text"}')
    assert decoded.values == {"mood": "good", "stars": 5, "why": "3", "more": "text"}


def test_missing_and_wrong_parts_are_reported_by_output(decoder_of: Any) -> None:
    decoded = decoder_of(*SEVERAL).decode('{"stars": 7, "why": null, "more": null}')
    assert decoded.values == {"mood": "bad", "stars": None, "why": None, "more": None}
    assert decoded.errors == {"stars": "7 is above the maximum 5", "why": "the answer has no 'why'"}


def test_an_answer_that_is_no_object_fails_all_outputs_without_a_fallback(decoder_of: Any) -> None:
    decoded = decoder_of(*SEVERAL).decode("good")
    assert decoded.values == {"mood": "bad", "stars": None, "why": None, "more": None}
    assert set(decoded.errors) == {"stars", "why", "more"}
    assert decoded.raw["why"] == "good"
    assert decoder_of(*SEVERAL).decode("[1]").errors["why"] == "the answer is not a JSON object: '[1]'"
    assert "has none of the keys mood, stars, why, more" in decoder_of(*SEVERAL).decode('{"x": 1}').errors["why"]


def test_labels_come_from_the_data_if_the_configuration_lists_none(decoder_of: Any) -> None:
    decoder = decoder_of({"name": "kind", "type": "category"}, kind=("a", "b"))
    assert decoder.decode("it is b").values == {"kind": "b"}


def test_lowercase_labels_are_read_in_lower_case(decoder_of: Any) -> None:
    output = {"name": "kind", "type": "category", "preprocessing": {"lowercase": True, "vocab": ["Cat", "Dog"]}}
    assert decoder_of(output).decode("Dog").values == {"kind": "dog"}


def test_a_category_without_labels_is_refused(decoder_of: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        decoder_of({"name": "kind", "type": "category"})
    assert str(caught.value) == (
        "output_features[0].decoder.labels: no labels of kind are known; write them as decoder: {labels: [...]}"
    )


@given(st.text())
def test_no_text_raises_with_one_output(decoder_of: Any, text: str) -> None:
    decoded = decoder_of(WITH_SCHEMA).decode(text)
    assert (decoded.values["order"] is None) == ("order" in decoded.errors)


@given(st.text() | values.map(json.dumps) | st.text(alphabet='{}[]",:0a\\u`'))
def test_no_text_raises_with_several_outputs(decoder_of: Any, text: str) -> None:
    decoded = decoder_of(*SEVERAL).decode(text)
    assert list(decoded.values) == list(decoded.raw) == ["mood", "stars", "why", "more"]
    json.dumps(decoded.values, allow_nan=False)


@given(values, st.text(alphabet="abc .:\n"))
def test_every_json_value_is_found_in_its_text(decoder_of: Any, value: Any, before: str) -> None:
    # A bare number or word with text around it cannot be distinguished from the text.
    before = before if isinstance(value, dict | list) else ""
    decoded = decoder_of(JSON).decode(before + json.dumps(value))
    assert decoded.values["order"] == value


@given(st.text(min_size=1), values, st.floats(max_value=5, allow_nan=False, allow_infinity=False))
def test_decoding_a_target_returns_its_value(decoder_of: Any, why: str, more: Any, stars: float) -> None:
    answer = {"mood": "good", "stars": stars, "why": why, "more": more}
    decoded = decoder_of(*SEVERAL).decode(json.dumps(answer, separators=(",", ":")))
    assert decoded.values == {"mood": "good", "stars": stars, "why": why.strip(), "more": more}


@pytest.mark.parametrize("filling", ["a", " ", "a "])
def test_an_unclosed_code_fence_is_read_in_linear_time(filling: str) -> None:
    with pytest.raises(ReadError, match="no JSON value in"):
        find_json("```" + filling * 1_000_000, check=lambda value: value)
    assert find_json('```json  \n{"a": 1}\n``` and so on', check=lambda value: value) == {"a": 1}
