"""Propose features, types, labels and the task for a file of rows, for `partita init --data`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from partita.data.columns import Column, Kind, column_of
from partita.data.formats import FORMATS
from partita.data.formats.base import FileSlice
from partita.data.formats.json import json_row
from partita.data.sources.sources import find_files, source_of
from partita_schema.common.text import counted
from partita_schema.dialogue_formats import unread_keys
from partita_schema.dump import scalar
from partita_schema.errors import DataError, shortened
from partita_schema.sections.sources import FileSource

FIRST_ROWS = 2000
"""Number of rows that are examined."""
OUTPUT_NAMES = (
    *("label", "labels", "class", "category", "target", "answer", "output", "response", "completion", "reply"),
    *("score", "rating", "sentiment", "intent", "team", "summary", "translation"),
)
"""Names of columns that hold the prediction target, the likeliest first."""
TASK_OF_KIND: Mapping[Kind, str] = {
    "category": "classify",
    "set": "tag",
    "json": "extract",
    "number": "score",
    "text": "answer",
}


@dataclass(frozen=True)
class Proposal:
    """Proposed task and features for a file of rows."""

    task: str
    """A task of partita_schema.templates.TASKS."""
    features: str
    """YAML of input_features, output_features and prompt."""
    summary: str
    """One line for the terminal."""
    ignore_keys: tuple[str, ...] = ()
    """Keys of messages and columns that are not read as part of a dialogue."""
    warning: str = ""
    """Why a model would learn nothing from the rows; empty if there is no objection."""


@dataclass(frozen=True)
class FirstRows:
    """Columns of a file, from its first rows."""

    columns: Sequence[Column]
    complete: bool
    """Whether these are all rows of the file."""
    ignore_keys: tuple[str, ...] = ()
    """Keys of messages and columns that are not read as part of a dialogue."""

    @property
    def names(self) -> list[str]:
        """Names of the columns."""
        return [column.name for column in self.columns]

    def propose(self, task: str | None) -> Proposal | None:
        """Return the proposal, for `task` if one is given; None if no column fits it."""
        proposal = proposal_of(self.columns, task=task, complete=self.complete)
        if proposal is None or proposal.task != "chat" or not self.ignore_keys:
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
    rows = list(islice(readable_rows(FileSlice(file, path, source.type)), FIRST_ROWS + 1))
    if not rows:
        raise DataError(f"{path} has no row that can be read")
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = [column_of(name, [row.get(name) for row in rows[:FIRST_ROWS]]) for name in names]
    dialogue = next((column.name for column in columns if column.kind == "dialogue"), None)
    ignored = [key for row in rows if dialogue is not None for key in unread_keys(row, column=dialogue)]
    return FirstRows(columns, complete=len(rows) <= FIRST_ROWS, ignore_keys=tuple(dict.fromkeys(ignored)))


def readable_rows(file: FileSlice) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a file, without those that cannot be read."""
    for row, _ in FORMATS[file.kind].read_slice(file, 0, None):
        values: Any = row.row
        reason = row.reason
        if not reason and isinstance(values, bytes):
            values, reason = json_row(values)
        if not reason:
            yield values


def proposal_of(columns: Sequence[Column], *, task: str | None, complete: bool) -> Proposal | None:
    """Return features for these columns; `complete` says whether they hold all rows of the file."""
    dialogue = next((column for column in columns if column.kind == "dialogue"), None)
    if dialogue is not None and task in (None, "chat"):
        features = (
            f"input_features:\n  - {{name: {scalar(dialogue.name)}, type: dialogue}}\n"
            "output_features:\n  - {name: reply, type: text}         # what the assistant says in the dialogue\n"
        )
        return Proposal("chat", features, f"input {dialogue.name} (dialogue), output: the assistant's replies")
    output = output_of(columns, task=task)
    if output is None:
        return None
    others = [column for column in columns if column.name != output.name]
    inputs = [column for column in others if column.kind == "text"] or [
        column for column in others if column.kind in TASK_OF_KIND
    ]
    if not inputs:
        return None
    unused = [column.name for column in others if column not in inputs]
    task = task or TASK_OF_KIND[output.kind]
    features = "".join(
        (inputs_yaml(inputs, unused), output_yaml(output, complete=complete), prompt_yaml(inputs, output))
    )
    labels = f", {counted(len(output.labels), 'label')}" if output.kind in ("category", "set") else ""
    rest = f"; not used: {', '.join(unused)}" if unused else ""
    return Proposal(
        task,
        features,
        f"input {', '.join(one.name for one in inputs)}, output {output.name} ({output.kind}{labels}){rest}",
        warning=one_value_warning(output, complete=complete),
    )


def one_value_warning(output: Column, *, complete: bool) -> str:
    if output.only_value is None:
        return ""
    rows = "all rows" if complete else f"the first {FIRST_ROWS:,} rows"
    return (
        f"the output {output.name} is {shortened(output.only_value)!r} in {rows}, so there is nothing to learn; "
        "name another output column, or use rows with different answers"
    )


def output_of(columns: Sequence[Column], *, task: str | None) -> Column | None:
    """Return the column to predict: by name, else by kind, else the last one."""
    usable = [column for column in columns if column.kind in TASK_OF_KIND]
    if task == "score":
        usable = [replace(column, kind="number") for column in usable if column.bounds]
    elif task == "extract":
        lists = [column for column in usable if column.kind == "set" and column.separator is None]
        usable = [replace(column, kind="json") for column in usable if column.kind == "json" or column in lists]
    elif task in ("answer", "chat"):
        usable = [replace(column, kind="text") for column in usable]
    elif task is not None:
        usable = [column for column in usable if TASK_OF_KIND[column.kind] == task]
    if not usable or len(columns) < 2:
        return None
    named = [column for name in OUTPUT_NAMES for column in usable if column.name.lower() == name]
    by_kind = [
        column for kind in ("category", "set", "number", "json") for column in reversed(usable) if column.kind == kind
    ]
    return (named or by_kind or usable[-1:])[0]


def inputs_yaml(inputs: Sequence[Column], unused: Sequence[str]) -> str:
    lines = [
        f"  - {{name: {scalar(one.name)}, type: text"
        + (
            ", preprocessing: {missing_value_strategy: fill_with_const}}    # some rows have none"
            if one.missing
            else "}"
        )
        for one in inputs
    ]
    note = [f"  # not used: {', '.join(map(scalar, unused))}"] if unused else []
    return "\n".join(["input_features:", *lines, *note, ""])


def output_yaml(output: Column, *, complete: bool) -> str:
    lines = ["output_features:", f"  - name: {scalar(output.name)}", f"    type: {output.kind}"]
    if output.kind == "set" and output.separator not in (None, ","):
        lines.append(f"    preprocessing: {{separator: {scalar(output.separator)}}}")
    elif output.kind == "set" and output.missing:
        lines.append("    # preprocessing: {missing_value_strategy: fill_with_const}   # if no value means no label")
    if output.kind in ("category", "set"):
        labels = f"labels: [{', '.join(map(scalar, output.labels))}]"
        if complete and len(output.labels) > 1 and not {"True", "False"} & set(output.labels):
            lines += ["    decoder:", f"      {labels}"]
        else:  # other labels may follow later in the file; without a list, those of the training rows are used
            lines += [f"    # decoder: {{{labels}}}   # labels of the first {FIRST_ROWS:,} rows"]
    if output.kind == "number" and output.bounds:
        low, high = output.bounds
        lines += [f"    # decoder: {{minimum: {low:g}, maximum: {high:g}}}   # as in the first rows"]
    if output.kind == "json" and output.example:
        properties = ", ".join(f"{scalar(key)}: {{type: {json_type(value)}}}" for key, value in output.example.items())
        lines += ["    decoder:", "      json_schema:", "        type: object", f"        properties: {{{properties}}}"]
    return "\n".join([*lines, ""])


def prompt_yaml(inputs: Sequence[Column], output: Column) -> str:
    """Return a first version of the task in words, for the user to improve."""
    sources = " and the ".join(one.name for one in inputs)
    if output.kind == "category":
        choice = f" as {', '.join(output.labels[:-1])} or {output.labels[-1]}" if 1 < len(output.labels) <= 10 else ""
        task = f"Classify the {sources}{choice}."
    elif output.kind == "set":
        task = f"Write those of the labels {', '.join(output.labels)} that apply to the {sources}, as a JSON array."
    elif output.kind == "number":
        task = f"Write the {output.name} of the {sources} as a number."
    elif output.kind == "json":
        task = f"Write the {output.name} in the {sources} as JSON."
    else:
        task = f"Write the {output.name} for the {sources}."
    return f"prompt:\n  task: {scalar(task)}\n"


def json_type(value: Any) -> str:
    """Return the JSON schema name of a value's type."""
    names = ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (list, "array"), (dict, "object"))
    return next((name for kind, name in names if isinstance(value, kind)), "'null'")
