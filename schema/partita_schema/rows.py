"""Validation of rows with a marshmallow schema built from the features of a configuration.

A row is a mapping from column to value. The result has values by *feature name*, plus columns that only the template
names under their own names: text and labels as str, numbers as int or float, JSON as plain values. Other columns are
ignored. A dialogue is returned in the common form of dialogue_formats, cut before the answer to its last question; that
answer is the output. An invalid row raises marshmallow's ValidationError with reasons by column. Its `valid_data` is
incomplete and must not be used.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from marshmallow import RAISE, Schema, ValidationError, fields, post_load, pre_load

from partita_schema.cells import CellError, is_missing, shown, text_reader
from partita_schema.config import Config
from partita_schema.dialogue_formats import FormatError, is_read, read_dialogue
from partita_schema.sections.dialogue import DialogueConfig
from partita_schema.sections.features import DialogueInput, TextInput
from partita_schema.sections.outputs import OutputFeature


class ValueColumn(fields.Field[Any]):
    """A cell that `read` converts."""

    def __init__(self, read: Callable[[Any], Any]) -> None:
        super().__init__(required=True)
        self.read = read

    def _deserialize(self, value: Any, attr: str | None, data: Mapping[str, Any] | None, **_: Any) -> Any:
        try:
            return self.read(value)
        except CellError as error:
            raise ValidationError(str(error)) from None


class DialogueColumn(fields.Field[dict[str, Any]]):
    """A dialogue of any format: the messages up to a question, and the correct answers to it.

    With `supervised`, the last answer in the loss is removed from the messages, and it is an error if there is none.
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
            index = max((index for index, message in enumerate(messages) if message.get("train")), default=None)
            if index is None:
                raise ValidationError("the dialogue has no answer to learn: no assistant message after a question")
            right = messages[index].get("labels") or [messages[index]["content"]]
            return {"messages": messages[:index], "labels": right}
        while messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        return {"messages": messages, "labels": []}


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
        for index, cell in enumerate(self.cells):
            value = data if cell.whole else data.get(cell.column)
            if not is_missing(value):
                picked[str(index)] = value
            elif cell.fill is None or (cell.column not in data and not cell.absent):
                errors[cell.column] = [f"column {cell.column} is missing or empty"]
            else:
                picked[str(index)] = cell.fill
        if errors:
            raise ValidationError(errors)
        return picked

    @post_load
    def by_name(self, data: Mapping[str, Any], **_: Any) -> dict[str, Any]:
        row = {cell.name: data[str(index)] for index, cell in enumerate(self.cells)}
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
    kind = RowSchema.from_dict({str(index): cell.field for index, cell in enumerate(cells)}, name="Row")
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
    return Cell(name=column, column=column, field=ValueColumn(text_reader()), fill="")


def input_cell(feature: TextInput) -> Cell:
    options = feature.preprocessing
    return Cell(
        name=feature.name,
        column=feature.source_column,
        field=ValueColumn(text_reader(lowercase=options.lowercase)),
        fill=options.fill_value if options.missing_value_strategy == "fill_with_const" else None,
        absent=True,
    )


def output_cell(feature: OutputFeature) -> Cell:
    options = feature.preprocessing
    return Cell(
        name=feature.name,
        column=feature.source_column,
        field=ValueColumn(feature.cell_reader()),
        fill=options.fill_value if options.missing_value_strategy == "fill_with_const" else None,
        absent=True,
    )


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
    for index, row in enumerate(rows):
        try:
            checked.clean[index] = schema.load(row)
        except ValidationError as error:
            checked.bad[index] = tuple(reasons(error))
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
