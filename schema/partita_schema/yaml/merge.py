"""Merging of configuration trees: mappings merge key by key, lists and scalars replace, another `type` replaces."""

import os
from collections.abc import Sequence
from dataclasses import replace

import yaml

from partita_schema.yaml.block import BlockDumper, Quoted
from partita_schema.yaml.tree import Node, Path
from partita_schema.yaml.variables import VariableError, escaped, expanded


def merge(base: Node, over: Node) -> Node:
    """Return the tree with the values of `over`, and those of `base` that it does not set.

    A mapping with another `type` replaces the one of `base`, because its keys belong to the other type. Positions are
    those of the file that sets a value; a mapping in both files has the position in `over`, if that is a file.
    """
    if not isinstance(base.value, dict) or not isinstance(over.value, dict) or other_type(base, over):
        return over
    children = dict(base.value)
    for key, child in over.value.items():
        children[key] = merge(children[key], child) if key in children else child
    place = over if over.position is not None else base
    return replace(over, value=children, position=place.position, key_position=place.key_position)


def other_type(base: Node, over: Node) -> bool:
    """Return whether both mappings have a `type`, and not the same one."""
    types = [node.value for node in (base.find(("type",)), over.find(("type",))) if node is not None]
    return len(types) == 2 and expanded_type(types[0]) != expanded_type(types[1])


def expanded_type(value: object) -> object:
    try:
        return expanded(value, os.environ) if isinstance(value, str) else value
    except VariableError:  # reported when the values are expanded
        return value


def merged_text(root: Node, names: Sequence[str]) -> str:
    """Return a merged tree as the YAML text of one file, with references to variables as written.

    Args:
        root: The tree, before variables are expanded.
        names: The files it was merged from, for the comment at the top.
    """
    dumped = yaml.dump(written(root, ()), Dumper=BlockDumper, sort_keys=False, allow_unicode=True, width=100)
    return f"# Merged from {', '.join(' '.join(name.split()) for name in names)}\n{dumped}"


def written(node: Node, path: Path) -> object:
    """Return the value of a node as it must be written so that it is read in the same way."""
    if isinstance(node.value, dict):
        return {key: written(child, (*path, key)) for key, child in node.value.items()}
    if isinstance(node.value, list):
        return [written(child, (*path, index)) for index, child in enumerate(node.value)]
    if node.position is None:  # from Python, where variables are not expanded
        return escaped(node.value, path)
    # A variable in quotes stays a text, so it must stay in quotes.
    return (
        Quoted(node.value) if isinstance(node.value, str) and node.text is None and "${" in node.value else node.value
    )
