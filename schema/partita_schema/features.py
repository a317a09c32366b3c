"""What goes in and what comes out: text or dialogues in; text, category, number or JSON out."""

import re
import warnings
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from partita_schema.base import Base, Count, Flag, Name, Number, broken


class InputPreprocessing(Base):
    """How a column becomes part of the prompt."""

    max_sequence_length: Count | None = None
    """Tokens of this column's text that are kept. Default: all."""
    missing_value_strategy: Literal["drop_row", "fill_with_const"] = "drop_row"
    """What happens to a row without a value: drop_row leaves it out (and counts it), fill_with_const writes
    fill_value."""
    fill_value: str = ""
    """Text for missing values with fill_with_const."""
    lowercase: Flag = False
    """Write the text in lower case."""


class OutputPreprocessing(InputPreprocessing):
    """How a column becomes the text that is learned, and how long an answer may be."""

    max_sequence_length: Count | None = None
    """Tokens of the answer that are kept in training, and the number of tokens generated where
    generation.max_new_tokens is not written. Default: all."""


class ValuePreprocessing(Base):
    """How a column becomes the value that is learned, and how long an answer may be."""

    max_sequence_length: Count | None = None
    """Tokens of the answer that are kept in training, and the number of tokens generated where
    generation.max_new_tokens is not written. Default: all."""
    missing_value_strategy: Literal["drop_row", "fill_with_const"] = "drop_row"
    """What happens to a row without a value: drop_row leaves it out (and counts it), fill_with_const writes
    fill_value."""
    fill_value: str = ""
    """The value for missing values with fill_with_const, as text."""


class CategoryPreprocessing(Base):
    """How a column becomes a label."""

    missing_value_strategy: Literal["drop_row", "fill_with_const"] = "drop_row"
    """What happens to a row without a label."""
    fill_value: str = ""
    """Label for missing values with fill_with_const."""
    lowercase: Flag = False
    """Write labels in lower case."""
    fallback_label: Name | None = None
    """Label for answers in which no label is found; the same as decoder.fallback_label."""
    vocab: tuple[Name, ...] | None = None
    """All labels; the same as decoder.labels."""
    max_sequence_length: Count | None = None
    """Number of tokens generated. Default: what the longest label needs."""


class Match(Base):
    """A rule that finds a label in an answer."""

    type: Literal["contains", "regex", "exact"] = "contains"
    """contains: the value stands anywhere; regex: it matches somewhere; exact: the stripped answer equals it. Case is
    ignored."""
    value: Name
    """Text or regular expression."""

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
        raise broken(f"{pattern!r} is no regular expression ({error}); mend the pattern", at=at) from None


class TextDecoder(Base):
    """The answer as it is, stripped."""

    type: Literal["text_extractor"] = "text_extractor"
    """The whole answer."""
    max_new_tokens: Count | None = None
    """Number of tokens generated, where generation.max_new_tokens is not written. Default: the feature's
    max_sequence_length."""


class CategoryDecoder(Base):
    """The label that an answer names."""

    type: Literal["category_extractor"] = "category_extractor"
    """A label out of a fixed set."""
    labels: tuple[Name, ...] | None = None
    """All labels. Default: the keys of match, else the labels seen in the training data."""
    match: dict[str, Match] | None = None
    """Rules by label, tried in the order written. Default: the answer equals a label, else contains just one."""
    fallback_label: Name | None = None
    """Label where no rule applies. Default: such a row has no label and counts as wrong."""
    scoring: Flag = False
    """Generate nothing and choose the label that is most probable as the whole answer, with its end. Adds the columns
    `<output>_probability` and `<output>_probabilities` to predictions."""

    @model_validator(mode="after")
    def rules_name_labels(self) -> "CategoryDecoder":
        if self.labels is not None and len(set(self.labels)) < len(self.labels):
            twice = next(label for label in self.labels if self.labels.count(label) > 1)
            raise broken(f"labels holds {twice!r} twice; write each label once", at="labels")
        unknown = [label for label in self.match or {} if self.labels is not None and label not in self.labels]
        if unknown:
            raise broken(
                f"match names {unknown[0]!r}, which is not in labels; add it there or remove the rule",
                at=f"match.{unknown[0]}",
            )
        return self


class NumberDecoder(Base):
    """The number that an answer holds."""

    type: Literal["number_extractor"] = "number_extractor"
    """A number."""
    regex: Name | None = None
    """Where the number stands: its first group, else the whole match. Default: any decimal number, thousands
    separators allowed."""
    pick: Literal["first", "last"] = "first"
    """Which number counts when there are several."""
    minimum: Number | None = None
    """A smaller number is not a valid answer."""
    maximum: Number | None = None
    """A larger number is not a valid answer."""

    @model_validator(mode="after")
    def range_is_not_empty(self) -> "NumberDecoder":
        if self.regex is not None:
            check_regex(self.regex, at="regex")
        if self.minimum is not None and self.maximum is not None and self.minimum > self.maximum:
            raise broken(
                f"minimum {self.minimum:g} is above maximum {self.maximum:g}; no number could be valid", at="minimum"
            )
        return self


class JsonDecoder(Base):
    """The JSON value in an answer."""

    type: Literal["text_parser"] = "text_parser"
    """A JSON value, fenced or not."""
    json_schema: dict[str, Any] | None = None
    """JSON Schema that a value must satisfy."""
    constrain: Flag = False
    """Let the model write only what json_schema allows, without one only an object; an answer that reaches its token
    limit is cut all the same."""
    max_new_tokens: Count | None = None
    """Number of tokens generated, where generation.max_new_tokens is not written. Default: the feature's
    max_sequence_length."""

    @model_validator(mode="after")
    def schema_is_one(self) -> "JsonDecoder":
        if self.json_schema is not None:
            check_json_schema(self.json_schema)
        return self


def check_json_schema(json_schema: dict[str, Any]) -> None:
    """Raises the error of a rule where a mapping is no JSON Schema, or refers to something outside itself."""
    # jsonschema takes longer to import than all of this package.
    from jsonschema.exceptions import SchemaError

    from partita_schema.json_values import broken_reference, draft_of

    draft = draft_of(json_schema)
    if draft is None:
        raise broken(f"no draft is named {json_schema['$schema']!r}; remove $schema", at="json_schema")
    try:
        draft.check_schema(json_schema)
    except SchemaError as error:
        place = "".join(f".{part}" for part in error.absolute_path)
        raise broken(f"is no JSON Schema: {error.message}; mend json_schema{place}", at="json_schema") from None
    reference = broken_reference(json_schema)
    if reference is not None:
        raise broken(
            f"$ref {reference!r} leads nowhere in this schema; write what it means under $defs", at="json_schema"
        )


class FeatureBase(Base):
    """What all features share."""

    name: Name
    """Name in the prompt template and in predictions."""
    column: Name | None = None
    """Column of the data. Default: name."""

    @property
    def source_column(self) -> str:
        """The column of the data that holds this feature."""
        return self.column or self.name


class TextInput(FeatureBase):
    """A text that goes into the prompt."""

    type: Literal["text"] = "text"
    """Inputs are text."""
    preprocessing: InputPreprocessing = InputPreprocessing.model_construct()
    """How the column becomes part of the prompt."""


class DialogueInput(FeatureBase):
    """A dialogue that is answered: the whole prompt."""

    type: Literal["dialogue"]
    """A dialogue, in any of the formats of data.dialogue."""


def text_unless_said(value: object) -> object:
    return {**value, "type": "text"} if isinstance(value, dict) and "type" not in value else value


InputFeature = Annotated[
    Annotated[TextInput | DialogueInput, Field(discriminator="type")], BeforeValidator(text_unless_said)
]
"""An input by its type; text where none is written."""


class TextOutput(FeatureBase):
    """A free text."""

    type: Literal["text"]
    """Free text."""
    preprocessing: OutputPreprocessing = OutputPreprocessing.model_construct()
    """How the column becomes the answer."""
    decoder: TextDecoder = TextDecoder.model_construct()
    """How an answer is read."""


class CategoryOutput(FeatureBase):
    """A label out of a fixed set."""

    type: Literal["category"]
    """A label."""
    preprocessing: CategoryPreprocessing = CategoryPreprocessing.model_construct()
    """How the column becomes a label."""
    decoder: CategoryDecoder = CategoryDecoder.model_construct()
    """How a label is found in an answer."""

    @model_validator(mode="after")
    def said_in_one_place(self) -> "CategoryOutput":
        for ours, theirs in (("labels", "vocab"), ("fallback_label", "fallback_label")):
            if getattr(self.decoder, ours) is not None and getattr(self.preprocessing, theirs) is not None:
                raise broken(
                    f"decoder.{ours} and preprocessing.{theirs} say the same; keep decoder.{ours}",
                    at=f"preprocessing.{theirs}",
                )
        if self.labels is not None and self.fallback_label is not None and self.fallback_label not in self.labels:
            part = "decoder" if self.decoder.fallback_label is not None else "preprocessing"
            raise broken(
                f"{self.fallback_label!r} is not one of the labels; write one of {', '.join(self.labels)}",
                at=f"{part}.fallback_label",
            )
        return self

    @property
    def labels(self) -> tuple[str, ...] | None:
        """All labels, where the file names them."""
        if self.decoder.labels is not None:
            return self.decoder.labels
        if self.preprocessing.vocab is not None:
            return self.preprocessing.vocab
        return tuple(self.decoder.match) if self.decoder.match else None

    @property
    def fallback_label(self) -> str | None:
        """The label of answers that name none."""
        return self.decoder.fallback_label or self.preprocessing.fallback_label


class NumberOutput(FeatureBase):
    """A number."""

    type: Literal["number"]
    """A number."""
    preprocessing: ValuePreprocessing = ValuePreprocessing.model_construct()
    """How the column becomes the answer."""
    decoder: NumberDecoder = NumberDecoder.model_construct()
    """How a number is found in an answer."""


class JsonOutput(FeatureBase):
    """A JSON value."""

    type: Literal["json"]
    """A JSON value."""
    preprocessing: ValuePreprocessing = ValuePreprocessing.model_construct()
    """How the column becomes the answer."""
    decoder: JsonDecoder = JsonDecoder.model_construct()
    """How a value is found in an answer."""


OutputFeature = Annotated[TextOutput | CategoryOutput | NumberOutput | JsonOutput, Field(discriminator="type")]


class InputDefaults(Base):
    """Defaults of all text inputs."""

    preprocessing: InputPreprocessing = InputPreprocessing.model_construct()
    """How a column becomes part of the prompt, where a feature does not say."""


class Defaults(Base):
    """Defaults by feature type."""

    text: InputDefaults = InputDefaults.model_construct()
    """Defaults of text inputs."""
