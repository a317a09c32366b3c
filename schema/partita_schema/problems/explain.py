"""Mapping of pydantic's errors to keys of the file, with the expected shape.

pydantic reports an error for each arm of a union, and errors for a list as well as for its items. Here each mistake in
the file is reported once.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from partita_schema.base import ConfigModel
from partita_schema.common.text import nearest
from partita_schema.compat.aliases import ELSEWHERE_TYPES, FOREIGN_TYPES, NOT_YET_TYPES
from partita_schema.config import Config
from partita_schema.errors import MAX_SHOWN
from partita_schema.problems.unknown_key import unknown_key
from partita_schema.problems.wrong_value import short, wrong_value
from partita_schema.schema_tree import Choice, Items, Named, OneOf, Section, Shape, Tagged, keys_of, listed, words
from partita_schema.yaml.tree import Node, Path, dotted


@dataclass(frozen=True)
class LocatedProblem:
    """One mistake in the file."""

    path: Path
    kind: Literal["unknown", "missing", "type", "value", "rule"]
    message: str
    meant: str | None = None
    """The key or type that was most likely meant."""


@dataclass(frozen=True)
class Target:
    """The location in the file that a pydantic error refers to."""

    path: Path
    shape: Shape | None
    """Expected shape, or None for an unknown key."""
    optional: bool = False
    can_be_off: bool = False
    """Whether null differs from leaving the key out."""
    model: type[ConfigModel] = Config
    """The section of the last key."""
    siblings: Tagged | None = None
    """The union that this section belongs to."""


def mistakes_of(errors: Iterable[Mapping[str, Any]], root: Node) -> list[LocatedProblem]:
    """Return at most one mistake per path, in pydantic's order, without those that only follow from others."""
    aimed = [(error, target_of(tuple(error["loc"]), root)) for error in errors]
    advised = first_unknown((target for _, target in aimed if target is not None), root)
    mistakes: dict[Path, LocatedProblem] = {}
    for error, target in aimed:
        if target is None or target.path in mistakes:
            continue
        if target.shape is None and target.path not in advised:
            mistakes[target.path] = LocatedProblem(target.path, "unknown", "unknown key; remove it")
            continue
        mistake = mistake_of(error, target, root)
        if mistake is not None:
            mistakes.setdefault(mistake.path, mistake)
    consequences = Consequences(mistakes.values())
    return [mistake for mistake in mistakes.values() if not consequences.hold(mistake)]


def first_unknown(targets: Iterable[Target], root: Node) -> set[Path]:
    """Return the first unknown keys in file order, as many as an error shows, because advice for each takes
    milliseconds."""
    nodes = {target.path: root.find(target.path) for target in targets if target.shape is None}

    def in_file_order(path: Path) -> tuple[int, int]:
        node = nodes[path]
        position = node.key_position if node is not None else None
        return (position.line or 0, position.column or 0) if position is not None else (0, 0)

    return set(sorted(nodes, key=in_file_order)[:MAX_SHOWN])


class Consequences:
    """Detects mistakes that only follow from others: a missing key that is misspelled, a list with a wrong item."""

    def __init__(self, mistakes: Iterable[LocatedProblem]) -> None:
        self._meant: set[Path] = set()
        """Keys that unknown keys most likely meant."""
        self._inside: set[Path] = set()
        """Paths of everything that contains a mistake."""
        for mistake in mistakes:
            if mistake.kind == "unknown" and mistake.meant is not None:
                self._meant.add((*mistake.path[:-1], mistake.meant))
            self._inside.update(mistake.path[:depth] for depth in range(len(mistake.path)))

    def hold(self, mistake: LocatedProblem) -> bool:
        if mistake.kind == "missing":
            return mistake.path in self._meant
        return mistake.kind == "value" and mistake.path in self._inside


def target_of(location: tuple[str | int, ...], root: Node) -> Target | None:
    """Follow pydantic's location through the schema. Return None if it refers to a union arm of another shape than the
    value."""
    here = Target((), Section(Config))
    arm_of: Tagged | None = None
    for part in location:
        match here.shape:
            case Section(model):
                key = keys_of(model).get(str(part))
                path = (*here.path, part)
                if key is None:
                    return Target(path, None, model=model, siblings=arm_of)
                here, arm_of = Target(path, key.shape, key.optional, key.can_be_off, model, arm_of), None
            case Tagged() as union:
                model_of_tag = union.arm(part)
                if model_of_tag is None:
                    return here
                here, arm_of = replace(here, shape=Section(model_of_tag)), union
            case OneOf(arms):
                arm = fitting_arm(arms, root.find(here.path))
                if arm is None:
                    return here
                if not label_of(arm, str(part)):
                    return None
                here = replace(here, shape=arm)
            case Items(item, fixed) if isinstance(part, int):
                if fixed and (part >= len(fixed) or root.find((*here.path, part)) is None):
                    return here
                here = Target((*here.path, part), fixed[part] if fixed else item)
            case Named(value):
                here = Target((*here.path, part), value)
            case _:
                return here
    return here


def fitting_arm(arms: tuple[Shape, ...], node: Node | None) -> Shape | None:
    """Return the arm for a mapping or list, or None for scalars, whose arms share one message."""
    value = node.value if node else None
    if isinstance(value, dict):
        return next((arm for arm in arms if isinstance(arm, Section | Tagged | Named)), None)
    if isinstance(value, list):
        return next((arm for arm in arms if isinstance(arm, Items)), None)
    return None


def label_of(arm: Shape, label: str) -> bool:
    """Return whether `label` is pydantic's name of the union arm `arm`."""
    match arm:
        case Section(model):
            return model.__name__ in label
        case Tagged():
            return label.startswith("tagged-union[")
        case Items():
            return label.startswith("tuple[")
        case _:
            return label.startswith("dict[")


def mistake_of(error: Mapping[str, Any], target: Target, root: Node) -> LocatedProblem | None:
    kind, node = error["type"], root.find(target.path)
    if target.shape is None:
        section = root.find(target.path[:-1])
        advice = unknown_key(
            target.path, model=target.model, siblings=target.siblings, section=section.mapping() if section else {}
        )
        return LocatedProblem(target.path, "unknown", advice.message, advice.meant)
    if kind == "rule":
        return rule_mistake(error["ctx"], target.path)
    if isinstance(target.shape, Tagged) and kind in ("union_tag_not_found", "union_tag_invalid") and node:
        return type_mistake(target, node)
    if node is None or (kind == "missing" and not isinstance(target.shape, Items)):
        return LocatedProblem(target.path, "missing", missing_words(target))
    later = later_type(target.path, node)
    if later is not None:
        return LocatedProblem(target.path, "value", later)
    key = str(target.path[-1]) if target.path else ""
    message = wrong_value(key, target.shape, node, optional=target.optional, can_be_off=target.can_be_off)
    if node.reference is not None:
        message += f"; it is written as {short(node.reference)}"
    return LocatedProblem(target.path, "value", message)


def rule_mistake(context: Mapping[str, Any], path: Path) -> LocatedProblem:
    parts = str(context["at"]).split(".")
    at = tuple(int(part) if re.fullmatch(r"[0-9]{1,9}", part) else part for part in parts if part)
    return LocatedProblem((*path, *at), "rule", str(context["message"]))


def missing_words(target: Target) -> str:
    key = target.path[-1] if target.path else ""
    shape = target.shape
    assert shape is not None
    if key == "base_model":
        return "is missing; add base_model: with a Hub id, a folder, or {type: scratch}"
    if isinstance(shape, Choice) and len(shape.values) == 1:
        return f"is missing; add {key}: {shape.values[0]}"
    return f"is missing; add {key}: with {words(shape)}"


def type_mistake(target: Target, node: Node) -> LocatedProblem:
    """Return the mistake of a section whose key `type` is missing or unknown."""
    assert isinstance(target.shape, Tagged)
    tags = tuple(tag for tag, _ in target.shape.arms)
    written = node.mapping().get("type")
    if written is not None:
        return wrong_type((*target.path, "type"), tags, written)
    typed = next((key for key in node.mapping() if nearest(key, ["type"])), None)
    if typed is not None:
        return LocatedProblem((*target.path, typed), "unknown", "unknown key; did you mean type?", "type")
    keys = set(node.mapping())
    fitting = [tag for tag, model in target.shape.arms if keys <= set(keys_of(model))]
    guess = fitting[0] if fitting and len(fitting) < len(tags) else None
    message = f"is missing; add type: {guess}" if guess else f"is missing; add type: with one of {listed(tags)}"
    return LocatedProblem((*target.path, "type"), "missing", message)


def wrong_type(path: Path, tags: tuple[str, ...], written: Node) -> LocatedProblem:
    later = later_type(path, written)
    if later is not None:
        return LocatedProblem(path, "type", later)
    section = section_of(path)
    if isinstance(written.value, str):
        ours = FOREIGN_TYPES.get(section, {}).get(written.value.lower())
        if ours is not None:
            return LocatedProblem(path, "type", f"got {written.value}; write type: {ours}", ours.partition(",")[0])
        near = nearest(written.value, tags)
        if near:
            message = f"got {short(written.value)}; did you mean {' or '.join(near)}?"
            return LocatedProblem(path, "type", message, near[0] if len(near) == 1 else None)
    return LocatedProblem(path, "type", wrong_value("type", Choice(tags), written, optional=False))


def section_of(path: Path) -> str:
    """Return the section of a key, without list indices; data.validation counts as data.source."""
    section = dotted(tuple(part for part in path[:-1] if isinstance(part, str)))
    return "data.source" if section in ("data.validation", "data.test") else section


def later_type(path: Path, node: Node) -> str | None:
    """Return the message for a type planned for a later version or provided by another program, or None."""
    section = section_of(path)
    if path[-1:] != ("type",) or not isinstance(node.value, str):
        return None
    elsewhere = ELSEWHERE_TYPES.get(section, {}).get(node.value)
    if elsewhere is not None:
        return elsewhere
    if node.value not in NOT_YET_TYPES.get(section, ()):
        return None
    shape = type_shape(section)
    return f"{node.value} is not available yet; write {words(shape)}" if shape else f"{node.value} is not available yet"


def type_shape(section: str) -> Shape | None:
    """Return the choice of types of a section."""
    shape: Shape = Section(Config)
    for part in section.split("."):
        if not isinstance(shape, Section):
            return None
        shape = keys_of(shape.model)[part].shape
        if isinstance(shape, OneOf):
            shape = next((arm for arm in shape.arms if isinstance(arm, Tagged)), shape)
    if isinstance(shape, Tagged):
        return Choice(tuple(tag for tag, _ in shape.arms))
    return keys_of(shape.model)["type"].shape if isinstance(shape, Section) else None
