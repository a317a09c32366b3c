"""Tests of reading rows: clean values by feature name, or reasons."""

import datetime
import decimal
import json
from collections import UserDict, defaultdict

import numpy as np
import pandas as pd
import pytest
from marshmallow import ValidationError

from partita_schema.load import load_config
from partita_schema.rows import RowSchema, check_rows, reasons, row_schema

FEATURES = {
    "text": "{name: o, type: text}",
    "category": "{name: o, type: category, decoder: {labels: [good, bad]}}",
    "number": "{name: o, type: number, decoder: {minimum: 0, maximum: 10}}",
    "json": "{name: o, type: json, decoder: {json_schema: {type: object, properties: {n: {type: integer}}}}}",
}


def schema_of(output: str, *, inputs: str = "{name: q}", prompt: str = "{}", supervised: bool = True) -> RowSchema:
    text = f"base_model: m\ninput_features: [{inputs}]\noutput_features: [{output}]\nprompt: {prompt}\n"
    return row_schema(load_config(text).config, supervised=supervised)


def value_of(kind: str, value: object) -> object:
    return schema_of(FEATURES[kind]).load({"q": "x", "o": value})["o"]


def reason_of(kind: str, value: object) -> str:
    with pytest.raises(ValidationError) as caught:
        schema_of(FEATURES[kind]).load({"q": "x", "o": value})
    (reason,) = reasons(caught.value)
    return reason


def test_values_are_returned_by_feature_name_and_other_columns_are_ignored() -> None:
    schema = schema_of("{name: o, type: text, column: answer.text}", inputs="{name: q, column: question}")
    assert schema.load({"question": "a", "answer.text": "b", "other": object()}) == {"q": "a", "o": "b"}


def test_without_supervision_outputs_are_not_required() -> None:
    assert schema_of(FEATURES["text"], supervised=False).load({"q": "a"}) == {"q": "a"}


def test_an_input_and_an_output_may_share_a_column() -> None:
    assert schema_of("{name: o, type: text, column: q}").load({"q": "a"}) == {"q": "a", "o": "a"}


def test_columns_used_only_in_the_template_are_read_and_may_be_empty() -> None:
    schema = schema_of(FEATURES["text"], inputs="{name: prompt}", prompt="{template: '{instruction} {input}'}")
    row = {"instruction": "do", "input": None, "o": "x"}
    assert schema.load(row) == {"instruction": "do", "input": "", "o": "x"}
    assert schema.load(row | {"input": False}) == {"instruction": "do", "input": "false", "o": "x"}
    assert check_rows(schema, [{"instruction": "do", "o": "x"}]).bad == {0: ("column input is missing or empty",)}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (7, "7"),
        (8.0, "8"),
        (0.1, "0.1"),
        (np.int64(3), "3"),
        (np.float32(0.1), "0.1"),
        (" kept ", " kept "),
        (decimal.Decimal("1.50"), "1.50"),
        (datetime.date(2024, 1, 2), "2024-01-02"),
        (1e300, "1e+300"),
        (True, "true"),
        (False, "false"),
        (np.bool_(True), "true"),
    ],
)
def test_numbers_dates_and_booleans_are_converted_to_plain_text(value: object, text: str) -> None:
    assert value_of("text", value) == text


@pytest.mark.parametrize("value", [True, False, np.bool_(True)])
def test_booleans_are_the_same_text_as_input_and_as_label(value: object) -> None:
    schema = schema_of("{name: o, type: category, decoder: {labels: ['true', 'false']}}")
    row = schema.load({"q": value, "o": value})
    assert row["q"] == row["o"] == json.dumps(bool(value))


@pytest.mark.parametrize("value", [["a"], {"a": 1}, b"x"])
def test_a_value_that_is_not_text_is_reported(value: object) -> None:
    assert reason_of("text", value) == f"column o: {value!r} is not text"


@pytest.mark.parametrize("value", [None, "", "  \n", float("nan"), np.float64("nan"), pd.NA, pd.NaT])
@pytest.mark.parametrize("kind", FEATURES)
def test_missing_values_drop_the_row(kind: str, value: object) -> None:
    assert reason_of(kind, value) == "column o is missing or empty"


def test_a_missing_column_is_a_missing_value() -> None:
    assert check_rows(schema_of(FEATURES["text"]), [{"q": "a"}]).bad == {0: ("column o is missing or empty",)}


def test_missing_values_are_filled_if_configured() -> None:
    fill = "preprocessing: {missing_value_strategy: fill_with_const, fill_value: none given}"
    schema = schema_of(FEATURES["text"], inputs=f"{{name: q, {fill}}}")
    assert schema.load({"q": None, "o": "x"}) == schema.load({"o": "x"}) == {"q": "none given", "o": "x"}


def test_a_fill_value_is_validated() -> None:
    schema = schema_of(
        "{name: o, type: number, preprocessing: {missing_value_strategy: fill_with_const, fill_value: '3'}}"
    )
    assert schema.load({"q": "a", "o": None})["o"] == 3


def test_lower_case_is_applied() -> None:
    schema = schema_of(FEATURES["text"], inputs="{name: q, preprocessing: {lowercase: true}}")
    assert schema.load({"q": "ABC", "o": "ABC"}) == {"q": "abc", "o": "ABC"}


def test_lower_case_is_applied_to_the_known_labels_too() -> None:
    schema = schema_of("{name: o, type: category, preprocessing: {lowercase: true}, decoder: {labels: [Good, BAD]}}")
    assert [schema.load({"q": "a", "o": label})["o"] for label in ("Good", "bad")] == ["good", "bad"]


def test_labels_are_stripped_and_must_be_known() -> None:
    assert value_of("category", " good ") == "good"
    assert reason_of("category", "great") == "column o: 'great' is none of the labels good, bad"
    assert schema_of("{name: o, type: category}").load({"q": "a", "o": 1})["o"] == "1"
    assert [schema_of("{name: o, type: category}").load({"q": "a", "o": o})["o"] for o in (True, False)] == [
        "true",
        "false",
    ]


@pytest.mark.parametrize(
    ("value", "number"), [("4", 4), (" 2.50 ", 2.5), (3.0, 3), (np.int32(1), 1), ("1e1", 10), (0, 0)]
)
def test_numbers_must_be_finite_and_whole_numbers_are_integers(value: object, number: float) -> None:
    result = value_of("number", value)
    assert (result, type(result)) == (number, type(number))


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("four", "'four' is not a finite number"),
        ("1,000", "'1,000' is not a finite number"),
        ("1 000", "'1 000' is not a finite number"),
        ("1_000", "'1_000' is not a finite number"),
        ("12.5k", "'12.5k' is not a finite number"),
        ("-$5", "'-$5' is not a finite number"),
        (float("inf"), "inf is not a finite number"),
        ("1e999", "'1e999' is not a finite number"),
        (True, "True is not a number"),
        ([1], "[1] is not a number"),
        (-1, "-1 is below the decoder's minimum 0"),
        (11, "11 is above the decoder's maximum 10"),
    ],
)
def test_a_value_that_is_not_a_number_is_reported(value: object, reason: str) -> None:
    assert reason_of("number", value) == f"column o: {reason}"


def test_a_text_of_a_million_digits_is_refused_in_one_pass() -> None:
    """In quadratic time the test would exceed its time limit."""
    assert "is not a finite number" in str(reason_of("number", "1" * 1_000_000 + "x"))


def test_a_range_may_contain_a_single_number() -> None:
    schema = schema_of("{name: o, type: number, decoder: {minimum: 3, maximum: 3}}")
    assert schema.load({"q": "a", "o": "3"})["o"] == 3


def test_json_may_be_a_value_or_text() -> None:
    assert value_of("json", '{"n": 1}') == value_of("json", {"n": np.int64(1)}) == {"n": 1}
    assert schema_of("{name: o, type: json}").load({"q": "a", "o": np.array([1, 2])})["o"] == [1, 2]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (
            "{n: 1}",
            "'{n: 1}' is not JSON (Expecting property name enclosed in double quotes: line 1 column 2 (char 1))",
        ),
        ('{"n": NaN}', "'{\"n\": NaN}' is not JSON (NaN is not a JSON number)"),
        ('{"n": 1, "n": 2}', "the key 'n' occurs twice in an object; remove or rename one"),
        ('{"n": "1"}', "n: '1' is not of type 'integer'"),
        ("[]", "[] is not of type 'object'"),
        ({"n": float("inf")}, "inf is not a JSON number"),
        ({"n": {1}}, "{1} is not a JSON value"),
    ],
)
def test_invalid_json_or_a_broken_schema_is_reported(value: object, reason: str) -> None:
    assert reason_of("json", value) == f"column o: {reason}"


def test_every_row_is_clean_or_has_reasons() -> None:
    rows = [{"q": "a", "o": "good"}, {"q": None, "o": "worst"}, {"q": "b", "o": "bad"}, "no row"]
    checked = check_rows(schema_of(FEATURES["category"]), rows)  # type: ignore[arg-type]
    assert checked.clean == {0: {"q": "a", "o": "good"}, 2: {"q": "b", "o": "bad"}}
    assert checked.bad == {
        1: ("column q is missing or empty",),
        3: ("'no row' is not a row; a row is a mapping from column to value",),
    }


def test_all_wrong_columns_are_reported() -> None:
    schema = schema_of(FEATURES["category"] + ", {name: n, type: number}")
    assert check_rows(schema, [{"q": "a", "o": "c", "n": "d"}]).bad == {
        0: ("column o: 'c' is none of the labels good, bad", "column n: 'd' is not a finite number")
    }


@pytest.mark.parametrize("kind", FEATURES)
def test_checked_rows_have_the_values_and_reasons_of_the_schema(kind: str) -> None:
    schema = schema_of(FEATURES[kind], inputs="{name: q, column: a.b}, {name: r, preprocessing: {lowercase: true}}")
    values: list[object] = ["good", 7, 7.0, '{"n": 1}', {"n": 1}, True, [1], "", " \u2003", None, float("nan"), pd.NA]
    rows: list[object] = [{"a.b": value, "r": "R", "o": value} for value in values]
    rows += [{"a.b": "x", "o": "good"}, {"a.b": "x", "r": "", "o": 3}, ["a.b", "r", "o"], "row", None]
    rows += [defaultdict(str, {"a.b": "x", "r": "y"}), UserDict({"a.b": "x", "r": "y", "o": "good"})]

    checked = check_rows(schema, rows)  # type: ignore[arg-type] # also what is not a row

    for index, row in enumerate(rows):
        if index in checked.clean:
            assert checked.clean[index] == schema.load(row)  # type: ignore[arg-type]
            continue
        with pytest.raises(ValidationError) as caught:
            schema.load(row)  # type: ignore[arg-type]
        assert checked.bad[index] == tuple(reasons(caught.value))
    assert checked.clean
    assert len(checked.clean) + len(checked.bad) == len(rows)
    assert "o" not in rows[-2], "a row is not changed"
