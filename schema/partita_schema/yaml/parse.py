"""Parsing of YAML text to a tree with the position of every key and value, or to problems.

Built from parser events instead of composed nodes, so that depth, size and anchors are limited while reading: 10 MB of
brackets or a few lines of nested anchors are rejected at once. Keys are always strings. Only plain YAML is supported:
one document, no tags, no duplicate keys. `<<` merges and anchors work.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import yaml
from yaml.events import (
    AliasEvent,
    CollectionEndEvent,
    DocumentStartEvent,
    Event,
    MappingStartEvent,
    NodeEvent,
    ScalarEvent,
    SequenceStartEvent,
)

from partita_schema.errors import ConfigError, Problem
from partita_schema.yaml.tree import MAX_DEPTH, Node, Path, SourcePosition, dotted

MAX_VALUES = 100_000
"""Maximum number of values. The values of an anchor count each time it is used."""

Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
INTEGER = re.compile(r"[-+]?(0|[1-9][0-9_]*)")
OCTAL = re.compile(r"[-+]?0[0-7_]+")
HEXADECIMAL = re.compile(r"[-+]?0x[0-9a-fA-F_]+")
SEXAGESIMAL = re.compile(r"[-+]?([1-9][0-9_]*(:[0-5]?[0-9])+|[0-9][0-9_]*(:[0-5]?[0-9])+\.[0-9_]*)")
FLOAT = re.compile(r"[-+]?([0-9][0-9_]*\.[0-9_]*([eE][-+][0-9]+)?|\.[0-9][0-9_]*([eE][-+][0-9]+)?)")
SPECIAL = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("yes", "Yes", "YES", "true", "True", "TRUE", "on", "On", "ON"), True),
    **dict.fromkeys(("no", "No", "NO", "false", "False", "FALSE", "off", "Off", "OFF"), False),
    **dict.fromkeys((".inf", ".Inf", ".INF", "+.inf", "+.Inf", "+.INF"), float("inf")),
    **dict.fromkeys(("-.inf", "-.Inf", "-.INF"), float("-inf")),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), float("nan")),
}
"""Words that YAML 1.1 does not read as text, with their values."""


EMPTY = "the file is empty; write at least base_model, input_features and output_features"


def read_yaml(text: str, *, file: str | None, empty: str = EMPTY) -> tuple[Node, tuple[Problem, ...]]:
    """Return the tree of one YAML document, and problems that did not stop parsing.

    Args:
        text: The document.
        file: Path of its file, for errors.
        empty: The error text for a document without content.

    Raises:
        ConfigError: A problem stopped parsing.
    """
    builder = Builder(file)
    try:
        root = builder.document(yaml.parse(text, Loader=Loader))
    except yaml.YAMLError as error:
        from partita_schema.yaml.syntax_errors import syntax_problem

        raise ConfigError([syntax_problem(error, text, file=file)]) from None
    except RecursionError:
        raise ConfigError(
            [Problem("", f"is nested more than {MAX_DEPTH} levels deep; write it flatter", file)]
        ) from None
    if root is None or root.value is None:
        raise ConfigError([Problem("", empty, file, 1, 1)])
    if not isinstance(root.value, dict):
        kind = "a list" if isinstance(root.value, list) else "a single text"
        message = f"holds {kind}; write keys and values at the top, such as base_model: ..."
        raise ConfigError([builder.problem((), message, root.position)])
    return root, tuple(builder.problems)


@dataclass
class Builder:
    """Builds the tree from parser events."""

    file: str | None
    problems: list[Problem] = field(default_factory=list)
    """Problems that do not stop parsing."""
    anchors: dict[str, Node | None] = field(default_factory=dict)
    """Nodes by anchor; None while the node is incomplete."""
    values: int = 0
    depth: int = 0

    def problem(self, path: Path, message: str, position: SourcePosition | None) -> Problem:
        line, column = (position.line, position.column) if position else (None, None)
        return Problem(dotted(path), message, self.file, line, column)

    def stop(self, path: Path, message: str, position: SourcePosition | None) -> ConfigError:
        return ConfigError([self.problem(path, message, position)])

    def position(self, event: Event) -> SourcePosition:
        assert event.start_mark is not None
        return SourcePosition(self.file, event.start_mark.line + 1, event.start_mark.column + 1)

    def document(self, events: Iterator[Event]) -> Node | None:
        root, documents = None, 0
        for event in events:
            if isinstance(event, DocumentStartEvent):
                documents += 1
                if documents > 1:
                    raise self.stop((), "a second document starts here; write one, without ---", self.position(event))
            elif isinstance(event, NodeEvent):
                root = self.node(event, events, ())
        return root

    def node(self, event: Event, events: Iterator[Event], path: Path) -> Node:
        if isinstance(event, AliasEvent):
            return self.alias(event, path)
        assert isinstance(event, ScalarEvent | MappingStartEvent | SequenceStartEvent)
        position = self.position(event)
        self.count(1, position)
        # Some parser versions report the tag `!` for quoted text. Only tags that were written count.
        if event.tag not in (None, "!"):
            raise self.stop(path, f"has the YAML tag {event.tag}; remove it, tags are not read", position)
        if event.anchor:
            self.anchors[event.anchor] = None
        if isinstance(event, ScalarEvent):
            node = self.scalar(event, path, position)
        else:
            node = self.collection(event, events, path, position)
        if event.anchor:
            self.anchors[event.anchor] = node
        return node

    def collection(
        self,
        event: MappingStartEvent | SequenceStartEvent,
        events: Iterator[Event],
        path: Path,
        position: SourcePosition,
    ) -> Node:
        """Return the node of a mapping or a list, and consume its events.

        Args:
            event: Its first event.
            events: The events after it.
            path: Its keys from the top.
            position: Its position in the text.
        """
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise self.stop((), f"is nested more than {MAX_DEPTH} levels deep; write it flatter", position)
        if isinstance(event, MappingStartEvent):
            node = Node(self.mapping(events, path), position)
        else:
            node = Node(self.sequence(events, path), position)
        self.depth -= 1
        return node

    def count(self, number: int, position: SourcePosition) -> None:
        self.values += number
        if self.values > MAX_VALUES:
            raise self.stop((), f"holds more than {MAX_VALUES:,} values, anchors counted; write less", position)

    def alias(self, event: AliasEvent, path: Path) -> Node:
        position = self.position(event)
        if event.anchor not in self.anchors:
            raise self.stop(
                path, f"*{event.anchor} refers to nothing; write &{event.anchor} before it, or quote it", position
            )
        node = self.anchors[event.anchor]
        if node is None:
            raise self.stop(path, f"*{event.anchor} contains itself; write the values out", position)
        self.count(size(node), position)
        return node.copy()

    def sequence(self, events: Iterator[Event], path: Path) -> list[Node]:
        items: list[Node] = []
        for event in events:
            if isinstance(event, CollectionEndEvent):
                break
            items.append(self.node(event, events, (*path, len(items))))
            items[-1].key_position = self.position(event)
        return items

    def mapping(self, events: Iterator[Event], path: Path) -> dict[str, Node]:
        children: dict[str, Node] = {}
        merged: list[Node] = []
        for event in events:
            if isinstance(event, CollectionEndEvent):
                break
            position = self.position(event)
            if not isinstance(event, ScalarEvent):
                raise self.stop(
                    path, f"a key is {key_kind(event)}; put quotes around text with braces or brackets", position
                )
            key = event.value
            child = self.node(next(events), events, (*path, key))
            child.key_position = position
            if key == "<<" and event.implicit[0]:
                merged.append(child)
            elif key in children:
                self.problems.append(self.duplicate((*path, key), position, children[key]))
            else:
                children[key] = child
        for child in merged:
            self.merge(child, children, path)
        return children

    def duplicate(self, path: Path, position: SourcePosition, first: Node) -> Problem:
        line = first.key_position.line if first.key_position else 0
        return self.problem(path, f"the key occurs twice, first in line {line}; keep one", position)

    def merge(self, child: Node, children: dict[str, Node], path: Path) -> None:
        """Merge `<<`: add keys of other mappings that this one does not have. Earlier mappings win."""
        for source in child.value if isinstance(child.value, list) else [child]:
            if not isinstance(source.value, dict):
                raise self.stop(path, "<< merges mappings only; write << : *anchor of a mapping", child.key_position)
            for key, value in source.value.items():
                children.setdefault(key, value)

    def scalar(self, event: ScalarEvent, path: Path, position: SourcePosition) -> Node:
        text = event.value
        if not event.implicit[0]:
            return Node(text, position)
        for pattern, kind in ((OCTAL, "octal"), (SEXAGESIMAL, "base 60")):
            if pattern.fullmatch(text):
                message = f"{text} is a number in {kind} to YAML; write '{text}' in quotes, or a plain number"
                self.problems.append(self.problem(path, message, position))
                return Node(text, position, text=text)
        return Node(plain_value(text), position, text=text)


def plain_value(text: str) -> object:
    """Return the value of an unquoted YAML scalar. Dates stay strings."""
    if text in SPECIAL:
        return SPECIAL[text]
    # int() fails above 4,300 digits, and no configuration needs a hundred
    if INTEGER.fullmatch(text) and len(text) < 100:
        return int(text.replace("_", ""))
    if HEXADECIMAL.fullmatch(text) and len(text) < 100:
        return int(text.replace("_", ""), 16)
    if FLOAT.fullmatch(text):
        return float(text.replace("_", ""))
    return text


def key_kind(event: Event) -> str:
    if isinstance(event, MappingStartEvent):
        return "a mapping in braces"
    return "a list in brackets" if isinstance(event, SequenceStartEvent) else "an alias"


def size(node: Node) -> int:
    return 1 + sum(size(child) for _, child in node.children())


def read_value(text: str) -> Node:
    """Return the tree of one YAML value, such as in an override. Text that is not YAML, and `Say: yes`, is a string."""
    try:
        node = Builder(None).document(yaml.parse(text, Loader=Loader))
    except (yaml.YAMLError, ConfigError, RecursionError):
        return Node(text)
    if node is None:
        return Node(None, text="")
    if isinstance(node.value, dict | list) and text.strip()[0] not in "{[":
        return Node(text)
    return forget_positions(node)


def forget_positions(node: Node) -> Node:
    if isinstance(node.value, dict):
        return Node({key: forget_positions(child) for key, child in node.value.items()})
    if isinstance(node.value, list):
        return Node([forget_positions(child) for child in node.value])
    return replace(node, position=None, key_position=None)
