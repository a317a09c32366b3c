"""Overrides such as `--set trainer.epochs=1`, written into the tree before it is checked."""

import re
from collections.abc import Sequence

from partita_schema.common.text import counted
from partita_schema.errors import ConfigError, Problem
from partita_schema.yaml.parse import read_value
from partita_schema.yaml.tree import Node, Path, SourcePosition, dotted
from partita_schema.yaml.variables import expand_variables

ORIGIN = "--set"
"""Origin of the values of overrides."""


def apply_overrides(root: Node, overrides: Sequence[str]) -> None:
    """Write each `key.path=value` into the tree. Raises ConfigError with every invalid override."""
    problems = [problem for text in overrides if (problem := apply(root, text)) is not None]
    if problems:
        raise ConfigError(problems)


def apply(root: Node, text: str) -> Problem | None:
    label = f"--set {text}"
    position = SourcePosition(label, None, None)
    keys, equals, written = text.partition("=")
    path = path_of(keys)
    if not equals or not path:
        return Problem("", "is not an override; write key.path=value, such as trainer.epochs=1", label)
    if not written.strip():
        return Problem(dotted(path), "has no value; write one after =, or null for none", label)
    node = root
    for depth, part in enumerate(path[:-1]):
        child = step(node, part, position)
        if isinstance(child, str):
            return Problem(dotted(path[: depth + 1]), child, label)
        node = child
    value = mark(read_value(written), position)
    if problem := next(expand_variables(value, at=path), None):
        return problem
    if isinstance(part := path[-1], int):
        child = step(node, part, position)
        if isinstance(child, str):
            return Problem(dotted(path), child, label)
        assert isinstance(node.value, list)
        node.value[part] = value
        return None
    if node.value is None:
        node.value = {}
    if isinstance(node.value, list):
        message = f"{dotted(path[:-1])} is a list; write the number of an item, counted from 0, before the key"
        return Problem(dotted(path), message, label)
    if not isinstance(node.value, dict):
        return Problem(dotted(path), f"{dotted(path[:-1])} has no keys to set; {replace_whole(path[:-1])}", label)
    node.value[part] = value
    return None


def path_of(keys: str) -> Path:
    """Return `output_features.0.name` or `output_features[0].name` as a path."""
    parts = [part for part in re.split(r"[.\[\]]+", keys.strip()) if part]
    return tuple(int(part) if re.fullmatch(r"[0-9]{1,9}", part) else part for part in parts)


def step(node: Node, part: str | int, position: SourcePosition) -> Node | str:
    """Return the child, creating a missing section. Return an error text if there can be no child."""
    if isinstance(part, int):
        if not isinstance(node.value, list):
            return "is not a list; write a key instead of a number"
        if part >= len(node.value):
            return f"the list has {counted(len(node.value), 'item')}, counted from 0; write a smaller number"
        item: Node = node.value[part]
        return item
    if node.value is None:
        node.value = {}
    if isinstance(node.value, list):
        return "is a list; write the number of an item, counted from 0, before the key"
    if not isinstance(node.value, dict):
        return "is under a value that has no keys; set the whole section, as --set key={...}"
    child: Node = node.value.setdefault(part, Node({}, position, position, origin=ORIGIN))
    return child


def replace_whole(path: Path) -> str:
    return f"write --set {dotted(path)}={{...}}"


def mark(node: Node, position: SourcePosition) -> Node:
    """Set the override as position and origin of the whole tree, and return it."""
    node.position = node.key_position = position
    node.origin = ORIGIN
    for _, child in node.children():
        mark(child, position)
    return node
