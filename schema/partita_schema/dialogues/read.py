"""Read the dialogue of a row in any format."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from partita_schema.dialogues.common_form import (
    COMMON_FORM_KEYS,
    OPTIONAL_KEYS,
    Dialogue,
    FormatError,
    Message,
    UnreadKeysError,
    is_common_form,
)
from partita_schema.dialogues.formats import CHATML_START, COLUMNS, KEYS_BY_FORMAT, LISTS, READERS, TOOL_COLUMNS
from partita_schema.dialogues.messages import KnownKeys, way_out
from partita_schema.dialogues.tools import tools_of
from partita_schema.dialogues.values import holds, plain_list
from partita_schema.errors import shortened

MEDIA_COLUMNS = ("images", "videos", "audios")
"""Columns with content that is not text."""
OPTIONAL_COLUMNS = ("system", "input", "history")
"""Columns that are read if a row has them, unless they are ignored."""


def read_dialogue(
    row: Mapping[str, Any],
    *,
    column: str,
    format_name: str = "auto",
    ignored: Collection[str] = (),
    columns: Mapping[str, str] | None = None,
    outputs: Collection[str] = (),
) -> Dialogue:
    """Return the dialogue of a row in the common form.

    Args:
        row: The row, as a mapping from column to value.
        column: Column of the dialogue feature. Formats that use several columns ignore it, and a format's standard
            column is used if the row does not have it.
        format_name: Name of the format, or auto to detect it.
        ignored: Message keys and columns to ignore.
        columns: Names of columns in the data, by the name that a format has for them.
        outputs: Message keys that hold outputs.

    Raises:
        FormatError: The row contains no valid dialogue.
    """
    cell = row.get(column)
    if is_common_form(cell):
        return dict(cell)
    if is_common_form(row):
        return {name: row[name] for name in (*COMMON_FORM_KEYS, *OPTIONAL_KEYS) if name in row}
    if columns:
        with own_names(columns):
            return read_dialogue(
                renamed(row, columns), column=column, format_name=format_name, ignored=ignored, outputs=outputs
            )
    row = without_ignored(row, ignored)
    format_name, column = format_and_column(row, column, format_name=format_name)
    refuse_media(row, ignored)
    dialogue = READERS[format_name](row, column, KnownKeys(ignored, outputs))
    if "system" not in outputs:
        dialogue["messages"] = with_system(dialogue["messages"], row, verbatim=bool(dialogue.get("verbatim")))
    return with_tools(dialogue, row, ignored)


def without_ignored(row: Mapping[str, Any], ignored: Collection[str]) -> dict[str, Any]:
    """Return a row without the optional columns to ignore."""
    return {name: value for name, value in row.items() if name not in OPTIONAL_COLUMNS or name not in ignored}


def with_system(messages: list[Message], row: Mapping[str, Any], *, verbatim: bool = False) -> list[Message]:
    """Return messages after the system message in the column system of their row, if they have none.

    Args:
        messages: The messages.
        row: Their row, without columns to ignore.
        verbatim: Whether the messages are the whole text, which nothing is added to.

    Raises:
        FormatError: The column is not text, or the messages have another system message, or nothing may be added.
    """
    text = row.get("system")
    if not holds(text) or (isinstance(text, str) and not text.strip()):
        return messages
    if not isinstance(text, str):
        raise FormatError(f"column system is not text; write a text, or {way_out(['system'])}")
    if verbatim:
        raise FormatError(
            "column system has no place next to segments, which are the whole text; write it as the first segment, or "
            f"{way_out(['system'])}"
        )
    written = [message["content"] for message in messages if message["role"] == "system"]
    if written and text not in written:
        raise FormatError(
            f"column system is {shortened(text)!r}, and the messages have the system message "
            f"{shortened(written[0])!r}; write one of them, or {way_out(['system'])}"
        )
    return messages if written else [{"role": "system", "content": text}, *messages]


def with_tools(dialogue: Dialogue, row: Mapping[str, Any], ignored: Collection[str]) -> Dialogue:
    """Return a dialogue with the tools of its row. Raise FormatError if they cannot be read."""
    tools = [
        tool
        for name in TOOL_COLUMNS
        if name not in ignored and holds(row.get(name))
        for tool in tools_of(row[name], f"column {name}")
    ]
    return dialogue | {"tools": tools} if tools else dialogue


def format_of(row: Mapping[str, Any], *, column: str, format_name: str, columns: Mapping[str, str]) -> str | None:
    """Return the name of a row's format; None if it has none, or is in the common form.

    Args:
        row: The row.
        column: Column of the dialogue feature.
        format_name: Name of the format, or auto to detect it.
        columns: Names of columns in the data, by the name that a format has for them.
    """
    if is_common_form(row.get(column)) or is_common_form(row):
        return None
    try:
        return format_and_column(renamed(row, columns), column, format_name=format_name)[0]
    except FormatError:
        return None


def format_and_column(row: Mapping[str, Any], column: str, *, format_name: str) -> tuple[str, str]:
    """Return the format, detected if it is auto, and the column of the messages."""
    if format_name == "auto":
        return detect_format(row, column)
    if format_name in LISTS and row.get(column) is None:
        column = next((name for name in LISTS[format_name] if row.get(name) is not None), column)
    return format_name, column


def renamed(row: Mapping[str, Any], columns: Mapping[str, str]) -> Mapping[str, Any]:
    """Return a row with the names that formats have for its columns."""
    if not columns:
        return row
    own = {name: row[written] for name, written in columns.items() if written in row}
    return {name: value for name, value in row.items() if name not in columns} | own


@contextmanager
def own_names(columns: Mapping[str, str]) -> Iterator[None]:
    """Write the names of the data in errors."""
    try:
        yield
    except FormatError as error:
        if not columns:
            raise
        pattern = rf"\bcolumn ({'|'.join(map(re.escape, columns))})\b"
        error.args = (re.sub(pattern, lambda match: f"column {columns[match[1]]}", str(error)),)
        raise


def refuse_media(row: Mapping[str, Any], ignored: Collection[str]) -> None:
    """Raise UnreadKeysError if a row has images, videos or sound."""
    name = next((name for name in MEDIA_COLUMNS if name not in ignored and holds(row.get(name))), None)
    if name is not None:
        raise UnreadKeysError(f"column {name} holds {name}, which are not read; {way_out([name])}", [name])


def unread_keys(row: Mapping[str, Any], *, column: str) -> list[str]:
    """Return the message keys and columns that `ignore_keys` must list to read the dialogue of a row."""
    keys: list[str] = []
    while True:
        try:
            read_dialogue(row, column=column, ignored=keys)
        except UnreadKeysError as error:
            keys += error.keys
        except FormatError:
            return keys
        else:
            return keys


def detect_format(row: Mapping[str, Any], column: str) -> tuple[str, str]:
    """Return the format, detected from the columns and the keys of the messages, and the column of the messages."""
    for name in (column, *(name for names in LISTS.values() for name in names)):
        value = row.get(name)
        if name == column and isinstance(value, str) and CHATML_START in value:
            return "chatml", name
        items = plain_list(value)
        if items is None:
            continue
        first = items[0] if items else None
        if not isinstance(first, Mapping):
            raise FormatError(
                f"column {name} is {'an empty list' if not items else 'not a list of messages'}; "
                "write messages with role and content"
            )
        for format_name, alternatives in KEYS_BY_FORMAT.items():
            if any(set(keys) <= set(item) for keys in alternatives for item in items if isinstance(item, Mapping)):
                return format_name, name
        raise FormatError(
            f"column {name}: a message has the keys {', '.join(map(str, first))}; known are role and content, "
            "from and value, speaker and text or utterance, label and text, text and labels"
        )
    for format_name, (needed, _) in COLUMNS.items():
        if all(row.get(name) is not None for name in needed):
            return format_name, column
    if column in row:
        value = row[column]
        found = "empty" if value is None else "a text" if isinstance(value, str) else shortened(repr(value))
        raise FormatError(f"column {column} is {found}; write a list of messages with role and content")
    raise FormatError(
        f"there is no dialogue: neither a list of messages in column {column} nor the columns of a known format; "
        f"there are {', '.join(map(str, row)) or 'no columns'}"
    )


def has_dialogues(columns: Sequence[str], *, column: str, format_name: str = "auto") -> bool:
    """Return whether rows with these columns can contain dialogues."""
    if column in columns or set(columns) >= {*COMMON_FORM_KEYS}:
        return True
    lists = [names for name, names in LISTS.items() if format_name in ("auto", name)]
    spread = [needed for name, (needed, _) in COLUMNS.items() if format_name in ("auto", name)]
    return any(name in columns for names in lists for name in names) or any(
        set(needed) <= set(columns) for needed in spread
    )
