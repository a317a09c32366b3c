"""From a dialogue to the rows that are made of it: the whole, a row for each answer, or the last answer alone.

An expanded row holds the dialogue in its one form (`partita_schema.dialogue_formats`) under the feature's column:
`messages` up to the question, `labels` with the right answers, and `learn_all`, whether the answers among the messages
are learned as well. Rows that are expanded already, and those that cannot be read, come out as they went in: the row
schema says what is wrong with them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, Literal

import numpy as np

from partita.data.dialogue.squash import ALL, HistoryLimits, Message, answers, history
from partita.data.rows import RowKeys, Rows, digest
from partita_schema.config import Config
from partita_schema.dialogue import DialogueConfig
from partita_schema.dialogue_formats import FormatError, is_read, read_dialogue

Mode = Literal["packed_dialogue", "squash", "last_turn"]
Row = dict[str, Any]


@dataclass(frozen=True)
class Expander:
    """Makes rows of dialogues. Pure: a row and its key decide what comes out. Can be sent to other processes."""

    column: str
    """Column of the dialogue input."""
    form: str
    """How dialogues are written, or auto."""
    mode: Mode
    ignored: tuple[str, ...] = ()
    """Keys of messages that are left out."""
    context: HistoryLimits = ALL
    """What a row shows; tokens are counted where the row is rendered, not here."""
    labels: Literal["first", "all", "random"] = "first"
    all_labels: bool = False
    """Whether a row holds all right answers, the one that is learned first: for scores."""
    seed: int = 0

    def expand(self, row: Mapping[str, Any], key: str) -> list[tuple[str, Row]]:
        """The rows of a dialogue with their keys: `key#1`, `key#2` ... where there is one for each answer."""
        try:
            if is_read(row.get(self.column)) or is_read(row):
                return [(key, dict(row))]
            messages = self._messages(row)
        except FormatError:
            return [(key, dict(row))]
        rows = [{self.column: made} for made in self._rows(messages, key)]
        if not rows:
            return [(key, dict(row))]
        if not self.numbered:
            return [(key, rows[0])]
        return [(f"{key}#{number}", made) for number, made in enumerate(rows, start=1)]

    def count(self, row: Mapping[str, Any]) -> int:
        """Number of rows that `expand` makes."""
        if not self.numbered or is_read(row.get(self.column)) or is_read(row):
            return 1
        try:
            messages = self._messages(row)
        except FormatError:
            return 1
        return max(1, sum(self._right_answers(messages[place]) for place in self._places(messages)))

    def _messages(self, row: Mapping[str, Any]) -> list[Message]:
        """The messages of a dialogue. Raises FormatError."""
        found: list[Message] = read_dialogue(row, column=self.column, form=self.form, ignored=self.ignored)["messages"]
        return found

    @property
    def numbered(self) -> bool:
        """Whether a dialogue may give several rows."""
        return self.mode == "squash" or self.labels == "all"

    @property
    def fingerprint(self) -> str:
        """A hash of all that decides the rows."""
        return digest(repr(self))

    def _places(self, messages: Sequence[Message]) -> list[int]:
        found = answers(messages)
        return found if self.mode == "squash" else found[-1:]

    def _right_answers(self, message: Message) -> int:
        return len(message.get("labels", [None])) if self.labels == "all" else 1

    def _rows(self, messages: Sequence[Message], key: str) -> list[dict[str, Any]]:
        chosen = [self._chosen(message, key, place) for place, message in enumerate(messages)]
        packed = self.mode == "packed_dialogue"
        rows = []
        for place in self._places(messages):
            shown = chosen[:place] if packed else history(chosen, place, context=self.context)
            for labels in self._labels(messages[place], chosen[place]["content"]):
                rows.append({"messages": shown, "labels": labels, "learn_all": packed})
        return rows

    def _chosen(self, message: Message, key: str, place: int) -> Message:
        """The message with one right answer."""
        right = message.get("labels")
        if right is None:
            return message
        number = 0
        if self.labels == "random":
            mark = blake2b(f"{self.seed}:{key}:{place}".encode("utf-8", "replace"), digest_size=8).digest()
            number = int.from_bytes(mark, "big") % len(right)
        return {name: value for name, value in message.items() if name != "labels"} | {"content": right[number]}

    def _labels(self, message: Message, first: str) -> list[list[str]]:
        """Right answers of each row that is made for a message."""
        right: list[str] = message.get("labels", [first])
        if self.labels == "all":
            return [[label] for label in right]
        return [[first, *(label for label in right if label != first)]] if self.all_labels else [[first]]


def build_expander(config: Config, *, mode: Mode) -> Expander | None:
    """What makes training rows of dialogues; None where no input is a dialogue."""
    feature, wanted = config.dialogue_input, config.data.dialogue
    if feature is None:
        return None
    return Expander(
        column=feature.source_column,
        form=wanted.format,
        mode=mode,
        ignored=wanted.ignore_keys,
        context=context_of(wanted)._replace(context_tokens=None),
        labels=wanted.labels,
        seed=config.seed,
    )


def for_scores(expander: Expander) -> Expander:
    """The same for validation and test rows: a row for each answer, with what was really said before."""
    return replace(expander, mode="squash", labels="first", all_labels=True)


def context_of(dialogue: DialogueConfig) -> HistoryLimits:
    """What a row shows of what was said."""
    return HistoryLimits(
        include_labels=dialogue.include_labels,
        context_length=dialogue.context_length,
        context_turns=dialogue.context_turns,
        context_tokens=dialogue.context_tokens,
    )


class DialogueStore:
    """Rows of dialogues by index: each dialogue is read and expanded when one of its rows is asked for."""

    def __init__(self, rows: Rows, expander: Expander, *, owners_N: np.ndarray, parts_N: np.ndarray) -> None:
        """Row i is row `parts_N[i]` of those of dialogue `owners_N[i]`."""
        self._rows, self._expander = rows, expander
        self._owners_N, self._parts_N = owners_N, parts_N

    def __len__(self) -> int:
        return len(self._owners_N)

    def read(self, indices: np.ndarray) -> list[dict[str, Any]]:
        owners, of_owner = np.unique(self._owners_N[indices], return_inverse=True)
        made = [
            self._expander.expand(row, self._rows.key(owner))
            for owner, row in zip(owners.tolist(), self._rows.get(owners), strict=True)
        ]
        parts = self._parts_N[indices].tolist()
        return [dict(made[owner][part][1]) for owner, part in zip(of_owner.tolist(), parts, strict=True)]


def expanded(rows: Rows, expander: Expander | None) -> Rows:
    """Rows of dialogues by index; `rows` themselves without an expander. Reads all rows once where they are counted."""
    if expander is None:
        return rows
    if expander.numbered:
        counts = np.array([expander.count(row) for chunk in rows.iterate() for row in chunk], dtype=np.int64)
    else:
        counts = np.ones(len(rows), dtype=np.int64)
    owners_N = np.repeat(np.arange(len(rows), dtype=np.int64), counts)
    ends = np.cumsum(counts)
    firsts = np.repeat(ends - counts, counts)
    parts_N = (np.arange(len(owners_N)) - firsts).astype(np.int32)
    keys = rows.keys.take(owners_N)
    return Rows(
        DialogueStore(rows, expander, owners_N=owners_N, parts_N=parts_N),
        columns=[expander.column],
        keys=RowKeys(
            keys.names,
            keys.files,
            keys.numbers,
            parts=parts_N + 1 if expander.numbered else None,
            last=parts_N + 1 == np.repeat(counts, counts) if expander.numbered else None,
        ),
        fingerprint=digest(rows.fingerprint, expander.fingerprint),
        bad=[replace(row, place=int(ends[row.place - 1]) if row.place else 0) for row in rows.bad],
    )
