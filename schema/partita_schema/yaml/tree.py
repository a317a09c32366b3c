"""A configuration as written: values with their position in the file.

YAML, dictionaries and overrides are converted to this tree, and pydantic checks it. Ludwig's keys are moved within it,
so later messages still have the line number.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import TypeAlias

from partita_schema.errors import ConfigError, Problem

Scalar: TypeAlias = object
Path: TypeAlias = tuple[str | int, ...]
MAX_DEPTH = 64
"""Maximum nesting depth that is read; no configuration is deeper."""


@dataclass(frozen=True)
class SourcePosition:
    """A position in a file."""

    file: str | None
    line: int | None
    column: int | None

    def __str__(self) -> str:
        return ":".join(str(part) for part in (self.file or "text", self.line) if part is not None)


@dataclass
class Node:
    """A value with its position and origin."""

    value: "Scalar | dict[str, Node] | list[Node]"
    position: SourcePosition | None = None
    """Position of the value."""
    key_position: SourcePosition | None = None
    """Position of the key, or of the dash in a list."""
    text: str | None = None
    """A plain scalar as written, such as `no` or `1e3`. None if it was quoted or is not from YAML."""
    origin: str | None = None
    """Origin of the value if it is not a line of the file: --set or ludwig."""
    written: str | None = None
    """The key as written, if the value was moved."""
    reference: str | None = None
    """The value as written, if environment variables in it were expanded."""

    def children(self) -> "Iterator[tuple[str | int, Node]]":
        if isinstance(self.value, dict):
            yield from self.value.items()
        elif isinstance(self.value, list):
            yield from enumerate(self.value)

    def find(self, path: Path) -> "Node | None":
        node: Node | None = self
        for part in path:
            if node is None:
                return None
            if isinstance(node.value, dict) and isinstance(part, str):
                node = node.value.get(part)
            elif isinstance(node.value, list) and isinstance(part, int):
                node = node.value[part] if part < len(node.value) else None
            else:
                return None
        return node

    def plain(self) -> object:
        """Return the tree as dicts, lists and scalars."""
        if isinstance(self.value, dict):
            return {key: child.plain() for key, child in self.value.items()}
        if isinstance(self.value, list):
            return [child.plain() for child in self.value]
        return self.value

    def copy(self) -> "Node":
        """Return a deep copy of the tree."""
        if isinstance(self.value, dict):
            return replace(self, value={key: child.copy() for key, child in self.value.items()})
        if isinstance(self.value, list):
            return replace(self, value=[child.copy() for child in self.value])
        return replace(self)

    def mapping(self) -> "dict[str, Node]":
        """Return the children by key, for modification. For a value that is not a mapping, return a new empty dict."""
        return self.value if isinstance(self.value, dict) else {}


def dotted(path: Path) -> str:
    """Return a path as text, such as `output_features[0].decoder`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


def tree_of(value: object, *, depth: int = 0) -> Node:
    """Return the tree of a dictionary. Raises ConfigError if it is nested too deeply."""
    if depth > MAX_DEPTH:
        raise ConfigError([Problem("", f"is nested more than {MAX_DEPTH} levels deep; write it flatter")])
    if isinstance(value, Mapping):
        return Node({str(key): tree_of(item, depth=depth + 1) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return Node([tree_of(item, depth=depth + 1) for item in value])
    return Node(str(value) if isinstance(value, PurePath) else value)
