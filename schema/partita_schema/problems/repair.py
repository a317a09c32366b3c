"""All problems of an invalid configuration.

pydantic skips cross-field rules in a section with an invalid key. To report everything at once, each mistake is
repaired in a copy of the tree (a misspelled key is renamed, a wrong value is removed), and the copy is checked again
until no new mistake appears. A rule between sections on a required key cannot be repaired; the rules after it are then
checked one by one. Mistakes that may only follow from a repair are not reported.
"""

import re

from pydantic import ValidationError

from partita_schema.config import FINISHED, Config, refusals
from partita_schema.errors import Problem
from partita_schema.problems.explain import LocatedProblem, mistakes_of, rule_mistake
from partita_schema.schema_tree import Items, OneOf, Section, Shape, Tagged, keys_of
from partita_schema.sections.config_sections import ConfigSections
from partita_schema.yaml.tree import Node, Path, SourcePosition, dotted

MAX_ROUNDS = 10
"""Maximum number of checks of the repaired tree."""


def problems_of(root: Node, error: ValidationError, *, finished: bool = False) -> tuple[Problem, ...]:
    """Return every problem in file order.

    Args:
        root: The tree.
        error: The ValidationError of the whole tree.
        finished: Whether it is the file of a finished run.
    """
    tree, problems, removed = root.copy(), dict[Path, Problem](), set[str]()
    current: ValidationError | None = error
    for _ in range(MAX_ROUNDS):
        if current is None:
            break
        errors = [dict(one) for one in current.errors(include_url=False, include_input=False)]
        fresh = [m for m in mistakes_of(errors, tree) if m.path not in problems and not speaks_of(m, removed)]
        # Look up the position first, because the repair may move or remove the key.
        problems |= {mistake.path: problem_of(mistake, tree) for mistake in fresh}
        repaired = [repair(tree, mistake, removed) for mistake in fresh]
        if not any(repaired):
            break
        current = error_of(tree, finished=finished)
    # A wrong name changes what the keys mean that name it.
    renamed = any(path[-1:] == ("name",) for path in problems)
    for mistake in [] if renamed else hidden_mistakes(tree, removed, finished=finished):
        if mistake.path not in problems and not speaks_of(mistake, removed):
            problems[mistake.path] = problem_of(mistake, tree)
    return tuple(sorted(problems.values(), key=in_file_order))


def error_of(tree: Node, *, finished: bool) -> ValidationError | None:
    try:
        Config.model_validate(tree.plain(), context=FINISHED if finished else None)
    except ValidationError as error:
        return error
    return None


def hidden_mistakes(tree: Node, removed: set[str], *, finished: bool) -> list[LocatedProblem]:
    """Return violated rules between sections that no repair reveals: those after a rule on a required key.

    Args:
        tree: The repaired tree. Mistakes in it that may follow from a repair are repaired too.
        removed: The keys that repairs have removed, to which this adds.
        finished: Whether it is the file of a finished run.
    """
    for _ in range(MAX_ROUNDS):
        try:
            sections = ConfigSections.model_validate(tree.plain())
        except ValidationError as error:
            errors = [dict(one) for one in error.errors(include_url=False, include_input=False)]
            repaired = [repair(tree, mistake, removed) for mistake in mistakes_of(errors, tree)]
            if not any(repaired):
                return []
        else:
            violated = refusals(sections, finished=finished)
            return [rule_mistake({"at": key, "message": message}, ()) for key, message in violated]
    return []


def speaks_of(mistake: LocatedProblem, removed: set[str]) -> bool:
    """Return whether a rule is about a removed key, or mentions one: only the removal may have violated it."""
    words = {*re.findall(r"\w+", mistake.message), *mistake.path[-1:]}
    return mistake.kind == "rule" and not removed.isdisjoint(words)


def repair(tree: Node, mistake: LocatedProblem, removed: set[str]) -> bool:
    """Repair a mistake in the tree. Return False if that is not possible."""
    if mistake.kind == "missing":
        return False
    parent = tree.find(mistake.path[:-1])
    if mistake.kind == "unknown" and parent is not None:
        node = parent.mapping().pop(str(mistake.path[-1]))
        if mistake.meant is not None:
            parent.mapping().setdefault(mistake.meant, node)
        return True
    node_at = tree.find(mistake.path)
    if mistake.kind == "type" and mistake.meant is not None and node_at is not None:
        node_at.value = mistake.meant
        return True
    return remove(tree, mistake.path, removed)


def remove(tree: Node, path: Path, removed: set[str]) -> bool:
    """Remove the innermost key of the path that is optional. Return whether there was one."""
    for length in range(len(path), 0, -1):
        parent, key = tree.find(path[: length - 1]), path[length - 1]
        if parent is None or not isinstance(key, str) or required(path[:length], tree):
            continue
        if parent.mapping().pop(key, None) is not None:
            removed.update(part for part in path[length - 1 :] if isinstance(part, str) and part != "type")
            return True
    return False


def required(path: Path, tree: Node) -> bool:
    """Return whether a key is required, or not a key of the schema."""
    shape: Shape = Section(Config)
    for depth, part in enumerate(path):
        shape = concrete(shape, tree.find(path[:depth]))
        if isinstance(shape, Items) and isinstance(part, int):
            shape = shape.item
        elif isinstance(shape, Section) and part in keys_of(shape.model):
            key = keys_of(shape.model)[str(part)]
            if depth == len(path) - 1:
                return key.required
            shape = key.shape
        else:
            return True
    return True


def concrete(shape: Shape, node: Node | None) -> Shape:
    """Return the union arm that the node matches."""
    if isinstance(shape, OneOf):
        fitting = [arm for arm in shape.arms if isinstance(arm, Section | Tagged | Items)]
        shape = fitting[0] if fitting else shape
    if isinstance(shape, Tagged) and node is not None:
        tag = node.find(("type",))
        model = shape.arm(tag.value) if tag else None
        return Section(model) if model else shape
    return shape


def problem_of(mistake: LocatedProblem, root: Node) -> Problem:
    position = position_of(mistake, root)
    node = root.find(mistake.path)
    written = f" (written as {node.written})" if node is not None and node.written else ""
    file, line, column = (position.file, position.line, position.column) if position else (None, None, None)
    return Problem(dotted(mistake.path), mistake.message + written, file, line, column)


def position_of(mistake: LocatedProblem, root: Node) -> SourcePosition | None:
    """Return where to report a mistake: at the key of an unknown or missing key or section, at the value of a wrong
    scalar."""
    for length in range(len(mistake.path), -1, -1):
        node = root.find(mistake.path[:length])
        if node is None:
            continue
        scalar = not isinstance(node.value, dict | list) and node.text != ""
        if length == len(mistake.path) and scalar and mistake.kind != "unknown":
            return node.position
        return node.key_position or node.position
    return None


def in_file_order(problem: Problem) -> tuple[bool, int, int]:
    return problem.line is None, problem.line or 0, problem.column or 0
