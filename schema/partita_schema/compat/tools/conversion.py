"""What the conversions of all tools share: entries of the tables of keys, and the conversion of one file.

Values are moved from the tree of the tool's file to a new tree with their positions, so that errors have the line of
the original file. Every key of the file ends up in one list of the report.
"""

import glob
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from partita_schema.errors import ConfigError, Problem
from partita_schema.yaml.tree import Node, SourcePosition, tree_of


@dataclass(frozen=True)
class To:
    """A key that is moved to another name."""

    path: str
    values: Mapping[Any, Any] = field(default_factory=dict)
    """Values that have other names here."""


@dataclass(frozen=True)
class By:
    """A key that a rule of the tool converts."""

    to: str
    """What it becomes, for the documentation."""


@dataclass(frozen=True)
class Unneeded:
    """A key that is not needed here."""

    reason: str


@dataclass(frozen=True)
class Missing:
    """A key that has no counterpart: without it, the run may differ."""

    reason: str
    """Why, and what to do instead."""


Entry: TypeAlias = To | By | Unneeded | Missing
Table: TypeAlias = Mapping[str, Entry]
"""Entries by key. A name that ends with `*` stands for all keys that begin so."""


@dataclass
class Report:
    """What became of every key of a file."""

    mapped: list[tuple[str, str]] = field(default_factory=list)
    """Keys with a counterpart, and its name."""
    unneeded: list[Problem] = field(default_factory=list)
    """Keys that are not needed here, with the reason."""
    missing: list[Problem] = field(default_factory=list)
    """Keys without a counterpart, with the reason and what to do instead."""
    unset: list[str] = field(default_factory=list)
    """Keys that are empty or switched off."""
    defaults: list[tuple[str, str, object]] = field(default_factory=list)
    """Defaults of the tool that are written out because they differ here: key, name here, value."""
    notes: list[str] = field(default_factory=list)
    """Differences that no key of the file is about."""

    @property
    def keys(self) -> list[str]:
        """All keys in the lists of the report."""
        problems = [problem.path for problem in (*self.unneeded, *self.missing)]
        return [*(key for key, _ in self.mapped), *problems, *self.unset]


class Conversion:
    """The conversion of one file, or of one mapping in it."""

    def __init__(self, source: Node, *, table: Table, folder: Path, output: Path, prefix: str = "") -> None:
        """Start a conversion.

        Args:
            source: The mapping to convert.
            table: Entries of its keys.
            folder: Folder of the file.
            output: Folder of the file to write, the base of relative paths.
            prefix: Path of the mapping in the file, for the report.
        """
        self.source, self.table = source, table
        self.folder, self.output, self.prefix = folder, output, prefix
        self.root = Node({})
        self.report = Report()
        self.left: dict[str, Node] = {}
        for key, node in source.mapping().items():
            if node.value in (None, "") or node.value == [] or node.value == {}:
                self.report.unset.append(self.name(key))
            else:
                self.left[key] = node

    def within(self, source: Node, *, table: Table, prefix: str) -> "Conversion":
        """Return the conversion of a mapping in the file, which shares the report."""
        inner = Conversion(source, table=table, folder=self.folder, output=self.output, prefix=prefix)
        self.report.unset.extend(inner.report.unset)
        inner.report = self.report
        return inner

    def name(self, key: str) -> str:
        return f"{self.prefix}.{key}" if self.prefix else key

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key that is not converted yet, as plain data."""
        return self.left[key].plain() if key in self.left else default

    def is_on(self, key: str) -> bool:
        """Return whether a flag that is not converted yet is set."""
        return self.get(key) not in (None, False, "false", "no", "none")

    def is_empty(self, key: str) -> bool:
        """Return whether the file sets a key to nothing."""
        return self.name(key) in self.report.unset

    def has(self, path: str) -> bool:
        """Return whether a key of the result is set."""
        return self.root.find(tuple(path.split("."))) is not None

    def take(self, key: str, to: str) -> Node:
        """Remove a key from those that are left, record that it becomes `to`, and return its value."""
        self.report.mapped.append((self.name(key), to))
        return self.left.pop(key)

    def move(self, key: str, path: str, value: object = ...) -> None:
        """Convert a key to `path`, if it is left; `value` replaces its value."""
        if key in self.left:
            node = self.take(key, path)
            self.put(path, node.plain() if value is ... else value, at=node, written=self.name(key))

    def put(self, path: str, value: object, *, at: Node | None = None, written: str | None = None) -> None:
        """Set a key of the result.

        Args:
            path: Its dotted path.
            value: Its value as plain data.
            at: The value in the file that it comes from, for the position of errors.
            written: The key in the file.
        """
        *sections, last = path.split(".")
        parent = self.root
        for part in sections:
            parent = parent.mapping().setdefault(part, Node({}))
        node = tree_of(value)
        if at is not None:
            if not isinstance(value, dict | list | tuple) and value == at.value:
                node.text = at.text
            place(node, at.position, at.key_position)
            node.written = written
        parent.mapping()[last] = node

    def value(self, path: str) -> object:
        """Return the value of a key of the result; None if it is not set."""
        node = self.root.find(tuple(path.split(".")))
        return node.value if node is not None else None

    def default(self, key: str, path: str, value: object) -> None:
        """Write out a default of the tool, unless the file has set it."""
        if not self.has(path) and key not in self.left:
            self.put(path, value)
            self.report.defaults.append((key, path, value))

    def drop(self, key: str, entry: Unneeded | Missing) -> None:
        """Record a key as not needed or without a counterpart, if it is left."""
        node = self.left.pop(key, None)
        if node is None:
            return
        if node.value is False:
            self.report.unset.append(self.name(key))
            return
        problems = self.report.unneeded if isinstance(entry, Unneeded) else self.report.missing
        problems.append(problem_at(node, self.name(key), entry.reason))

    def miss(self, key: str, reason: str) -> None:
        """Record a key as without a counterpart, if it is left."""
        self.drop(key, Missing(reason))

    def note(self, text: str) -> None:
        if text not in self.report.notes:
            self.report.notes.append(text)

    def refusal(self, key: str, message: str) -> ConfigError:
        """Return the error for a file that cannot be converted because of a key, or of what lacks it."""
        if key not in self.left:
            return ConfigError([problem_at(self.source, self.prefix, message)])
        return ConfigError([problem_at(self.left[key], self.name(key), message)])

    def apply_table(self, *, later: Sequence[str] = ()) -> None:
        """Convert all keys that are left by their entries, except those in `later`."""
        for key in [key for key in self.left if key not in later]:
            entry = entry_of(self.table, key)
            if isinstance(entry, To):
                self.move_to(key, entry)
            elif isinstance(entry, Unneeded | Missing):
                self.drop(key, entry)
            elif entry is None:
                self.miss(key, "the conversion does not know this key; look up what it does")
            elif key in self.left:
                self.miss(key, "has no effect together with the other keys of the file")

    def move_to(self, key: str, entry: To) -> None:
        value = self.get(key)
        if entry.values and isinstance(value, str | bool | int):
            value = entry.values.get(value, value)
        self.move(key, entry.path, value)

    def local(self, text: str) -> str | None:
        """Return a path or glob relative to the file to write, if it exists; otherwise None.

        The tools resolve paths against the current folder. The folder of the file is tried next.
        """
        if "://" in text or "\0" in text:
            return None
        for base in (Path(), self.folder):
            path = base / Path(text).expanduser()
            if path.exists() or (glob.has_magic(text) and glob.glob(str(path))):  # noqa: PTH207 - takes absolute globs
                if Path(text).is_absolute() or text.startswith("~"):
                    return text
                return os.path.relpath(path, self.output)
        return None


def place(node: Node, position: SourcePosition | None, key_position: SourcePosition | None) -> None:
    """Give a value and everything in it the position of the value in the file that it comes from."""
    node.position, node.key_position = position, key_position
    for _, child in node.children():
        place(child, position, key_position)


def entry_of(table: Table, key: str) -> Entry | None:
    """Return the entry of a key, by its name or by the beginning of its name."""
    if key in table:
        return table[key]
    return next((entry for name, entry in table.items() if name.endswith("*") and key.startswith(name[:-1])), None)


def problem_at(node: Node, key: str, message: str) -> Problem:
    position = node.key_position or node.position
    if position is None:
        return Problem(key, message)
    return Problem(key, message, position.file, position.line, position.column)


def names_of(value: object) -> list[str]:
    """Return the names of a list, or of a text with commas."""
    items: Sequence[object] = value if isinstance(value, list) else str(value).split(",")
    return [str(item).strip() for item in items if str(item).strip()]
