"""The output type json: a JSON value."""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from pydantic import model_validator

from partita_schema.base import ConfigModel, PositiveInt, StrictBool, rule_error
from partita_schema.cells import CellError, compact_json, parse_cell, plain_json
from partita_schema.sections.outputs.base import OutputBase, ReadCell, ValuePreprocessing
from partita_schema.sections.outputs.grammar_rules import json_rule


class JsonDecoder(ConfigModel):
    """Extraction of a JSON value from an answer."""

    type: Literal["text_parser"] = "text_parser"
    """Extract a JSON value, with or without a Markdown code fence."""
    json_schema: dict[str, Any] | None = None
    """JSON Schema that the value must satisfy. Default: any JSON value is valid."""
    constrain: StrictBool = False
    """Constrained decoding: only tokens that json_schema allows are generated, or any JSON object without a
    json_schema. An answer that reaches the token limit is still cut off."""
    max_new_tokens: PositiveInt | None = None
    """Maximum number of generated tokens, unless generation.max_new_tokens is set. Default: the max_sequence_length of
    the feature."""

    @model_validator(mode="after")
    def schema_is_one(self) -> "JsonDecoder":
        if self.json_schema is not None:
            check_json_schema(self.json_schema)
        return self


def check_json_schema(json_schema: dict[str, Any]) -> None:
    """Raise a rule error if a mapping is not a valid JSON Schema, or refers to something outside itself."""
    # jsonschema takes longer to import than all of this package.
    from jsonschema.exceptions import SchemaError

    from partita_schema.json_values import broken_reference, draft_of

    draft = draft_of(json_schema)
    if draft is None:
        raise rule_error(f"no draft is named {json_schema['$schema']!r}; remove $schema", at="json_schema")
    try:
        draft.check_schema(json_schema)
    except SchemaError as error:
        path = "".join(f".{part}" for part in error.absolute_path)
        raise rule_error(f"is not a JSON Schema: {error.message}; fix json_schema{path}", at="json_schema") from None
    reference = broken_reference(json_schema)
    if reference is not None:
        raise rule_error(
            f"$ref {reference!r} leads nowhere in this schema; write what it means under $defs", at="json_schema"
        )


class JsonOutput(OutputBase):
    """A JSON answer."""

    type: Literal["json"]
    """JSON value."""
    preprocessing: ValuePreprocessing = ValuePreprocessing.model_construct()
    """How the column becomes the training target."""
    decoder: JsonDecoder = JsonDecoder.model_construct()
    """How a JSON value is extracted from an answer."""

    METRICS: ClassVar = {
        "exact_match": "higher",
        "valid": "higher",
        "field_accuracy": "higher",
        "joint_accuracy": "higher",
        "slot_accuracy": "higher",
        "slot_f1": "higher",
    }

    @property
    def constrain(self) -> bool:
        return self.decoder.constrain

    def cell_reader(self) -> ReadCell:
        from partita_schema.json_values import TOO_DEEP, is_too_deep, json_validator, schema_mistake

        schema = self.decoder.json_schema
        validator = json_validator(schema) if schema is not None else None

        def read_value(value: Any) -> Any:
            decoded = parse_cell(value) if isinstance(value, str) else value
            if is_too_deep(decoded):
                raise CellError(f"the value is {TOO_DEEP}")
            decoded = plain_json(decoded)
            mistake = schema_mistake(validator, decoded) if validator is not None else None
            if mistake is not None:
                raise CellError(mistake)
            return decoded

        return read_value

    def answer_text(self, value: Any) -> str:
        return compact_json(value)

    def grammar(self, rule: str, *, seen: Sequence[str], alone: bool) -> list[str]:
        schema = self.decoder.json_schema
        return [json_rule(rule, ({"type": "object"} if alone else {}) if schema is None else schema)]
