"""Relative paths of values that come from files in other folders.

A relative path is relative to the folder of its file. Jobs resolve paths against one folder, that of the main
file, so a path from a file in another folder is rewritten relative to it. `module:Class` values are not rewritten.
"""

import glob
import os
import re
from collections.abc import Iterator
from pathlib import Path

from partita_schema.yaml.overrides import path_of
from partita_schema.yaml.tree import Node

FILES = (
    "data.source",
    "data.source.path",
    "data.source.name",
    "data.mix.*.source",
    "data.mix.*.source.path",
    "data.mix.*.source.name",
    "data.validation",
    "data.validation.path",
    "data.validation.name",
    "data.test",
    "data.test.path",
    "data.test.name",
    "prompt.retrieval.dataset",
    "simulation.tasks.source",
    "simulation.self_training.tasks.source",
    "simulation.agents.*.file",
    "simulation.agents.others.*.file",
)
"""Keys with a file or glob, or the name of a dataset. `*` is any key or index."""

FOLDERS = (
    "base_model",
    "adapter.pretrained_adapter_weights",
    "generation.reward",
    "simulation.checker.model",
    "simulation.agents.*.run",
    "simulation.agents.*.base_model",
    "simulation.agents.others.*.run",
    "simulation.agents.others.*.base_model",
)
"""Keys with a folder, or the name of a model."""

EXTENSION = re.compile(r"\.([A-Za-z]{2,7}|bz2)$")


def rewrite_relative_paths(root: Node, *, folder: Path) -> None:
    """Rewrite the paths of values that come from files outside of `folder`, in place.

    A name that can be that of a dataset or model on the Hub is a path if it exists. URLs, absolute paths and paths from
    the home directory stay as they are.
    """
    for pattern in (*FILES, *FOLDERS):
        for node in (*matching(root, pattern.split(".")), *values_of_sweep(root, pattern.split("."))):
            rewrite(node, folder=folder, is_file=pattern in FILES)


def values_of_sweep(root: Node, parts: list[str]) -> Iterator[Node]:
    """Yield what the section `sweep` writes at a key: values of a parameter, or parts of them.

    Args:
        root: The tree.
        parts: The pattern of the key.
    """
    parameters = root.find(("sweep", "parameters"))
    for key, parameter in parameters.children() if parameters is not None else ():
        above = [str(part) for part in path_of(str(key))]
        if len(above) > len(parts) or any(one not in ("*", two) for one, two in zip(parts, above, strict=False)):
            continue
        choice = parameter.find(("choice",)) or parameter
        if isinstance(choice.value, list):
            for _, value in choice.children():
                yield from matching(value, parts[len(above) :])


def matching(node: Node, parts: list[str]) -> Iterator[Node]:
    if not parts:
        yield node
        return
    for key, child in node.children():
        if parts[0] in ("*", key):
            yield from matching(child, parts[1:])


def rewrite(node: Node, *, folder: Path, is_file: bool) -> None:
    position = node.position
    if not isinstance(node.value, str) or position is None or position.file is None or position.line is None:
        return
    origin, main = os.path.realpath(Path(position.file).parent), os.path.realpath(folder)
    if origin != main and is_relative_path(node.value, folder=Path(origin), is_file=is_file):
        node.value = os.path.relpath(Path(origin) / node.value, main)


def is_relative_path(text: str, *, folder: Path, is_file: bool) -> bool:
    """Return whether a text is a relative path, and not the name of a dataset or model."""
    if not text or "://" in text or "\0" in text or Path(text).is_absolute() or text.startswith("~"):
        return False
    if Path(text).parts[:1] in ((), ("..",)) or text.startswith("./"):
        return True
    if is_file and (EXTENSION.search(text) or glob.has_magic(text)):
        return True
    try:
        return (folder / text).exists()
    except OSError:  # a name that is too long
        return False
