"""Expand dialogues into rows: the whole dialogue, a row for each answer, or only the last answer.

An expanded row holds the dialogue in the common form (`partita_schema.dialogues`) under the feature's column:
`messages` up to the question, `labels` with the correct answers, and `train_all`, whether the answers among the
messages are in the loss as well; also `output` if the row is for one output of a turn that is answered in sequence.
Rows that are already expanded, or cannot be read, are returned unchanged: the row schema reports what is wrong with
them.

`context_length` counts messages, as in ParlAI's flattened episodes: questions and answers count one each, including the
question that is answered. System messages at the start of a dialogue are shown in every row and do not count.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from partita.data.rows import RowKeys, Rows, digest
from partita_schema.common.hashing import hash_to_int
from partita_schema.config import Config
from partita_schema.dialogues.common_form import (
    COMMON_FORM_KEYS,
    FormatError,
    answer_to_learn,
    is_common_form,
    message_text,
)
from partita_schema.sections.dialogue import DialogueConfig
from partita_schema.turn_outputs import TurnOutputs, build_turn_outputs, read_with_outputs

Message = dict[str, Any]


class HistoryLimits(NamedTuple):
    """How much of the previous conversation is shown."""

    include_labels: bool = True
    """Whether earlier answers are shown."""
    context_length: int | None = None
    """Maximum number of messages, including the last question."""
    context_turns: int | None = None
    """Maximum number of exchanges of question and answer, including the last question's."""
    context_tokens: int | None = None
    """Maximum number of tokens of the messages; the last question is always shown."""


ALL = HistoryLimits()


def answers(messages: Sequence[Message]) -> list[int]:
    """Return the indices of the answers that are in the loss: messages of the assistant after a question."""
    return [index for index, message in enumerate(messages) if message.get("train")]


def history(
    messages: Sequence[Message], index: int, *, context: HistoryLimits = ALL, count: Callable[[str], int] | None = None
) -> list[Message]:
    """Return the messages that are shown before the one at `index`.

    Args:
        messages: The whole dialogue.
        index: Index of the answer.
        context: Limits of the history.
        count: Returns the number of tokens of a text; required if context_tokens is set.
    """
    opening = 0
    while opening < index and messages[opening]["role"] == "system":
        opening += 1
    shown = list(messages[opening:index])
    if context.context_turns is not None:
        shown = shown[turn_start(shown, context.context_turns) :]
    if not context.include_labels:
        shown = [message for message in shown if message["role"] != "assistant"]
    if context.context_length is not None:
        shown = shown[max(0, len(shown) - context.context_length) :]
    if context.context_tokens is not None:
        assert count is not None
        shown = shown[token_start(shown, context.context_tokens, count) :]
    return [*messages[:opening], *shown]


def turn_start(messages: Sequence[Message], turns: int) -> int:
    """Return the start of the last `turns` exchanges.

    An exchange starts after an answer. A tool call with its result and the answer to it are one exchange.
    """
    starts = [
        index
        for index, message in enumerate(messages)
        if message["role"] != "assistant"
        and (index == 0 or (messages[index - 1]["role"] == "assistant" and not messages[index - 1].get("tool_calls")))
    ]
    return starts[-turns] if len(starts) >= turns else 0


def token_start(messages: Sequence[Message], limit: int, count: Callable[[str], int]) -> int:
    """Return the start of the longest suffix of at most `limit` tokens; at least the last message is kept."""
    total, start = 0, len(messages)
    for index in range(len(messages) - 1, -1, -1):
        total += count(message_text(messages[index]))
        if total > limit and start < len(messages):
            break
        start = index
        if total > limit:
            break
    return start


Mode = Literal["packed_dialogue", "squash", "last_turn"]
Row = dict[str, Any]


@dataclass(frozen=True)
class Expander:
    """Expand dialogues into rows. The result depends only on the row and its key. Can be pickled."""

    column: str
    """Column of the dialogue input."""
    format_name: str
    """Format of the dialogues, or auto."""
    mode: Mode
    ignored: tuple[str, ...] = ()
    """Keys of messages that are ignored."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Names of columns in the data, by the name that the format has for them."""
    packs_segments: bool = True
    """Whether a text in segments is one row, also if dialogues of messages give several."""
    context: HistoryLimits = ALL
    """Limits of the history in a row; the token limit is applied when the row is formatted, not here."""
    outputs: TurnOutputs | None = None
    """The outputs of a turn; None if a turn is only a text."""
    by_output: bool = False
    """Whether each output of a turn has its own row, except with packed_dialogue."""
    labels: Literal["first", "all", "random"] = "first"
    all_labels: bool = False
    """Whether a row holds all correct answers, the one in the loss first; used for evaluation."""
    seed: int = 0

    def expand(self, row: Mapping[str, Any], key: str) -> list[tuple[str, Row]]:
        """Return the rows of a dialogue with their keys: `key#1`, `key#2` ... if there may be several."""
        try:
            if is_common_form(row.get(self.column)) or is_common_form(row):
                return self._by_output(row, key)
            dialogue = self._dialogue(row)
        except FormatError:
            return [(key, dict(row))]
        rest = {name: value for name, value in dialogue.items() if name not in COMMON_FORM_KEYS}
        rows = [{self.column: rest | part} for part in self._rows(dialogue, key)]
        if not rows:
            return [(key, dict(row))]
        if not self.numbered:
            return [(key, rows[0])]
        return [(f"{key}#{number}", expanded_row) for number, expanded_row in enumerate(rows, start=1)]

    def count(self, row: Mapping[str, Any]) -> int:
        """Return the number of rows that `expand` returns."""
        if not self.numbered:
            return 1
        if is_common_form(row.get(self.column)) or is_common_form(row):
            return len(self._by_output(row, ""))
        try:
            dialogue = self._dialogue(row)
        except FormatError:
            return 1
        messages = dialogue["messages"]
        answers = sum(self._right_answers(messages[index]) for index in self._answer_indices(dialogue))
        return max(1, answers * len(self._targets))

    def _by_output(self, row: Mapping[str, Any], key: str) -> list[tuple[str, Row]]:
        """Return the rows of an expanded row: one for each output that has its own rows."""
        cell = row.get(self.column)
        dialogue = dict(cell) if is_common_form(cell) else {name: row[name] for name in COMMON_FORM_KEYS}
        if len(self._targets) == 1 or "output" in dialogue or not dialogue["labels"]:
            return [(key, dict(row))]
        return [
            (f"{key}#{number}", {self.column: dialogue | {"output": name}})
            for number, name in enumerate(self._targets, start=1)
        ]

    def _dialogue(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return a dialogue in the common form. Raise FormatError if it cannot be read."""
        return read_with_outputs(
            row,
            column=self.column,
            format_name=self.format_name,
            ignored=self.ignored,
            columns=self.columns,
            outputs=self.outputs,
            supervised=True,
        )

    @property
    def numbered(self) -> bool:
        """Whether a dialogue may give several rows."""
        return self.mode == "squash" or self.labels == "all" or len(self._targets) > 1

    @property
    def fingerprint(self) -> str:
        """A hash of everything that decides the rows."""
        return digest(repr(self))

    @property
    def _targets(self) -> tuple[str | None, ...]:
        """The outputs that have their own rows; one None if a row is for the whole answer."""
        if self.outputs is None or not self.by_output or self.mode == "packed_dialogue":
            return (None,)
        return self.outputs.names

    def _mode_of(self, dialogue: Mapping[str, Any]) -> Mode:
        """Return how this dialogue becomes rows."""
        return "packed_dialogue" if dialogue.get("verbatim") and self.packs_segments else self.mode

    def _answer_indices(self, dialogue: Mapping[str, Any]) -> list[int]:
        indices = answers(dialogue["messages"])
        if self._mode_of(dialogue) != "squash":
            return indices[-1:]
        # Nothing stands before a segment at the start of a text, so it is no answer to anything.
        return [index for index in indices if index] or indices

    def _right_answers(self, message: Message) -> int:
        return len(message.get("labels", [None])) if self.labels == "all" else 1

    def _rows(self, dialogue: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
        messages = dialogue["messages"]
        chosen = [self._chosen(message, key, index) for index, message in enumerate(messages)]
        packed = self._mode_of(dialogue) == "packed_dialogue"
        rows = []
        for index in self._answer_indices(dialogue):
            shown = chosen[:index] if packed else history(chosen, index, context=self.context)
            answer = answer_to_learn(messages[index])
            for labels in self._labels(messages[index], right_answer(chosen[index])):
                row = {"messages": shown, "labels": labels, "train_all": packed, **answer}
                rows += [row if name is None else row | {"output": name} for name in self._targets]
        return rows

    def _chosen(self, message: Message, key: str, index: int) -> Message:
        """Return the message with one correct answer."""
        right = message.get("labels")
        if right is None:
            return message
        number = 0
        if self.labels == "random":
            number = hash_to_int(f"{self.seed}:{key}:{index}") % len(right)
        key = "values" if "values" in message else "content"
        return {name: value for name, value in message.items() if name != "labels"} | {key: right[number]}

    def _labels(self, message: Message, first: Any) -> list[list[Any]]:
        """Return the correct answers of each row that is created for a message."""
        right: list[Any] = message.get("labels", [first])
        if self.labels == "all":
            return [[label] for label in right]
        return [[first, *(label for label in right if label != first)]] if self.all_labels else [[first]]


def right_answer(message: Message) -> Any:
    """Return the answer of a message: its text, or the values of its outputs."""
    return message["values"] if "values" in message else message_text(message)


def build_expander(config: Config, *, mode: Mode) -> Expander | None:
    """Return the expander of dialogues into training rows; None if no input is a dialogue."""
    feature, wanted = config.dialogue_input, config.data.dialogue
    if feature is None:
        return None
    return Expander(
        column=feature.source_column,
        format_name=wanted.format,
        mode=mode,
        ignored=wanted.ignore_keys,
        columns=wanted.columns,
        packs_segments=wanted.mode in ("auto", "packed_dialogue"),
        context=context_of(wanted)._replace(context_tokens=None),
        outputs=build_turn_outputs(config),
        by_output=config.answers_in_sequence,
        labels=wanted.labels,
        seed=config.seed,
    )


def for_scores(expander: Expander) -> Expander:
    """Return the expander for evaluation: a row for each answer, with the reference answers as history."""
    return replace(for_loss(expander), by_output=False)


def for_loss(expander: Expander) -> Expander:
    """Return the expander for the loss of an evaluation: as `for_scores`, but a row for each output in sequence."""
    return replace(expander, mode="squash", labels="first", all_labels=True, packs_segments=False)


def context_of(dialogue: DialogueConfig) -> HistoryLimits:
    """Return the limits of the history that a row shows."""
    return HistoryLimits(
        include_labels=dialogue.include_labels,
        context_length=dialogue.context_length,
        context_turns=dialogue.context_turns,
        context_tokens=dialogue.context_tokens,
    )


class DialogueStore:
    """Rows of dialogues by index: a dialogue is read and expanded when one of its rows is read."""

    def __init__(self, rows: Rows, expander: Expander, *, owners_N: np.ndarray, row_in_dialogue_N: np.ndarray) -> None:
        """Store what rows are expanded from.

        Args:
            rows: The dialogues.
            expander: Expands a dialogue into its rows.
            owners_N: For each row, the index of its dialogue.
            row_in_dialogue_N: For each row, its index among the rows of its dialogue.
        """
        self._rows, self._expander = rows, expander
        self._owners_N, self._row_in_dialogue_N = owners_N, row_in_dialogue_N

    def __len__(self) -> int:
        return len(self._owners_N)

    def read(self, indices: np.ndarray) -> list[dict[str, Any]]:
        owners, of_owner = np.unique(self._owners_N[indices], return_inverse=True)
        dialogues = [
            self._expander.expand(row, self._rows.key(owner))
            for owner, row in zip(owners.tolist(), self._rows.get(owners), strict=True)
        ]
        chosen = self._row_in_dialogue_N[indices].tolist()
        return [dict(dialogues[owner][row][1]) for owner, row in zip(of_owner.tolist(), chosen, strict=True)]


def expanded(rows: Rows, expander: Expander | None) -> Rows:
    """Return the rows of dialogues by index; `rows` without an expander. If rows must be counted, all are read once."""
    if expander is None:
        return rows
    if expander.numbered:
        counts = np.array([expander.count(row) for chunk in rows.iterate() for row in chunk], dtype=np.int64)
    else:
        counts = np.ones(len(rows), dtype=np.int64)
    owners_N = np.repeat(np.arange(len(rows), dtype=np.int64), counts)
    ends = np.cumsum(counts)
    firsts = np.repeat(ends - counts, counts)
    row_in_dialogue_N = (np.arange(len(owners_N)) - firsts).astype(np.int32)
    keys = rows.keys.take(owners_N)
    return Rows(
        DialogueStore(rows, expander, owners_N=owners_N, row_in_dialogue_N=row_in_dialogue_N),
        columns=[expander.column],
        keys=RowKeys(
            keys.names,
            keys.files,
            keys.numbers,
            examples=row_in_dialogue_N + 1 if expander.numbered else None,
            last=row_in_dialogue_N + 1 == np.repeat(counts, counts) if expander.numbered else None,
        ),
        fingerprint=digest(rows.fingerprint, expander.fingerprint),
        bad=[replace(row, num_before=int(ends[row.num_before - 1]) if row.num_before else 0) for row in rows.bad],
    )
