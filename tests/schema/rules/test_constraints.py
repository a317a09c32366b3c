"""Tests of the settings that are refused with constrained or scored answers."""

from typing import Any

import pytest

from ..refusals import problems_of

JSON: dict[str, Any] = {"name": "value", "type": "json", "decoder": {"constrain": True}}
LABEL: dict[str, Any] = {"name": "label", "type": "category", "decoder": {"scoring": True, "labels": ["a", "b"]}}
SERVER = {"type": "endpoint", "url": "http://localhost:8000/v1"}


def problems(*outputs: dict[str, Any], **sections: Any) -> list[str]:
    raw = {
        "base_model": "m",
        "input_features": [{"name": "q", "type": "text"}],
        "output_features": list(outputs),
        **sections,
    }
    return problems_of(raw)


def held(schema: dict[str, Any]) -> dict[str, Any]:
    return {**JSON, "decoder": {"constrain": True, "json_schema": schema}}


def test_plain_configurations_may_constrain_and_score() -> None:
    assert problems(JSON) == []
    assert problems(JSON, {"name": "other", "type": "text"}, {"name": "n", "type": "number"}) == []
    assert problems(JSON, generation={"do_sample": True, "top_k": 3, "repetition_penalty": 1.2, "logprobs": True}) == []
    assert problems(LABEL, generation={"logprobs": True}) == []


@pytest.mark.parametrize(
    "options", [{"num_beams": 2}, {"guidance_scale": 1.5}, {"slots": False}], ids=["num_beams", "guidance", "slots"]
)
def test_options_without_slots_are_refused_with_constraints(options: dict[str, Any]) -> None:
    key = next(iter(options))
    reported = problems(JSON, generation=options)
    assert len(reported) == 1
    assert f"generation.{key}: constrained answers are impossible with {key}; remove it, or constrain" in reported[0]


def test_a_stop_text_is_refused_with_constrained_json() -> None:
    reported = problems(JSON, generation={"stop": ["\n"]})
    assert len(reported) == 1
    assert "generation.stop: a stop text would cut the JSON of constrained answers; remove it" in reported[0]


def test_all_or_no_json_outputs_of_an_object_are_constrained() -> None:
    reported = problems({"name": "first", "type": "json"}, JSON)
    assert len(reported) == 1
    assert (
        "output_features[0].decoder.constrain: several outputs are one JSON object, which is constrained as a whole; "
        "write constrain: true for each json output, or for none" in reported[0]
    )
    assert problems({"name": "first", "type": "json"}, {**JSON, "decoder": {}}) == []


def test_a_schema_that_no_text_fits_is_refused() -> None:
    endless = {"anyOf": [{"$ref": "#"}]}
    for outputs in ((held(endless),), ({"name": "t", "type": "text"}, held(endless))):
        assert len(reported := problems(*outputs)) == 1
        assert "answers cannot be held to this json_schema (no text fits it); fix json_schema, or remove" in reported[0]
    assert problems(held({"type": "object", "properties": {"a": {"$ref": "#"}}})) == []


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "not": {"required": ["a"]}},
        {"type": "array", "contains": {"const": 1}},
        {"type": "array", "uniqueItems": True},
        {"type": "object", "if": {}, "then": {"required": ["a"]}},
        {"type": "string", "format": "no-such-format"},
        {"type": "string", "pattern": "^(?=a)[ab]+$"},
        {"type": "integer", "minimum": 10**20},
    ],
    ids=lambda schema: str(list(schema)[1]),
)
def test_a_schema_that_the_grammar_does_not_support_is_refused_with_the_unsupported_part(
    schema: dict[str, Any],
) -> None:
    part = "look-around" if "pattern" in schema else schema.get("format") or list(schema)[1]
    for outputs in ((held(schema),), ({"name": "t", "type": "text"}, held(schema))):
        reported = problems(*outputs)
        assert len(reported) == 1
        place = len(outputs) - 1
        assert (
            f"output_features[{place}].decoder.constrain: answers cannot be held to this json_schema (" in reported[0]
        )
        assert part in reported[0].partition("(")[2].partition(")")[0]
        assert "fix json_schema, or remove constrain" in reported[0]
    unheld = {**JSON, "decoder": {"json_schema": schema}}
    assert problems(unheld) == []


@pytest.mark.parametrize(
    "schema",
    [
        {"$schema": "http://json-schema.org/draft-07/schema#", "$ref": "#/definitions/a", "definitions": {"a": {}}},
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "title": "t", "description": "d", "examples": [{}]},
        {"oneOf": [{"type": "integer"}, {"type": "null"}]},
        {"allOf": [{"type": "object", "required": ["a"]}, {"properties": {"a": {"type": "string", "pattern": "^x"}}}]},
        {"type": "string", "format": "date-time", "x-guidance": {"whitespace_flexible": True}},
    ],
)
def test_schemas_of_many_kinds_are_supported(schema: dict[str, Any]) -> None:
    assert problems(held(schema)) == []


def test_constraints_and_scoring_are_refused_with_a_server() -> None:
    reported = problems(JSON, backend=SERVER)
    assert len(reported) == 1
    assert "output_features[0].decoder.constrain: a server constrains its answers itself; remove it, and" in reported[0]
    assert "write response_format or the like in backend.extra_body" in reported[0]
    reported = problems(LABEL, backend=SERVER)
    assert len(reported) == 1
    assert (
        "output_features[0].decoder.scoring: servers do not return the probability of a given text; remove "
        "it" in reported[0]
    )


def test_scoring_needs_a_label_that_is_the_whole_answer() -> None:
    reported = problems({"name": "t", "type": "text"}, LABEL)
    assert len(reported) == 1
    assert (
        "output_features[1].decoder.scoring: only the label of a single output is scored; remove it, or" in reported[0]
    )


@pytest.mark.parametrize(
    ("part", "key", "value"),
    [
        ("decoder", "match", {"a": {"value": "x"}}),
        ("decoder", "fallback_label", "a"),
        ("preprocessing", "fallback_label", "a"),
        ("preprocessing", "max_sequence_length", 5),
    ],
)
def test_settings_that_read_generated_answers_are_refused_with_scoring(part: str, key: str, value: Any) -> None:
    output = {**LABEL, part: {**LABEL.get(part, {}), key: value}}
    reported = problems(output)
    assert len(reported) == 1
    assert (
        f"output_features[0].{part}.{key}: {key} reads generated answers, and scoring generates none; remove one of "
        "the two" in reported[0]
    )


@pytest.mark.parametrize(
    "options",
    [{"do_sample": True}, {"max_new_tokens": 5}, {"num_beams": 3}, {"stop": ["x"]}, {"slots": False}, {"seed": 3}],
    ids=lambda options: str(next(iter(options))),
)
def test_options_of_generation_have_no_effect_on_scoring(options: dict[str, Any]) -> None:
    key = next(iter(options))
    reported = problems(LABEL, generation=options)
    assert len(reported) == 1
    assert f"generation.{key}: scoring generates nothing, so {key} has no effect; remove one of the two" in reported[0]


def test_a_custom_formatter_is_refused_with_scoring() -> None:
    reported = problems(LABEL, data={"formatter": "mine.py:shape"})
    assert len(reported) == 1
    assert (
        "data.formatter: a custom formatter writes answers that scoring does not know; remove it, or scoring"
        in reported[0]
    )
