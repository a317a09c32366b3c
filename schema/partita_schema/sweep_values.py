"""The values of a sweep, written into the file of which they are values.

Every value, and both limits of every range, is checked by the schema before a trial starts. Errors have the line of the
value in the section `sweep`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

from partita_schema.checked import Checked, check_tree
from partita_schema.config import Config
from partita_schema.errors import ConfigError, Problem
from partita_schema.sections.sweep import DISTRIBUTIONS
from partita_schema.yaml.overrides import path_of, step
from partita_schema.yaml.tree import Node, SourcePosition, dotted, tree_of

NOWHERE = SourcePosition(None, None, None)
Candidates: TypeAlias = Mapping[str, list[tuple[str, Node]]]
"""Values to check by parameter, each with its place under the parameter."""


def trial_config(config: Config, values: Mapping[str, Any]) -> Config:
    """Return the configuration of a trial: a local run without the sweep, with the values of its parameters.

    Args:
        config: The configuration of the sweep.
        values: Values by dotted key.

    Raises:
        ConfigError: The values do not fit together.
    """
    root = tree_of(config.model_dump(mode="json", exclude_unset=True))
    remove_sweep(root)
    for key, value in values.items():
        problem = write_value(root, key, tree_of(value))
        if problem is not None:
            raise ConfigError([Problem(key, problem)])
    checked = check_tree(root)
    if checked.config is None:
        raise ConfigError(checked.problems)
    return checked.config


def remove_sweep(root: Node) -> None:
    """Remove the sweep from a tree, with the backend if it is Ray, which places trials and does not run them."""
    root.mapping().pop("sweep", None)
    backend = root.find(("backend", "type"))
    if backend is not None and backend.value == "ray":
        root.mapping().pop("backend")


def write_value(root: Node, key: str, value: Node) -> str | None:
    """Write a value into the tree at a dotted key, creating missing sections. Return why that is impossible, or None.

    Args:
        root: The tree.
        key: The key, such as `adapter.r` or `output_features.0.decoder.labels`.
        value: The value; its position is that of error messages.
    """
    path = path_of(key)
    node = root
    for part in path[:-1]:
        child = step(node, part, value.position or NOWHERE)
        if isinstance(child, str):
            return child
        node = child
    last = path[-1] if path else key
    if isinstance(last, int):
        item = step(node, last, value.position or NOWHERE)
        if isinstance(item, str):
            return item
        assert isinstance(node.value, list)
        node.value[last] = value
        return None
    if node.value is None:
        node.value = {}
    if not isinstance(node.value, dict):
        return f"{dotted(path[:-1])} has no keys to set"
    node.value[last] = value
    return None


def problems_of_sweep(root: Node) -> tuple[Problem, ...]:
    """Return the problems of all values of the sweep in a tree that is valid apart from them."""
    parameters = root.find(("sweep", "parameters"))
    if parameters is None:
        return ()
    base = root.copy()
    remove_sweep(base)
    candidates = {key: list(candidates_of(node)) for key, node in parameters.mapping().items()}
    problems: dict[tuple[str, str], Problem] = {}
    for key, items in candidates.items():
        place = parameters.mapping()[key].key_position
        if path_of(key)[:1] == ("defaults",) and base.find(path_of(key)) is not None:
            message = f"the inputs have the value of {key} in the file, not that of a trial; remove it there"
            problems[key, message] = at(place, f"sweep.parameters.{key}", message)
            continue
        for suffix, item in items:
            item.key_position = place
            for problem in problems_of_value(base, key, suffix, item, candidates):
                problems.setdefault((problem.path, problem.message), problem)
    return tuple(problems.values())


def read_values(root: Node) -> bool:
    """Replace each number of a list by the value that its key has with it, and return whether one has changed.

    PyYAML reads `1e-4` as a text, and 1 is not 1.0. The tree is valid, and so are all its values.
    """
    parameters = root.find(("sweep", "parameters"))
    if parameters is None:
        return False
    base = root.copy()
    remove_sweep(base)
    spaces = parameters.mapping()
    candidates = {key: list(candidates_of(node)) for key, node in spaces.items()}
    changed = False
    for key, node in spaces.items():
        listed = node if isinstance(node.value, list) else node.find(("choice",))
        for _, item in listed.children() if listed is not None else ():
            read = value_with(base, key, item, candidates)
            if is_number(read) and (type(read), read) != (type(item.value), item.value):
                item.value, changed = read, True
    return changed


def is_number(value: object) -> bool:
    """Return whether a value is a number, and not a boolean."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def value_with(base: Node, key: str, value: Node, candidates: Candidates) -> object:
    """Return the value that a key has in a valid configuration with a value of the sweep; None if it is not there.

    Args:
        base: The tree without the sweep.
        key: The parameter.
        value: The value.
        candidates: Values to check of all parameters.
    """
    settings = [{key: value}, *({other: item, key: value} for other, item in others_of(key, candidates))]
    configs = (checked_with(base, one).config for one in settings)
    config = next((one for one in configs if one is not None), None)
    part: Any = None if config is None else config.model_dump(mode="json")
    for name in path_of(key):
        is_there = name in part if isinstance(part, dict) else isinstance(part, list) and isinstance(name, int)
        part = part[name] if is_there else None
    return part


def others_of(key: str, candidates: Candidates) -> Iterator[tuple[str, Node]]:
    """Yield the values to check of all other parameters."""
    yield from ((other, item) for other, items in candidates.items() if other != key for _, item in items)


def candidates_of(node: Node) -> Iterator[tuple[str, Node]]:
    """Yield the values of a parameter to check, each with its place under the parameter: all choices, and limits."""
    if isinstance(node.value, list):
        yield from ((f"[{index}]", item.copy()) for index, item in node.children())
    for name in DISTRIBUTIONS:
        listed = node.find((name,))
        if listed is not None:
            yield from ((f".{name}[{index}]", numeric(item.copy(), name)) for index, item in listed.children())


def numeric(node: Node, distribution: str) -> Node:
    """Return a limit of a range as a number; PyYAML reads `1e-4` as a text."""
    if distribution in ("uniform", "log_uniform"):
        node.value = float(str(node.value))
    return node


def problems_of_value(base: Node, key: str, suffix: str, value: Node, candidates: Candidates) -> Iterator[Problem]:
    """Yield what is wrong with a value of a parameter.

    A value is right if another parameter has a value with which it is valid.

    Args:
        base: The tree without the sweep.
        key: The parameter.
        suffix: The place of the value under the parameter.
        value: The value.
        candidates: Values to check of all parameters.
    """
    problems = checked_with(base, {key: value}).problems
    others = others_of(key, candidates)
    if not problems or any(not checked_with(base, {other: item, key: value}).problems for other, item in others):
        return
    own = [problem for problem in problems if (problem.path + ".").startswith((f"{key}.", f"{key}["))]
    if own:
        yield from (own_problem(problem, key, suffix, value) for problem in own)
        return
    for problem in problems:
        yield at(value.position, f"sweep.parameters.{key}{suffix}", f"{problem.path}: {problem.message}")


def own_problem(problem: Problem, key: str, suffix: str, value: Node) -> Problem:
    """Return a problem of a value with its place in the section `sweep`.

    Args:
        problem: The problem, at the key or inside it.
        key: The parameter.
        suffix: The place of the value under the parameter.
        value: The value.
    """
    path, inner = f"sweep.parameters.{key}", problem.path.removeprefix(key)
    if inner:
        return replace(problem, path=f"{path}{suffix}{inner}")
    if problem.message.startswith("unknown key"):
        return at(value.key_position, path, problem.message)
    if suffix.startswith((".uniform", ".log_uniform")) and problem.message.startswith("write an integer"):
        return at(value.key_position, path, "the key takes integers; write int or log_int")
    return at(value.position, f"{path}{suffix}", problem.message)


def at(position: SourcePosition | None, path: str, message: str) -> Problem:
    """Return a problem at a position."""
    if position is None:
        return Problem(path, message)
    return Problem(path, message, position.file, position.line, position.column)


def checked_with(base: Node, values: Mapping[str, Node]) -> Checked:
    """Return the configuration of a tree with some values, or its problems."""
    root = base.copy()
    for key, value in values.items():
        problem = write_value(root, key, value.copy())
        if problem is not None:
            return Checked(None, (Problem(key, problem),))
    return check_tree(root)
