"""The outputs of a dialogue turn: their values, read from the messages of a dialogue.

An output is read from the key of an assistant message that its `column` names, otherwise from the same key of the
message before it: datasets annotate the state of a dialogue at the user's turn. `column: content` is the message's
text. In the common form of `partita_schema.dialogues`, an assistant message then has `values` by output name,
and `labels` are mappings of values. A simulation stores the whole answer of a turn in `generated`, a JSON object.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from partita_schema.cells import CellError, is_missing
from partita_schema.common.json_text import parse_json
from partita_schema.config import Config
from partita_schema.dialogues.common_form import (
    ANSWER,
    CONTENT,
    Dialogue,
    FormatError,
    Message,
    is_common_form,
    is_structured,
)
from partita_schema.dialogues.read import read_dialogue
from partita_schema.sections.outputs import OutputFeature
from partita_schema.sections.outputs.base import ReadCell

Values = dict[str, Any]
"""Values by output name."""


@dataclass(frozen=True)
class TurnOutputs:
    """The outputs of a turn, and which of them are read from a message. Can be pickled."""

    features: tuple[OutputFeature, ...]
    shown: tuple[str, ...]
    """Names of the outputs that earlier answers in the prompt show."""
    ignored: tuple[str, ...] = ()
    """Keys of messages that are ignored."""

    def __reduce__(self) -> tuple[Any, ...]:
        return TurnOutputs, (self.features, self.shown, self.ignored)  # without the readers, which are closures

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the outputs, in the order of the file."""
        return tuple(feature.name for feature in self.features)

    @property
    def keys(self) -> tuple[str, ...]:
        """Message keys that hold outputs."""
        return tuple(dict.fromkeys(one.source_column for one in self.features if one.source_column != CONTENT))

    @property
    def reads_content(self) -> bool:
        """Whether an output is the text of a message."""
        return any(feature.source_column == CONTENT for feature in self.features)

    @cached_property
    def readers(self) -> dict[str, ReadCell]:
        """The function of each output that converts a cell to a value."""
        return {feature.name: feature.cell_reader() for feature in self.features}

    def read(self, messages: Sequence[Message], *, supervised: bool) -> list[Message]:
        """Return messages with `values` in place of the outputs of the data.

        With `supervised`, answers in the loss need all outputs; without it, only those that earlier answers show.

        Raises:
            FormatError: An output is missing or has no valid value, or a text is not read.
        """
        return [
            self._read_answer(messages, index, supervised=supervised)
            if message["role"] == "assistant"
            else {key: value for key, value in message.items() if key != "outputs"}
            for index, message in enumerate(messages)
        ]

    def _read_answer(self, messages: Sequence[Message], index: int, *, supervised: bool) -> Message:
        message, where = messages[index], f"message {index + 1}"
        if "values" in message or ANSWER in message:
            return message
        if is_structured(message):
            raise FormatError(
                f"{where} has tool calls or reasoning, which are not read next to the outputs of a turn; write "
                "data.dialogue: {ignore_keys: [tool_calls, reasoning_content]} to leave them out of all rows"
            )
        cells = message.get("outputs", {})
        if ANSWER in cells:
            answered = {"role": "assistant", CONTENT: "", "train": message["train"]}
            if supervised and message["train"]:
                return answered | {"values": self.values_of(cells[ANSWER], where=where)}
            return answered | {ANSWER: cells[ANSWER]}
        before = messages[index - 1].get("outputs", {}) if index and messages[index - 1]["role"] != "assistant" else {}
        cells = before | cells
        if not message["train"] and not cells:
            return {"role": "assistant", CONTENT: message[CONTENT], "train": False}
        if message[CONTENT] and not self.reads_content and CONTENT not in self.ignored:
            raise FormatError(
                f"{where} has a text, which no output reads; write column: content at an output to learn it, or "
                f"data.dialogue: {{ignore_keys: [{CONTENT}]}} to leave it out of all rows"
            )
        needed = self.names if supervised and message["train"] else self.shown
        answers = [
            self.parse({**cells, CONTENT: text}, where=where, needed=needed)
            for text in message.get("labels", [message[CONTENT]])
        ]
        result = {"role": "assistant", CONTENT: "", "train": message["train"], "values": answers[0]}
        return result | ({"labels": answers} if len(answers) > 1 and self.reads_content else {})

    def parse(self, cells: Mapping[str, Any], *, where: str, needed: Collection[str]) -> Values:
        """Return the values of the needed outputs. `cells` are by column. Raise FormatError."""
        values = {}
        for feature in self.features:
            if feature.name not in needed:
                continue
            options, column = feature.preprocessing, feature.source_column
            cell = cells.get(column)
            if is_missing(cell) and options.missing_value_strategy == "fill_with_const":
                cell = options.fill_value
            elif is_missing(cell):
                raise FormatError(
                    f"{where} has no {column}, and neither has the message before it; write it there, or weight: 0 to "
                    "leave this turn out of the loss"
                )
            values[feature.name] = self._value(feature, cell, where=f"{where}: {column}")
        return values

    def values_of(self, answer: str, *, where: str) -> Values:
        """Return the values of a whole answer: the text of a single output, or a JSON object. Raise FormatError."""
        if len(self.features) == 1:
            return {self.names[0]: self._value(self.features[0], answer, where=where)}
        try:
            cells = parse_json(answer)
        except ValueError:
            cells = None
        if not isinstance(cells, dict):
            raise FormatError(f"{where}: the answer is not a JSON object with {', '.join(self.names)}")
        missing = next((name for name in self.names if name not in cells), None)
        if missing is not None:
            raise FormatError(f"{where}: the answer has no {missing}")
        return {one.name: self._value(one, cells[one.name], where=f"{where}: {one.name}") for one in self.features}

    def are_in(self, answer: str) -> bool:
        """Return whether a whole answer has a valid value of each output."""
        try:
            self.values_of(answer, where="answer")
        except FormatError:
            return False
        return True

    def _value(self, feature: OutputFeature, cell: Any, *, where: str) -> Any:
        try:
            return self.readers[feature.name](cell)
        except CellError as error:
            raise FormatError(f"{where}: {error}") from None


def build_turn_outputs(config: Config) -> TurnOutputs | None:
    """Return the outputs of a turn; None if a turn is only a text."""
    if not config.has_turn_outputs:
        return None
    dialogue = config.data.dialogue
    names = tuple(output.name for output in config.output_features)
    included = names if dialogue.include_outputs is None else dialogue.include_outputs
    shown = tuple(name for name in names if name in included)
    return TurnOutputs(config.output_features, shown, dialogue.ignore_keys)


def read_with_outputs(
    row: Mapping[str, Any],
    *,
    column: str,
    format_name: str,
    ignored: Collection[str],
    columns: Mapping[str, str],
    outputs: TurnOutputs | None,
    supervised: bool,
) -> Dialogue:
    """Return the dialogue of a row in the common form, with the values of its outputs.

    Args:
        row: The row, as a mapping from column to value.
        column: Column of the dialogue feature.
        format_name: Name of the format, or auto to detect it.
        ignored: Message keys and columns to ignore.
        columns: Names of columns in the data, by the name that a format has for them.
        outputs: The outputs of a turn; None if a turn is only a text.
        supervised: Whether answers in the loss need all outputs.

    Raises:
        FormatError: The row contains no valid dialogue.
    """
    keys = outputs.keys if outputs is not None else ()
    dialogue = read_dialogue(
        row, column=column, format_name=format_name, ignored=ignored, columns=columns, outputs=keys
    )
    if outputs is None or is_common_form(row.get(column)) or is_common_form(row):
        return dialogue
    if dialogue.get("verbatim"):
        raise FormatError("segments are one text, not turns with outputs; write messages")
    return dialogue | {"messages": outputs.read(dialogue["messages"], supervised=supervised)}
