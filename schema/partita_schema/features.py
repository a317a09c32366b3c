"""Input and output features: text or dialogue in; text, category, number or JSON out."""

import re
import warnings
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from partita_schema.base import ConfigModel, Name, Number, PositiveInt, StrictBool, rule_error


class InputPreprocessing(ConfigModel):
    """How a column becomes part of the prompt."""

    max_sequence_length: PositiveInt | None = None
    """Maximum number of tokens kept from this column. Default: all."""
    missing_value_strategy: Literal["drop_row", "fill_with_const"] = "drop_row"
    """What to do with a row without a value. drop_row: drop and count the row; fill_with_const: use fill_value."""
    fill_value: str = ""
    """Text for missing values; used with fill_with_const."""
    lowercase: StrictBool = False
    """Convert the text to lower case."""


class OutputPreprocessing(InputPreprocessing):
    """How a column becomes the training target, and how long an answer may be."""

    max_sequence_length: PositiveInt | None = None
    """Maximum number of answer tokens kept in training. Also the maximum number of generated tokens, unless
    generation.max_new_tokens is set. Default: all tokens in training."""


class ValuePreprocessing(ConfigModel):
    """How a column becomes the training target, and how long an answer may be."""

    max_sequence_length: PositiveInt | None = None
    """Maximum number of answer tokens kept in training. Also the maximum number of generated tokens, unless
    generation.max_new_tokens is set. Default: all tokens in training."""
    missing_value_strategy: Literal["drop_row", "fill_with_const"] = "drop_row"
    """What to do with a row without a value. drop_row: drop and count the row; fill_with_const: use fill_value."""
    fill_value: str = ""
    """Value for missing values, as text; used with fill_with_const."""


class CategoryPreprocessing(ConfigModel):
    """How a column becomes a label."""

    missing_value_strategy: Literal["drop_row", "fill_with_const"] = "drop_row"
    """What to do with a row without a label. drop_row: drop and count the row; fill_with_const: use fill_value."""
    fill_value: str = ""
    """Label for missing values; used with fill_with_const."""
    lowercase: StrictBool = False
    """Convert labels to lower case."""
    fallback_label: Name | None = None
    """Alias of decoder.fallback_label."""
    vocab: tuple[Name, ...] | None = None
    """Alias of decoder.labels."""
    max_sequence_length: PositiveInt | None = None
    """Maximum number of generated tokens. Default: enough for the longest label."""


class Match(ConfigModel):
    """A rule that recognizes a label in an answer."""

    type: Literal["contains", "regex", "exact"] = "contains"
    """How `value` is compared with the answer, ignoring case. contains: the answer contains it; regex: it matches
    somewhere in the answer; exact: the answer equals it, without surrounding whitespace."""
    value: Name
    """Text or regular expression to look for."""

    @model_validator(mode="after")
    def regex_compiles(self) -> "Match":
        if self.type == "regex":
            check_regex(self.value, at="value")
        return self


def check_regex(pattern: str, *, at: str) -> None:
    try:
        with warnings.catch_warnings(action="ignore", category=FutureWarning):
            re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise rule_error(f"{pattern!r} is not a regular expression ({error}); fix the pattern", at=at) from None


class TextDecoder(ConfigModel):
    """The answer as it is, without surrounding whitespace."""

    type: Literal["text_extractor"] = "text_extractor"
    """Use the whole answer."""
    max_new_tokens: PositiveInt | None = None
    """Maximum number of generated tokens, unless generation.max_new_tokens is set. Default: the max_sequence_length of
    the feature."""


class CategoryDecoder(ConfigModel):
    """Extraction of a label from an answer."""

    type: Literal["category_extractor"] = "category_extractor"
    """Extract one label of a fixed set."""
    labels: tuple[Name, ...] | None = None
    """All labels. Default: the keys of `match`; without `match`, the labels seen in the training data."""
    match: dict[str, Match] | None = None
    """Rules by label, tried in the order written. Default: the label that equals the answer, otherwise the only label
    that the answer contains."""
    fallback_label: Name | None = None
    """Label for answers that match no rule. Default: no label; the row counts as wrong."""
    scoring: StrictBool = False
    """Score each label instead of generating, and choose the label with the highest probability as a complete answer.
    Adds the columns `<output>_probability` and `<output>_probabilities` to predictions."""

    @model_validator(mode="after")
    def rules_name_labels(self) -> "CategoryDecoder":
        if self.labels is not None and len(set(self.labels)) < len(self.labels):
            twice = next(label for label in self.labels if self.labels.count(label) > 1)
            raise rule_error(f"labels holds {twice!r} twice; write each label once", at="labels")
        unknown = [label for label in self.match or {} if self.labels is not None and label not in self.labels]
        if unknown:
            raise rule_error(
                f"match names {unknown[0]!r}, which is not in labels; add it there or remove the rule",
                at=f"match.{unknown[0]}",
            )
        return self


class NumberDecoder(ConfigModel):
    """Extraction of a number from an answer."""

    type: Literal["number_extractor"] = "number_extractor"
    """Extract a number."""
    regex: Name | None = None
    """Regular expression for the number: its first group, or the whole match if it has no group. Default: any decimal
    number; thousands separators are allowed."""
    pick: Literal["first", "last"] = "first"
    """Which number to use if the answer contains several."""
    minimum: Number | None = None
    """Smallest valid number; a smaller one is an invalid answer. Default: no limit."""
    maximum: Number | None = None
    """Largest valid number; a larger one is an invalid answer. Default: no limit."""

    @model_validator(mode="after")
    def range_is_not_empty(self) -> "NumberDecoder":
        if self.regex is not None:
            check_regex(self.regex, at="regex")
        if self.minimum is not None and self.maximum is not None and self.minimum > self.maximum:
            raise rule_error(
                f"minimum {self.minimum:g} is above maximum {self.maximum:g}; no number could be valid", at="minimum"
            )
        return self


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
        place = "".join(f".{part}" for part in error.absolute_path)
        raise rule_error(f"is not a JSON Schema: {error.message}; fix json_schema{place}", at="json_schema") from None
    reference = broken_reference(json_schema)
    if reference is not None:
        raise rule_error(
            f"$ref {reference!r} leads nowhere in this schema; write what it means under $defs", at="json_schema"
        )


class FeatureBase(ConfigModel):
    """Options of all features."""

    name: Name
    """Name of the feature in the prompt template and in predictions."""
    column: Name | None = None
    """Column of the data. Default: `name`."""

    @property
    def source_column(self) -> str:
        """The data column of this feature."""
        return self.column or self.name


class TextInput(FeatureBase):
    """A text column that goes into the prompt."""

    type: Literal["text"] = "text"
    """Text input."""
    preprocessing: InputPreprocessing = InputPreprocessing.model_construct()
    """How the column becomes part of the prompt."""


class DialogueInput(FeatureBase):
    """A dialogue that the model continues. It is the whole prompt."""

    type: Literal["dialogue"]
    """Dialogue input, in any format of `data.dialogue.format`."""


def text_unless_said(value: object) -> object:
    return {**value, "type": "text"} if isinstance(value, dict) and "type" not in value else value


InputFeature = Annotated[
    Annotated[TextInput | DialogueInput, Field(discriminator="type")], BeforeValidator(text_unless_said)
]
"""An input feature, selected by its type; text by default."""


class TextOutput(FeatureBase):
    """A free text answer."""

    type: Literal["text"]
    """Free text."""
    preprocessing: OutputPreprocessing = OutputPreprocessing.model_construct()
    """How the column becomes the training target."""
    decoder: TextDecoder = TextDecoder.model_construct()
    """How an answer is decoded."""


class CategoryOutput(FeatureBase):
    """A label of a fixed set."""

    type: Literal["category"]
    """Category: one label of a fixed set."""
    preprocessing: CategoryPreprocessing = CategoryPreprocessing.model_construct()
    """How the column becomes a label."""
    decoder: CategoryDecoder = CategoryDecoder.model_construct()
    """How a label is extracted from an answer."""

    @model_validator(mode="after")
    def said_in_one_place(self) -> "CategoryOutput":
        for ours, theirs in (("labels", "vocab"), ("fallback_label", "fallback_label")):
            if getattr(self.decoder, ours) is not None and getattr(self.preprocessing, theirs) is not None:
                raise rule_error(
                    f"decoder.{ours} and preprocessing.{theirs} say the same; keep decoder.{ours}",
                    at=f"preprocessing.{theirs}",
                )
        if self.labels is not None and self.fallback_label is not None and self.fallback_label not in self.labels:
            part = "decoder" if self.decoder.fallback_label is not None else "preprocessing"
            raise rule_error(
                f"{self.fallback_label!r} is not one of the labels; write one of {', '.join(self.labels)}",
                at=f"{part}.fallback_label",
            )
        return self

    @property
    def labels(self) -> tuple[str, ...] | None:
        """All labels if the file lists them, otherwise None."""
        if self.decoder.labels is not None:
            return self.decoder.labels
        if self.preprocessing.vocab is not None:
            return self.preprocessing.vocab
        return tuple(self.decoder.match) if self.decoder.match else None

    @property
    def fallback_label(self) -> str | None:
        """Label for answers that match no rule, or None."""
        return self.decoder.fallback_label or self.preprocessing.fallback_label


class NumberOutput(FeatureBase):
    """A numeric answer."""

    type: Literal["number"]
    """Number."""
    preprocessing: ValuePreprocessing = ValuePreprocessing.model_construct()
    """How the column becomes the training target."""
    decoder: NumberDecoder = NumberDecoder.model_construct()
    """How a number is extracted from an answer."""


class JsonOutput(FeatureBase):
    """A JSON answer."""

    type: Literal["json"]
    """JSON value."""
    preprocessing: ValuePreprocessing = ValuePreprocessing.model_construct()
    """How the column becomes the training target."""
    decoder: JsonDecoder = JsonDecoder.model_construct()
    """How a JSON value is extracted from an answer."""


OutputFeature = Annotated[TextOutput | CategoryOutput | NumberOutput | JsonOutput, Field(discriminator="type")]


class InputDefaults(ConfigModel):
    """Default options of all text inputs."""

    preprocessing: InputPreprocessing = InputPreprocessing.model_construct()
    """Default preprocessing of text inputs; options set in a feature override it."""


class Defaults(ConfigModel):
    """Default options by feature type."""

    text: InputDefaults = InputDefaults.model_construct()
    """Default options of text inputs."""
