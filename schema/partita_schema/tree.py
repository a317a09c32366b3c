"""A configuration as it was written: values that know where they stand.

The tree lies between YAML, dictionaries and overrides on one side and pydantic on the other. Ludwig's keys are moved
in it, so that every later message still knows the line.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import TypeAlias

from partita_schema.errors import ConfigError, Problem

Scalar: TypeAlias = object
Path: TypeAlias = tuple[str | int, ...]
MAX_DEPTH = 64
"""Levels of nesting that are read; deeper is refused, since no configuration is."""


@dataclass(frozen=True)
class Place:
    """Where something stands."""

    file: str | None
    line: int | None
    column: int | None

    def __str__(self) -> str:
        return ":".join(str(part) for part in (self.file or "text", self.line) if part is not None)


@dataclass
class Node:
    """A value, its place and its origin."""

    value: "Scalar | dict[str, Node] | list[Node]"
    place: Place | None = None
    """Where the value starts."""
    key_place: Place | None = None
    """Where its key, or the dash of a list, stands."""
    text: str | None = None
    """A plain scalar as it was written: `no`, `1e3`; None for anything quoted or not from YAML."""
    origin: str | None = None
    """Where the value comes from when that is no line: --set, ludwig."""
    written: str | None = None
    """The key as it was written, where it was moved."""

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
        """dict, list and scalars."""
        if isinstance(self.value, dict):
            return {key: child.plain() for key, child in self.value.items()}
        if isinstance(self.value, list):
            return [child.plain() for child in self.value]
        return self.value

    def copy(self) -> "Node":
        """The tree anew, down to the leaves."""
        if isinstance(self.value, dict):
            return replace(self, value={key: child.copy() for key, child in self.value.items()})
        if isinstance(self.value, list):
            return replace(self, value=[child.copy() for child in self.value])
        return replace(self)

    def mapping(self) -> "dict[str, Node]":
        """The children by key, to be changed; empty and apart for what is no mapping."""
        return self.value if isinstance(self.value, dict) else {}


def dotted(path: Path) -> str:
    """`output_features[0].decoder`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


def tree_of(value: object, *, depth: int = 0) -> Node:
    """The tree of a dictionary. Raises ConfigError for nesting without end."""
    if depth > MAX_DEPTH:
        raise ConfigError([Problem("", f"is nested more than {MAX_DEPTH} levels deep; write it flatter")])
    if isinstance(value, Mapping):
        return Node({str(key): tree_of(item, depth=depth + 1) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return Node([tree_of(item, depth=depth + 1) for item in value])
    return Node(str(value) if isinstance(value, PurePath) else value)
