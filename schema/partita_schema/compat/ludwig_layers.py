"""Preparation of Ludwig files for merging with other files, before they are converted."""

from partita_schema.compat.ludwig_keys import RENAMED
from partita_schema.yaml.tree import Node, Path

WORDS = ("adapter", "trainer", "backend")
"""Sections that Ludwig lets be a single word, their type."""


def align(base: Node, over: Node) -> None:
    """Make two files mergeable in place: expand `adapter: lora`, and let a key replace its other name in `base`."""
    for tree in (base, over):
        for key in WORDS:
            spell_out(tree.find((key,)))
    for old, new in RENAMED.items():
        for mine, other in ((old, new), (new, old)):
            if over.find(path_of(mine)) is not None:
                remove(base, path_of(other))


def spell_out(section: Node | None) -> None:
    """Expand a section that is a single word to a mapping with this type."""
    if section is not None and isinstance(section.value, str):
        section.value = {"type": Node(section.value, section.position, section.key_position, section.text)}


def remove(tree: Node, path: Path) -> None:
    parent = tree.find(path[:-1])
    if parent is not None:
        parent.mapping().pop(str(path[-1]), None)


def path_of(key: str) -> Path:
    return tuple(key.split("."))
