"""Validation of rows with a marshmallow schema built from the features of a configuration.

A row is a mapping from column to value. The result has values by *feature name*, plus columns that only the template
names under their own names: text and labels as str, numbers as int or float, JSON as plain values. Other columns are
ignored. A dialogue is returned in the common form of `dialogues`, cut before the answer to its last question; that
answer holds the outputs. An invalid row raises marshmallow's ValidationError with reasons by column. Its `valid_data`
is incomplete and must not be used.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from marshmallow import RAISE, Schema, ValidationError, fields, post_load, pre_load

from partita_schema.cells import CellError, is_missing, shown, text_reader
from partita_schema.config import Config
from partita_schema.row_fields import DialogueColumn, PairColumn, ScoredAnswers, ScoredDialogue, ValueColumn
from partita_schema.sections.features import DialogueInput, TextInput
from partita_schema.sections.outputs import OutputFeature
from partita_schema.sections.outputs.preference import PreferenceOutput
from partita_schema.turn_outputs import build_turn_outputs
from partita_schema.words import Splitting, read_words, tags_of


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
    reply: tuple[str, tuple[str, ...]] | None = None
    """Names of the dialogue and of the outputs that take a correct answer to it."""
    scored: OutputFeature | None = None
    """The output whose answers are scored, one or two of a row."""
    tagged: tuple[str, OutputFeature] | None = None
    """Name of the input whose words are tagged, and the output."""

    @cached_property
    def _simple_cells(self) -> tuple[tuple[str, str, Callable[[Any], Any]], ...]:
        """Name, column and reader of each cell; empty if some value needs more than one cell."""
        if self.reply or self.scored or self.tagged or not all(type(cell.field) is ValueColumn for cell in self.cells):
            return ()
        return tuple((cell.name, cell.column, cell.field.read) for cell in self.cells)  # type: ignore[attr-defined]

    def read(self, row: Any) -> dict[str, Any]:
        """Validate a row as `load` does, with a fast path for rows without empty or invalid cells.

        Raises:
            ValidationError: The row is invalid.
        """
        values = self._read_cells(row) if self._simple_cells and isinstance(row, dict) else None
        if values is None:  # `load` fills empty cells, and says what is wrong
            values = self.load(row)
        return values

    def _read_cells(self, row: dict[str, Any]) -> dict[str, Any] | None:
        """Return the values of a row; None if a cell is empty or bad."""
        values = {}
        for name, column, read in self._simple_cells:
            value = row.get(column)
            if is_missing(value):
                return None
            try:
                values[name] = read(value)
            except CellError:
                return None
        return values

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
            row |= self._values_of(row[self.reply[0]]["labels"][0])
        if isinstance(self.scored, PreferenceOutput):
            row[self.scored.name], worse = row[self.scored.name]
            row |= {} if worse is None else {self.scored.more_key(self.scored.rejected): worse}
        if self.tagged is not None:
            self.tag_words(row, *self.tagged)
        return row

    def with_each_answer(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        """Return a row that was read once for each of its correct answers, the one in the loss first."""
        if self.reply is None or len(row[self.reply[0]]["labels"]) == 1:
            return [row]
        dialogue = self.reply[0]
        return [
            row | {dialogue: row[dialogue] | {"labels": [right]}} | self._values_of(right)
            for right in row[dialogue]["labels"]
        ]

    def _values_of(self, right: Any) -> dict[str, Any]:
        """Return the outputs of a correct answer to a dialogue."""
        assert self.reply is not None
        return {name: right[name] if isinstance(right, Mapping) else right for name in self.reply[1]}

    def tag_words(self, row: dict[str, Any], name: str, output: OutputFeature) -> None:
        """Replace spans of characters by tags of words. Raise ValidationError if they do not fit the words."""
        assert output.word_splitting is not None
        try:
            row[output.name] = tags_of(row[name], row[output.name], splitting=output.word_splitting)
            labels = output.labels
            unknown = next((tag for tag in row[output.name] if labels is not None and tag not in labels), None)
            if unknown is not None:
                raise CellError(output.why_unknown(unknown, labels or ()))
        except CellError as error:
            index = next(index for index, cell in enumerate(self.cells) if cell.name == output.name)
            raise ValidationError({str(index): [str(error)]}) from None

    def handle_error(self, error: ValidationError, data: Any, *, many: bool, **_: Any) -> None:
        """Report reasons by column name."""
        messages = error.messages if isinstance(error.messages, dict) else {"_schema": error.messages}
        error.messages = {
            self.cells[int(key)].column if str(key).isdigit() and not many else key: reasons
            for key, reasons in messages.items()
        }


def row_schema(config: Config, *, supervised: bool, single: bool = False) -> RowSchema:
    """Return the schema of a row: the columns shown in the prompt, and with `supervised` also the outputs.

    With `single`, an output is only its own column, without a rejected answer or a label. The answers that a reward
    model scores are read in any case.
    """
    dialogue, scored = config.dialogue_input, config.scores_answers and not supervised
    inputs = {feature.name: feature for feature in config.input_features if isinstance(feature, TextInput)}
    if dialogue is not None:
        cells = [dialogue_cell(dialogue, config, supervised=supervised)]
    else:
        splitting = next((output.word_splitting for output in config.output_features), None)
        cells = [
            input_cell(inputs[name], splitting=splitting) if name in inputs else template_cell(name)
            for name in config.shown_columns
        ]
    if supervised and dialogue is None:
        cells += [output_cell(feature) for feature in config.output_features]
    if scored and dialogue is None:
        cells += [scored_cell(config.output_features[0])]
    if supervised and not single:
        cells += [
            more_cell(feature, column)
            for feature in config.output_features
            for column in feature.more_columns
            if dialogue is None or not (isinstance(feature, PreferenceOutput) and column == feature.rejected)
        ]
    kind = RowSchema.from_dict({str(index): cell.field for index, cell in enumerate(cells)}, name="Row")
    schema = kind()
    assert isinstance(schema, RowSchema)
    schema.cells = tuple(cells)
    if scored and dialogue is None:
        schema.scored = config.output_features[0]
    if (supervised or scored) and dialogue is not None:
        schema.reply = dialogue.name, tuple(output.name for output in config.output_features)
    if supervised and config.output_features[0].word_splitting is not None:
        schema.tagged = config.input_features[0].name, config.output_features[0]
    return schema


def dialogue_cell(feature: DialogueInput, config: Config, *, supervised: bool) -> Cell:
    column, options = feature.source_column, config.data.dialogue
    outputs, first = build_turn_outputs(config), config.output_features[0]
    field: DialogueColumn
    if config.scores_answers and not supervised:
        assert isinstance(first, PreferenceOutput)
        field = ScoredDialogue(column=column, options=options, output=first, supervised=True)
    elif isinstance(first, PreferenceOutput):
        field = PairColumn(column=column, options=options, output=first, supervised=supervised)
    else:
        field = DialogueColumn(column=column, options=options, outputs=outputs, supervised=supervised)
    return Cell(name=feature.name, column=column, field=field, whole=True)


def scored_cell(feature: OutputFeature) -> Cell:
    """Return the cell of the answers that a reward model scores."""
    assert isinstance(feature, PreferenceOutput)
    # Errors name the columns themselves.
    return Cell(name=feature.name, column="_schema", field=ScoredAnswers(feature), whole=True)


def template_cell(column: str) -> Cell:
    """Return the cell of a column that only the template names. It must exist but may be empty."""
    return Cell(name=column, column=column, field=ValueColumn(text_reader()), fill="")


def more_cell(feature: OutputFeature, column: str) -> Cell:
    """Return the cell of a column that an output reads in addition to its own."""
    is_answer = isinstance(feature, PreferenceOutput) and column == feature.rejected
    fill = feature.preprocessing.fill_value if is_answer and fills(feature) else None
    field = ValueColumn(feature.more_reader(column))
    return Cell(name=feature.more_key(column), column=column, field=field, fill=fill, absent=fill is not None)


def input_cell(feature: TextInput, *, splitting: Splitting | None) -> Cell:
    options = feature.preprocessing
    read: Callable[[Any], Any] = text_reader(lowercase=options.lowercase)
    if splitting is not None:
        read = partial(read_words, splitting=splitting, lowercase=options.lowercase)
    return Cell(
        name=feature.name,
        column=feature.source_column,
        field=ValueColumn(read),
        fill=options.fill_value if options.missing_value_strategy == "fill_with_const" else None,
        absent=True,
    )


def fills(feature: OutputFeature) -> bool:
    """Return whether empty cells of an output are filled."""
    return feature.preprocessing.missing_value_strategy == "fill_with_const"


def output_cell(feature: OutputFeature) -> Cell:
    return Cell(
        name=feature.name,
        column=feature.source_column,
        field=ValueColumn(feature.cell_reader()),
        fill=feature.preprocessing.fill_value if fills(feature) else None,
        absent=True,
    )


@dataclass(frozen=True)
class CheckedRows:
    """Rows after validation."""

    clean: dict[int, dict[str, Any]]
    """Values by name, by row index."""
    bad: dict[int, tuple[str, ...]]
    """Reasons, by row index."""


def check_rows(schema: RowSchema, rows: Iterable[Mapping[str, Any]]) -> CheckedRows:
    """Validate rows. Each row is either in `clean` or in `bad`."""
    checked = CheckedRows({}, {})
    for index, row in enumerate(rows):
        try:
            checked.clean[index] = schema.read(row)
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
