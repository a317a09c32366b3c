"""Validation of rows with a marshmallow schema built from the features of a configuration.

A row is a mapping from column to value. The result has values by *feature name*, plus columns that only the template
names under their own names: text and labels as str, numbers as int or float, JSON as plain values. Other columns are
ignored. A dialogue is returned in the common form of dialogue_formats, cut before the answer to its last question; that
answer is the output. An invalid row raises marshmallow's ValidationError with reasons by column. Its `valid_data` is
incomplete and must not be used.
"""

import datetime
import decimal
import json
import math
import numbers
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from marshmallow import RAISE, Schema, ValidationError, fields, post_load, pre_load

from partita_schema.config import Config
from partita_schema.dialogue import DialogueConfig
from partita_schema.dialogue_formats import FormatError, is_read, read_dialogue
from partita_schema.errors import shortened
from partita_schema.features import CategoryOutput, DialogueInput, JsonOutput, NumberOutput, OutputFeature, TextInput
from partita_schema.json_values import TOO_DEEP, is_too_deep, json_validator, schema_mistake

NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?")


def is_missing(value: object) -> bool:
    """Return whether a cell is empty: None, NaN, pandas' NA and NaT, or a blank string."""
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    if isinstance(value, str):
        return not value.strip()
    return isinstance(value, numbers.Real) and bool(value != value)  # math.isnan fails for numbers of 400 digits


def plain_text(value: object) -> str:
    """Return a string, date or number as text, with 8.0 as 8. Raises ValidationError for other types."""
    if isinstance(value, str):
        return value
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return str(int(value))
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        number = float(str(value))  # via str, so that a 32-bit 0.1 is 0.1 and not 0.10000000149011612
        return str(int(number)) if number.is_integer() and abs(number) < 2**53 else repr(number)
    if isinstance(value, decimal.Decimal):
        return str(value)
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    raise ValidationError(f"{shown(value)} is not text")


def shown(value: object) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number of 5,000 digits, or a list that contains itself
        text = f"a {type(value).__name__}"
    return shortened(text)


class TextColumn(fields.Field[str]):
    """Text. Numbers and dates are converted."""

    def __init__(self, *, lowercase: bool = False) -> None:
        super().__init__(required=True)
        self.lowercase = lowercase

    def _deserialize(self, value: Any, attr: str | None, data: Mapping[str, Any] | None, **_: Any) -> str:
        text = plain_text(value)
        return text.lower() if self.lowercase else text


class LabelColumn(TextColumn):
    """A label without surrounding whitespace, from the known labels if there are any."""

    def __init__(self, *, labels: tuple[str, ...] | None, lowercase: bool) -> None:
        super().__init__(lowercase=lowercase)
        self.labels = None if labels is None else frozenset(labels)
        self.listed = ", ".join(labels or ())

    def _deserialize(self, value: Any, attr: str | None, data: Mapping[str, Any] | None, **_: Any) -> str:
        label = super()._deserialize(value, attr, data).strip()
        if self.labels is not None and label not in self.labels:
            raise ValidationError(f"{shown(label)} is none of the labels {self.listed}")
        return label


class NumberColumn(fields.Field[int | float]):
    """A finite number, or its text. Whole numbers are returned as int."""

    def __init__(self, *, minimum: float | None, maximum: float | None) -> None:
        super().__init__(required=True)
        self.minimum, self.maximum = minimum, maximum

    def _deserialize(self, value: Any, attr: str | None, data: Mapping[str, Any] | None, **_: Any) -> int | float:
        text = str(value).strip()
        if isinstance(value, bool) or not isinstance(value, str | numbers.Real | decimal.Decimal):
            raise ValidationError(f"{shown(value)} is not a number")
        if not NUMBER.fullmatch(text) or not math.isfinite(float(text)):
            raise ValidationError(f"{shown(value)} is not a finite number")
        number = float(text)
        if self.minimum is not None and number < self.minimum:
            raise ValidationError(f"{text} is below the decoder's minimum {self.minimum:g}")
        if self.maximum is not None and number > self.maximum:
            raise ValidationError(f"{text} is above the decoder's maximum {self.maximum:g}")
        if re.fullmatch(r"[-+]?\d+", text):
            return int(text)
        return int(number) if number.is_integer() and abs(number) < 2**53 else number


class JsonColumn(fields.Field[Any]):
    """A JSON value, or its text, that satisfies the JSON Schema if there is one."""

    def __init__(self, *, json_schema: dict[str, Any] | None) -> None:
        super().__init__(required=True)
        self.validator = json_validator(json_schema) if json_schema is not None else None

    def _deserialize(self, value: Any, attr: str | None, data: Mapping[str, Any] | None, **_: Any) -> Any:
        decoded = parse_json(value) if isinstance(value, str) else value
        if is_too_deep(decoded):
            raise ValidationError(f"the value is {TOO_DEEP}")
        decoded = plain_json(decoded)
        if self.validator is not None:
            mistake = schema_mistake(self.validator, decoded)
            if mistake is not None:
                raise ValidationError(mistake)
        return decoded


class DialogueColumn(fields.Field[dict[str, Any]]):
    """A dialogue of any format: the messages up to a question, and the correct answers to it.

    With `supervised`, the last learned answer is removed from the messages, and it is an error if there is none.
    Without it, trailing assistant messages are removed. A dialogue already in the common form is unchanged, but with
    `supervised` only if it has labels.
    """

    def __init__(self, *, column: str, options: DialogueConfig, supervised: bool) -> None:
        super().__init__(required=True)
        self.column, self.options, self.supervised = column, options, supervised

    def _deserialize(self, value: Any, attr: str | None, data: Mapping[str, Any] | None, **_: Any) -> dict[str, Any]:
        try:
            dialogue = read_dialogue(
                value, column=self.column, form=self.options.format, ignored=self.options.ignore_keys
            )
        except FormatError as error:
            raise ValidationError(str(error)) from None
        if (is_read(value.get(self.column)) or is_read(value)) and (dialogue["labels"] or not self.supervised):
            return dialogue
        messages = dialogue["messages"]
        if self.supervised:
            place = max((place for place, message in enumerate(messages) if message.get("learned")), default=None)
            if place is None:
                raise ValidationError("the dialogue has no answer to learn: no assistant message after a question")
            right = messages[place].get("labels") or [messages[place]["content"]]
            return {"messages": messages[:place], "labels": right}
        while messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        return {"messages": messages, "labels": []}


def parse_json(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=refuse_constant)
    except RecursionError:
        raise ValidationError(f"the value is {TOO_DEEP}") from None
    except ValueError as error:
        raise ValidationError(f"{shown(text)} is not JSON ({error})") from None


def refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def plain_json(value: Any) -> Any:
    """Return a value as plain JSON types. NumPy arrays and scalars are converted."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(item) for item in value]
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValidationError(f"{value} is not a JSON number")
        return value
    if hasattr(value, "tolist"):
        return plain_json(value.tolist())
    raise ValidationError(f"{shown(value)} is not a JSON value")


@dataclass(frozen=True)
class Cell:
    """One value to read from a row."""

    name: str
    """Key in the result."""
    column: str
    """Column of the data."""
    field: fields.Field[Any]
    """Field that validates the value."""
    fill: str | None = None
    """Value for an empty cell, or None if an empty cell is an error."""
    absent: bool = False
    """Whether a missing column is filled too."""
    whole: bool = False
    """Whether the value is read from the whole row, because a dialogue may use several columns."""


class RowSchema(Schema):
    """Schema of one row, see the module. Fields are named by index, because column names may contain dots."""

    class Meta:
        unknown = RAISE

    cells: tuple[Cell, ...] = ()
    reply: tuple[str, str] | None = None
    """Names of the dialogue and of the output that takes its first correct answer."""

    @pre_load
    def pick_columns(self, data: Any, **_: Any) -> dict[str, Any]:
        if not isinstance(data, Mapping):
            raise ValidationError(f"{shown(data)} is not a row; a row is a mapping from column to value")
        picked, errors = {}, {}
        for place, cell in enumerate(self.cells):
            value = data if cell.whole else data.get(cell.column)
            if not is_missing(value):
                picked[str(place)] = value
            elif cell.fill is None or (cell.column not in data and not cell.absent):
                errors[cell.column] = [f"column {cell.column} is missing or empty"]
            else:
                picked[str(place)] = cell.fill
        if errors:
            raise ValidationError(errors)
        return picked

    @post_load
    def by_name(self, data: Mapping[str, Any], **_: Any) -> dict[str, Any]:
        row = {cell.name: data[str(place)] for place, cell in enumerate(self.cells)}
        if self.reply is not None:
            dialogue, output = self.reply
            row[output] = row[dialogue]["labels"][0]
        return row

    def handle_error(self, error: ValidationError, data: Any, *, many: bool, **_: Any) -> None:
        """Report reasons by column name."""
        messages = error.messages if isinstance(error.messages, dict) else {"_schema": error.messages}
        error.messages = {
            self.cells[int(key)].column if str(key).isdigit() and not many else key: reasons
            for key, reasons in messages.items()
        }


def row_schema(config: Config, *, supervised: bool) -> RowSchema:
    """Return the schema of a row: the columns shown in the prompt, and with `supervised` also the outputs."""
    dialogue = config.dialogue_input
    inputs = {feature.name: feature for feature in config.input_features if isinstance(feature, TextInput)}
    if dialogue is not None:
        cells = [dialogue_cell(dialogue, options=config.data.dialogue, supervised=supervised)]
    else:
        cells = [input_cell(inputs[name]) if name in inputs else template_cell(name) for name in config.shown_columns]
    if supervised and dialogue is None:
        cells += [output_cell(feature) for feature in config.output_features]
    kind = RowSchema.from_dict({str(place): cell.field for place, cell in enumerate(cells)}, name="Row")
    schema = kind()
    assert isinstance(schema, RowSchema)
    schema.cells = tuple(cells)
    if supervised and dialogue is not None:
        schema.reply = dialogue.name, config.output_features[0].name
    return schema


def dialogue_cell(feature: DialogueInput, *, options: DialogueConfig, supervised: bool) -> Cell:
    column = feature.source_column
    field = DialogueColumn(column=column, options=options, supervised=supervised)
    return Cell(name=feature.name, column=column, field=field, whole=True)


def template_cell(column: str) -> Cell:
    """Return the cell of a column that only the template names. It must exist but may be empty."""
    return Cell(name=column, column=column, field=TextColumn(), fill="")


def input_cell(feature: TextInput) -> Cell:
    options = feature.preprocessing
    return Cell(
        name=feature.name,
        column=feature.source_column,
        field=TextColumn(lowercase=options.lowercase),
        fill=options.fill_value if options.missing_value_strategy == "fill_with_const" else None,
        absent=True,
    )


def output_cell(feature: OutputFeature) -> Cell:
    options = feature.preprocessing
    return Cell(
        name=feature.name,
        column=feature.source_column,
        field=output_field(feature),
        fill=options.fill_value if options.missing_value_strategy == "fill_with_const" else None,
        absent=True,
    )


def output_field(feature: OutputFeature) -> fields.Field[Any]:
    if isinstance(feature, CategoryOutput):
        return LabelColumn(labels=feature.labels, lowercase=feature.preprocessing.lowercase)
    if isinstance(feature, NumberOutput):
        return NumberColumn(minimum=feature.decoder.minimum, maximum=feature.decoder.maximum)
    if isinstance(feature, JsonOutput):
        return JsonColumn(json_schema=feature.decoder.json_schema)
    return TextColumn(lowercase=feature.preprocessing.lowercase)


@dataclass(frozen=True)
class CheckedRows:
    """Rows after validation."""

    clean: dict[int, dict[str, Any]]
    """Values by name, by row index."""
    bad: dict[int, tuple[str, ...]]
    """Reasons, by row index."""


def check_rows(schema: Schema, rows: Iterable[Mapping[str, Any]]) -> CheckedRows:
    """Validate rows. Each row is either in `clean` or in `bad`."""
    checked = CheckedRows({}, {})
    for place, row in enumerate(rows):
        try:
            checked.clean[place] = schema.load(row)
        except ValidationError as error:
            checked.bad[place] = tuple(reasons(error))
    return checked


def reasons(error: ValidationError) -> list[str]:
    """Return each reason as one text that names its column."""
    texts = []
    messages = error.messages if isinstance(error.messages, dict) else {"_schema": error.messages}
    for column, column_reasons in messages.items():
        for reason in column_reasons:
            named = column == "_schema" or reason.startswith(f"column {column} ")
            texts.append(reason if named else f"column {column}: {reason}")
    return texts
