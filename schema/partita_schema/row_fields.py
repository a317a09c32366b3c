"""marshmallow fields of rows: converted cells, dialogues, pairs of answers, and answers that a reward model scores."""

from collections.abc import Callable, Mapping
from typing import Any

from marshmallow import ValidationError, fields

from partita_schema.cells import CellError, is_missing
from partita_schema.dialogues.common_form import FormatError, answer_to_learn, is_common_form, message_text
from partita_schema.dialogues.messages import KnownKeys
from partita_schema.dialogues.pairs import read_answer, read_pair
from partita_schema.dialogues.read import own_names, renamed
from partita_schema.sections.dialogue import DialogueConfig
from partita_schema.sections.outputs.preference import PreferenceOutput
from partita_schema.turn_outputs import TurnOutputs, read_with_outputs


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

    def __init__(self, *, column: str, options: DialogueConfig, outputs: TurnOutputs | None, supervised: bool) -> None:
        """Store how dialogues are read.

        Args:
            column: Column of the dialogue.
            options: The section `data.dialogue`.
            outputs: The outputs of a turn; None if a turn is only a text.
            supervised: Whether there must be an answer.
        """
        super().__init__(required=True)
        self.column, self.options, self.outputs, self.supervised = column, options, outputs, supervised

    def _deserialize(self, value: Any, attr: str | None, data: Mapping[str, Any] | None, **_: Any) -> dict[str, Any]:
        try:
            return self._read(value)
        except FormatError as error:
            raise ValidationError(str(error)) from None

    def _read(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the messages up to a question, and the correct answers to it. Raise FormatError."""
        dialogue = read_with_outputs(
            row,
            column=self.column,
            format_name=self.options.format,
            ignored=self.options.ignore_keys,
            columns=self.options.columns,
            outputs=self.outputs,
            supervised=self.supervised,
        )
        if (is_common_form(row.get(self.column)) or is_common_form(row)) and (
            dialogue["labels"] or not self.supervised
        ):
            return dialogue | {"labels": [self._values(label) for label in dialogue["labels"]]}
        messages = dialogue["messages"]
        if self.supervised:
            index = max((index for index, message in enumerate(messages) if message.get("train")), default=None)
            if index is None:
                roles = [message["role"] for message in messages]
                answers = "user" in roles and "assistant" in roles[roles.index("user") :]
                reason = "all have weight: 0" if answers else "no assistant message after a question"
                raise FormatError(f"the dialogue has no answer to learn: {reason}")
            message = messages[index]
            right = message.get("labels") or [message["values"] if "values" in message else message_text(message)]
            return dialogue | {"messages": messages[:index], "labels": right} | answer_to_learn(message)
        while messages and messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        if not messages:
            raise FormatError("there is no prompt: all of its text is in the loss")
        return dialogue | {"messages": messages, "labels": []}

    def _values(self, label: Any) -> Any:
        """Return a correct answer as values of the outputs; simulations store it as a text. Raise FormatError."""
        if self.outputs is None or not isinstance(label, str):
            return label
        return self.outputs.values_of(label, where="the right answer")


class PairColumn(DialogueColumn):
    """A dialogue with a chosen and a rejected answer: the messages up to both, and the answers."""

    def __init__(self, *, column: str, options: DialogueConfig, output: PreferenceOutput, supervised: bool) -> None:
        """Store how pairs are read.

        Args:
            column: Column of the dialogue.
            options: The section `data.dialogue`.
            output: The output, which names the columns of both answers.
            supervised: Whether there must be both answers.
        """
        super().__init__(column=column, options=options, outputs=None, supervised=supervised)
        self.output = output

    def _read(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the messages up to the answers, and both answers. Raise FormatError."""
        cell = row.get(self.column)
        if any(is_common_form(one) and "rejected" in one for one in (cell, row)):
            return super()._read(row)
        written = renamed(row, self.options.columns)
        if not self.supervised and any(is_missing(written.get(name)) for name in self.output.answer_columns):
            return super()._read(row)
        chosen, rejected = self.output.answer_columns
        known = KnownKeys(self.options.ignore_keys)
        with own_names(self.options.columns):
            pair = read_pair(
                written,
                column=self.column,
                format_name=self.options.format,
                known=known,
                chosen=chosen,
                rejected=rejected,
            )
        return pair if self.supervised else pair | {"labels": []}


def holds_pair(row: Mapping[str, Any], output: PreferenceOutput) -> bool:
    """Return whether a row has both answers of a pair; otherwise a single answer is scored.

    Raises FormatError if it has neither.
    """
    missing = [name for name in output.answer_columns if is_missing(row.get(name))]
    if not missing or not is_missing(row.get(output.scored_column)):
        return not missing
    if len(missing) == 1:
        raise FormatError(f"column {missing[0]} is missing or empty")
    return False


class ScoredDialogue(PairColumn):
    """A dialogue with the answers that a reward model scores: a pair, or the last message, or a column with an answer
    to the dialogue."""

    def _read(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the messages up to the answers, and the answers. Raise FormatError."""
        if is_common_form(row.get(self.column)) or is_common_form(row):
            return super(PairColumn, self)._read(row)
        written = renamed(row, self.options.columns)
        if holds_pair(written, self.output):
            return super()._read(row)
        known = KnownKeys(self.options.ignore_keys)
        with own_names(self.options.columns):
            return read_answer(
                written,
                column=self.column,
                format_name=self.options.format,
                known=known,
                answer=self.output.scored_column,
            )


class ScoredAnswers(fields.Field[tuple[str, str | None]]):
    """The answers of a row that a reward model scores: the chosen and the rejected one, or one answer and None."""

    def __init__(self, output: PreferenceOutput) -> None:
        super().__init__(required=True)
        self.output = output

    def _deserialize(
        self, value: Any, attr: str | None, data: Mapping[str, Any] | None, **_: Any
    ) -> tuple[str, str | None]:
        output = self.output
        try:
            columns = output.answer_columns if holds_pair(value, output) else (output.scored_column,)
            read = output.cell_reader()
            if is_missing(value.get(columns[0])):
                chosen, rejected = output.answer_columns
                raise FormatError(
                    f"column {columns[0]} is missing or empty; write an answer to score there, or two in {chosen} and "
                    f"{rejected}"
                )
            texts = [read(value[column]) for column in columns]
        except (FormatError, CellError) as error:
            raise ValidationError(str(error)) from None
        return texts[0], texts[1] if len(texts) > 1 else None
