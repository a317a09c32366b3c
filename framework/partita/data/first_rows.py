"""Read the first rows of a file and describe its columns, for `partita init --data`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from partita.data.columns import Column, column_of
from partita.data.formats import FORMATS
from partita.data.formats.base import NAME_COLUMNS, FileSlice
from partita.data.formats.json import json_row
from partita.data.proposal import FIRST_ROWS, MESSAGES, Proposal, dialogue_column, format_in_columns, proposal_of
from partita.data.sources.sources import find_files, source_of
from partita_schema.common.text import counted
from partita_schema.dialogues.common_form import FormatError
from partita_schema.dialogues.read import read_dialogue, unread_keys
from partita_schema.errors import DataError
from partita_schema.sections.sources import FileSource

MAX_WORDS_OF_A_NAME = 4
"""Number of words above which the name of a column is probably a value."""
MAX_TAGS = 100
"""Maximum number of distinct tags of words."""


@dataclass(frozen=True)
class FirstRows:
    """Columns of a file, from its first rows."""

    columns: Sequence[Column]
    complete: bool
    """Whether these are all rows of the file."""
    ignore_keys: tuple[str, ...] = ()
    """Keys of messages and columns that are not read as part of a dialogue."""
    warning: str = ""
    """What is wrong with the file; empty if there is no objection."""
    unread_dialogues: str = ""
    """Why rows cannot be read as dialogues; empty if they can, or hold none."""

    @property
    def names(self) -> list[str]:
        """Names of the columns."""
        return [column.name for column in self.columns]

    def propose(self, task: str | None) -> Proposal | None:
        """Return the proposal, for `task` if one is given; None if no column fits it."""
        proposal = proposal_of(self.columns, task=task, complete=self.complete)
        if proposal is None:
            return None
        is_chat = proposal.task == "chat" and "type: dialogue" in proposal.features
        warnings = [self.warning, self.unread_dialogues if is_chat else "", proposal.warning]
        proposal = replace(proposal, warning="; ".join(filter(None, warnings)))
        if not is_chat or not self.ignore_keys:
            return proposal
        summary = f"{proposal.summary}; ignored: {', '.join(self.ignore_keys)}"
        return replace(proposal, ignore_keys=self.ignore_keys, summary=summary)


def read_first_rows(path: str) -> FirstRows | None:
    """Return the columns of a local file; None for a URL or a Hub name.

    Raises:
        DataError: If there is no such file, or it has no readable row.
    """
    source = source_of(path, folder=Path())
    if "://" in path or not isinstance(source, FileSource):
        return None
    file = find_files(path, folder=Path())[0]
    read = list(islice(first_rows(FileSlice(file, path, source.type)), FIRST_ROWS + 1))
    rows = [values for values, _ in read if values is not None]
    reasons = [reason for values, reason in read if values is None]
    if not rows:
        raise DataError(f"{path} has no row that can be read{f': {reasons[0]}' if reasons else ''}")
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = [column_of(name, [row.get(name) for row in rows[:FIRST_ROWS]]) for name in names]
    columns = with_tags(columns, rows)
    dialogue = dialogue_column(columns)
    if dialogue is None and format_in_columns(columns) is not None:
        dialogue = MESSAGES
    ignored = [key for row in rows if dialogue is not None for key in unread_keys(row, column=dialogue)]
    ignore_keys = tuple(dict.fromkeys(ignored))
    return FirstRows(
        columns,
        complete=len(read) <= FIRST_ROWS,
        ignore_keys=ignore_keys,
        warning=file_warning(reasons, names, rows, kind=source.type),
        unread_dialogues=unread_warning(rows, column=dialogue, ignored=ignore_keys) if dialogue is not None else "",
    )


def first_rows(file: FileSlice) -> Iterator[tuple[Mapping[str, Any] | None, str]]:
    """Yield the rows of a file, or None and a reason for those that cannot be read."""
    for row, _ in FORMATS[file.kind].read_slice(file, 0, None):
        values: Any = row.row
        reason = row.reason
        if not reason and isinstance(values, bytes):
            values, reason = json_row(values)
        yield (None, reason) if reason else (values, "")


def looks_like_a_row(names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the names of columns are values: they are long, or occur below themselves."""
    long = len(names) > 1 and any(len(name.split()) > MAX_WORDS_OF_A_NAME for name in names)
    return long or any(row.get(name) == name for row in rows for name in names)


def file_warning(reasons: Sequence[str], names: Sequence[str], rows: Sequence[Mapping[str, Any]], *, kind: str) -> str:
    """Return what is wrong with a file: rows that cannot be read, a single row, or a first line that is a row.

    Args:
        reasons: Why rows cannot be read.
        names: The names of the columns.
        rows: The rows that can be read.
        kind: The format of the file.
    """
    number = len(rows) + len(reasons)
    if reasons:
        return f"{counted(len(reasons), 'row')} of the first {number:,} cannot be read, the first because {reasons[0]}"
    if kind in NAME_COLUMNS and looks_like_a_row(names, rows):
        return f"its first line looks like a row; {NAME_COLUMNS[kind]}"
    if number == 1:
        return "it has one row, so types and labels are guesses; check them"
    return ""


def unread_warning(rows: Sequence[Mapping[str, Any]], *, column: str, ignored: Sequence[str]) -> str:
    """Return why rows cannot be read as dialogues, if they cannot."""
    reasons = []
    for row in rows:
        try:
            read_dialogue(row, column=column, ignored=ignored)
        except FormatError as error:
            reasons.append(str(error))
    if not reasons:
        return ""
    of = "all rows" if len(reasons) == len(rows) else f"{len(reasons):,} of the first {counted(len(rows), 'row')}"
    return f"{of} cannot be read as dialogues, the first because {reasons[0]}"


def with_tags(columns: Sequence[Column], rows: Sequence[Mapping[str, Any]]) -> list[Column]:
    """Return the columns, where lists that are as long as those of a column of words may be tags of the words."""
    words = next((one.name for one in columns if one.name.lower() in ("tokens", "words")), None)
    if words is None or not all(isinstance(row.get(words), list) for row in rows):
        return list(columns)
    tagged = [with_tags_of(column, words=words, rows=rows) for column in columns]
    if not any(column.kind == "tags" for column in tagged):
        return list(columns)
    return [replace(column, kind="text") if column.name == words else column for column in tagged]


def with_tags_of(column: Column, *, words: str, rows: Sequence[Mapping[str, Any]]) -> Column:
    """Return a column as tags if each row has a text for each word in it, or the number of a label."""
    tags, is_number = list[Any](), True
    for row in rows:
        of_row = row.get(column.name)
        if not isinstance(of_row, list) or len(of_row) != len(row[words]):
            return column
        tags += of_row
        is_number = is_number and all(isinstance(word, str) for word in row[words])
    tagged = replace(column, kind="tags", labels=(), separator=None, words=words)
    if column.name == words:
        return column
    if all(isinstance(tag, str) for tag in tags):
        labels = sorted(set(tags))
        return replace(tagged, labels=tuple(labels)) if len(labels) <= MAX_TAGS else column
    if is_number and all(is_index(tag) for tag in tags):
        return replace(tagged, largest_tag=max(tags))
    return column


def is_index(tag: Any) -> bool:
    """Return whether a tag is the number of one of at most `MAX_TAGS` labels."""
    return isinstance(tag, int) and not isinstance(tag, bool) and 0 <= tag < MAX_TAGS
