"""The files of a configuration, merged into one tree: those that it extends, and several that are given together.

A file that `extends` others is merged over them in their order. Each value keeps its file and line.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from partita_schema.config import Config
from partita_schema.errors import ConfigError, Problem, shortened
from partita_schema.yaml.files import about_folder, near_files, read_text, sound_text
from partita_schema.yaml.parse import read_yaml
from partita_schema.yaml.tree import Node, tree_of
from partita_schema.yaml.variables import expand_variables

EXTENDS = "extends"
EXTENDS_DOC = (
    "Another configuration file, or a list of them, that this file is merged over. Mappings are merged key by key; "
    "lists and single values replace those of the other file, and so does a section with another `type`. The path is "
    "relative to the folder of this file."
)
"""Documentation of the key. It is not a field of `Config`, because merging removes it."""
MAX_FILES = 100
"""Maximum number of files of one configuration, with repetitions."""

OneSource = str | Path | Mapping[str, object] | Config
"""A path, YAML text, a dictionary or a Config."""
ConfigSource = OneSource | Sequence[OneSource]
"""One source, or several of which each is merged over those before it."""


@dataclass
class Layers:
    """The merged tree of a configuration and what it was read from."""

    root: Node
    """The tree, with variables not yet expanded."""
    file: str | None
    """The last file that was given, or None. Its folder is the base of relative paths."""
    files: tuple[str, ...]
    """All files, each after those that it extends."""
    text: str | None
    """The YAML text: as written, or merged from several sources. None for a dictionary or Config."""
    problems: tuple[Problem, ...]
    """Problems that did not stop parsing."""


@dataclass
class LayerReader:
    """Reads files and those that they extend."""

    problems: list[Problem] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    """Names of all files, each after those that it extends."""
    count: int = 0

    def file(self, path: Path, *, chain: tuple[str, ...] = ()) -> tuple[Node, str]:
        """Return the merged tree of a file, and its text.

        Args:
            path: The file.
            chain: The files that lead to this one by `extends`.
        """
        self.count += 1
        if self.count > MAX_FILES:
            message = f"more than {MAX_FILES} files are extended, repetitions counted; extend fewer"
            raise ConfigError([Problem(EXTENDS, message, chain[-1] if chain else str(path))])
        text = read_text(path)
        root = self.extended(self.parsed(text, str(path)), folder=path.parent, chain=(*chain, str(path)))
        if str(path) not in self.files:
            self.files.append(str(path))
        return root, text

    def parsed(self, text: str, file: str | None) -> Node:
        root, problems = read_yaml(sound_text(text, file), file=file)
        self.problems.extend(problems)
        return root

    def extended(self, root: Node, *, folder: Path, chain: tuple[str, ...] = ()) -> Node:
        """Return a tree merged over the files that it extends, without the key.

        Args:
            root: The tree; its key `extends` is removed.
            folder: Base folder of the names in `extends`.
            chain: The file of the tree, and those that lead to it.
        """
        node = root.mapping().pop(EXTENDS, None)
        if node is None:
            return root
        base: Node | None = None
        for name in self.names(node):
            tree = self.base(name, folder=folder, chain=chain)
            base = tree if base is None else merged(base, tree)
        return root if base is None else merged(base, root)

    def names(self, node: Node) -> list[Node]:
        """Return the items of `extends` with their variables expanded. Raise ConfigError for a wrong value."""
        problems = [*expand_variables(node, at=(EXTENDS,))]
        items = node.value if isinstance(node.value, list) else [node]
        problems += [
            problem_at(item, f"write the path of a YAML file, or a list of paths; got {kind_of(item)}")
            for item in items
            if not isinstance(item.value, str) or not item.value.strip() or "\n" in item.value
        ]
        if not items:
            problems.append(problem_at(node, "the list is empty; write the path of a YAML file, or remove the key"))
        if problems:
            raise ConfigError(problems)
        return items

    def base(self, name: Node, *, folder: Path, chain: tuple[str, ...]) -> Node:
        """Return the tree of a file that is extended. Errors about the file itself have the position of its name."""
        path = plain_path(folder / Path(str(name.value)).expanduser())
        same = [number for number, file in enumerate(chain) if same_file(Path(file), path)]
        if same:
            links = " extends ".join([*chain[same[0] :], str(path)])
            raise ConfigError([problem_at(name, f"a file cannot extend itself: {links}; remove one of them")])
        if "://" in str(name.value):
            raise ConfigError([problem_at(name, "is an address; download the file and write its path")])
        if path.is_dir():
            raise ConfigError([problem_at(name, f"{path} {about_folder(path)}")])
        if not path.exists():
            raise ConfigError([problem_at(name, f"there is no file {path}{near_files(path)}")])
        return self.file(path, chain=chain)[0]


def read_layers(source: ConfigSource) -> Layers:
    """Read a configuration and everything that it extends, and merge it.

    Raises:
        ConfigError: A file cannot be read, or extends itself.
    """
    sources = [source] if isinstance(source, str | Path | Mapping | Config) else several(source)
    reader, trees, text, main = LayerReader(), list[Node](), None, None
    for one in sources:
        if isinstance(one, Config):
            trees.append(tree_of(one.model_dump(mode="json", exclude_unset=True)))
        elif isinstance(one, Mapping):
            trees.append(reader.extended(tree_of(one), folder=Path()))
        elif isinstance(one, Path) or not is_text(one):
            main = str(one)
            tree, text = reader.file(Path(one))
            trees.append(tree)
        else:
            text = one
            trees.append(reader.extended(reader.parsed(one, None), folder=Path()))
    root = trees[0]
    for tree in trees[1:]:
        root = merged(root, tree)
    parts = [*reader.files, *("YAML text" for one in sources if isinstance(one, str) and is_text(one))]
    parts += ["a dictionary" for one in sources if isinstance(one, Mapping | Config)]
    if len(parts) > 1:
        from partita_schema.yaml.merge import merged_text

        text = merged_text(root, parts)
    return Layers(root, main, tuple(reader.files), text, tuple(reader.problems))


def several(source: object) -> list[OneSource]:
    """Return the items of a list of sources. Raise ConfigError if it is something else."""
    items: list[OneSource] = list(source) if isinstance(source, list | tuple) else []
    wrong = [item for item in items if not isinstance(item, str | Path | Mapping | Config)]
    if wrong or not items:
        message = f"the configuration is {shortened(repr(wrong[0] if wrong else source))}"
        wanted = "write a path, YAML text, a dictionary, a Config, or a list of them"
        raise ConfigError([Problem("", f"{message}; {wanted}")])
    return items


def is_text(source: str) -> bool:
    """Return whether a string is YAML text, which may be empty; otherwise it is a path."""
    return "\n" in source or ": " in source or not source.strip()


def is_ludwig(root: Node) -> bool:
    """Return whether a tree is a Ludwig file for language models."""
    kind = root.find(("model_type",))
    return kind is not None and kind.value == "llm" and root.find(("version",)) is None


def merged(base: Node, over: Node) -> Node:
    """Return `over` merged over `base`; either may be a Ludwig file."""
    from partita_schema.yaml.merge import merge

    if is_ludwig(base) or is_ludwig(over):
        from partita_schema.compat.ludwig_layers import align

        align(base, over)
    return merge(base, over)


def in_file_order(problems: Iterable[Problem], files: Sequence[str]) -> list[Problem]:
    """Return problems sorted by file, the main file first, and by position."""
    rank = {file: number for number, file in enumerate(reversed(files))}
    return sorted(
        problems, key=lambda one: (one.line is None, rank.get(one.file or "", 0), one.line or 0, one.column or 0)
    )


def problem_at(node: Node, message: str) -> Problem:
    position = node.position
    if position is None:
        return Problem(EXTENDS, message)
    return Problem(EXTENDS, message, position.file, position.line, position.column)


def kind_of(node: Node) -> str:
    if node.value is None or node.value == "":
        return "nothing"
    if isinstance(node.value, dict | list):
        return "a mapping" if isinstance(node.value, dict) else "a list"
    return shortened(node.text or repr(node.value))


def plain_path(path: Path) -> Path:
    """Return a path without `..`, unless a symbolic link makes that another file."""
    plain = Path(os.path.normpath(path))
    return plain if not path.exists() or same_file(plain, path) else path


def same_file(first: Path, second: Path) -> bool:
    try:
        return first.samefile(second)
    except (OSError, ValueError):
        return False
