"""What pydantic found, placed in the tree: which key of the file an error is about, and what should stand there.

pydantic reports one error for each arm of a union, and an error for a list beside the one for its item. Here one
mistake of the file is one mistake.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from partita_schema.base import Base
from partita_schema.config import Config
from partita_schema.errors import MAX_SHOWN
from partita_schema.foreign import ELSEWHERE_TYPES, FOREIGN_TYPES, NOT_YET_TYPES
from partita_schema.nearest import nearest
from partita_schema.shapes import Choice, Items, Named, OneOf, Section, Shape, Tagged, keys_of, listed, words
from partita_schema.tree import Node, Path, dotted
from partita_schema.unknown_key import unknown_key
from partita_schema.wrong_value import short, wrong_value


@dataclass(frozen=True)
class Mistake:
    """One mistake of the file."""

    path: Path
    kind: Literal["unknown", "missing", "type", "value", "rule"]
    message: str
    meant: str | None = None
    """The key, or the type, that is surely meant."""


@dataclass(frozen=True)
class Target:
    """What an error of pydantic's is about."""

    path: Path
    shape: Shape | None
    """What should stand there; None for an unknown key."""
    optional: bool = False
    model: type[Base] = Config
    """The section that the last key stands in."""
    siblings: Tagged | None = None
    """The union that this section is an arm of."""


def mistakes_of(errors: Iterable[Mapping[str, Any]], root: Node) -> list[Mistake]:
    """Mistakes in the order found, one for each path, without those that follow from others."""
    aimed = [(error, target_of(tuple(error["loc"]), root)) for error in errors]
    advised = first_unknown((target for _, target in aimed if target is not None), root)
    found: dict[Path, Mistake] = {}
    for error, target in aimed:
        if target is None or target.path in found:
            continue
        if target.shape is None and target.path not in advised:
            found[target.path] = Mistake(target.path, "unknown", "unknown key; remove it")
            continue
        mistake = mistake_of(error, target, root)
        if mistake is not None:
            found.setdefault(mistake.path, mistake)
    consequences = Consequences(found.values())
    return [mistake for mistake in found.values() if not consequences.hold(mistake)]


def first_unknown(targets: Iterable[Target], root: Node) -> set[Path]:
    """The unknown keys that come first in the file, as many as an error shows: advice takes milliseconds for each."""
    places = {target.path: root.find(target.path) for target in targets if target.shape is None}

    def in_file_order(path: Path) -> tuple[int, int]:
        node = places[path]
        place = node.key_place if node is not None else None
        return (place.line or 0, place.column or 0) if place is not None else (0, 0)

    return set(sorted(places, key=in_file_order)[:MAX_SHOWN])


class Consequences:
    """Tells mistakes that only follow from others: a missing key that is mistyped, a list with a wrong item."""

    def __init__(self, mistakes: Iterable[Mistake]) -> None:
        self._meant: set[Path] = set()
        """Keys that were surely meant by unknown ones."""
        self._inside: set[Path] = set()
        """Everything that holds a mistake."""
        for mistake in mistakes:
            if mistake.kind == "unknown" and mistake.meant is not None:
                self._meant.add((*mistake.path[:-1], mistake.meant))
            self._inside.update(mistake.path[:depth] for depth in range(len(mistake.path)))

    def hold(self, mistake: Mistake) -> bool:
        if mistake.kind == "missing":
            return mistake.path in self._meant
        return mistake.kind == "value" and mistake.path in self._inside


def target_of(location: tuple[str | int, ...], root: Node) -> Target | None:
    """Follow pydantic's location through the schema; None where it is about an arm that the value is not of."""
    here = Target((), Section(Config))
    arm_of: Tagged | None = None
    for part in location:
        match here.shape:
            case Section(model):
                key = keys_of(model).get(str(part))
                path = (*here.path, part)
                if key is None:
                    return Target(path, None, model=model, siblings=arm_of)
                here, arm_of = Target(path, key.shape, key.optional, model, arm_of), None
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
    """The arm for a mapping or a list; None for scalars, whose arms are told in one message."""
    value = node.value if node else None
    if isinstance(value, dict):
        return next((arm for arm in arms if isinstance(arm, Section | Tagged | Named)), None)
    if isinstance(value, list):
        return next((arm for arm in arms if isinstance(arm, Items)), None)
    return None


def label_of(arm: Shape, label: str) -> bool:
    """Whether pydantic's name of a union arm is that of `arm`."""
    match arm:
        case Section(model):
            return model.__name__ in label
        case Tagged():
            return label.startswith("tagged-union[")
        case Items():
            return label.startswith("tuple[")
        case _:
            return label.startswith("dict[")


def mistake_of(error: Mapping[str, Any], target: Target, root: Node) -> Mistake | None:
    kind, node = error["type"], root.find(target.path)
    if target.shape is None:
        section = root.find(target.path[:-1])
        advice = unknown_key(
            target.path, model=target.model, siblings=target.siblings, section=section.mapping() if section else {}
        )
        return Mistake(target.path, "unknown", advice.message, advice.meant)
    if kind == "rule":
        return rule_mistake(error["ctx"], target.path)
    if isinstance(target.shape, Tagged) and kind in ("union_tag_not_found", "union_tag_invalid") and node:
        return type_mistake(target, node)
    if node is None or (kind == "missing" and not isinstance(target.shape, Items)):
        return Mistake(target.path, "missing", missing_words(target))
    later = later_type(target.path, node)
    if later is not None:
        return Mistake(target.path, "value", later)
    key = str(target.path[-1]) if target.path else ""
    return Mistake(target.path, "value", wrong_value(key, target.shape, node, optional=target.optional))


def rule_mistake(context: Mapping[str, Any], path: Path) -> Mistake:
    parts = str(context["at"]).split(".")
    at = tuple(int(part) if re.fullmatch(r"[0-9]{1,9}", part) else part for part in parts if part)
    return Mistake((*path, *at), "rule", str(context["message"]))


def missing_words(target: Target) -> str:
    key = target.path[-1] if target.path else ""
    shape = target.shape
    assert shape is not None
    if key == "base_model":
        return "is missing; add base_model: with a Hub id, a folder, or {type: scratch}"
    if isinstance(shape, Choice) and len(shape.values) == 1:
        return f"is missing; add {key}: {shape.values[0]}"
    return f"is missing; add {key}: with {words(shape)}"


def type_mistake(target: Target, node: Node) -> Mistake:
    """The key `type` of a section is missing or unknown."""
    assert isinstance(target.shape, Tagged)
    tags = tuple(tag for tag, _ in target.shape.arms)
    written = node.mapping().get("type")
    if written is not None:
        return wrong_type((*target.path, "type"), tags, written)
    typed = next((key for key in node.mapping() if nearest(key, ["type"])), None)
    if typed is not None:
        return Mistake((*target.path, typed), "unknown", "unknown key; did you mean type?", "type")
    keys = set(node.mapping())
    fitting = [tag for tag, model in target.shape.arms if keys <= set(keys_of(model))]
    guess = fitting[0] if fitting and len(fitting) < len(tags) else None
    message = f"is missing; add type: {guess}" if guess else f"is missing; add type: with one of {listed(tags)}"
    return Mistake((*target.path, "type"), "missing", message)


def wrong_type(path: Path, tags: tuple[str, ...], written: Node) -> Mistake:
    later = later_type(path, written)
    if later is not None:
        return Mistake(path, "type", later)
    section = section_of(path)
    if isinstance(written.value, str):
        ours = FOREIGN_TYPES.get(section, {}).get(written.value.lower())
        if ours is not None:
            return Mistake(path, "type", f"got {written.value}; write type: {ours}", ours.partition(",")[0])
        near = nearest(written.value, tags)
        if near:
            message = f"got {short(written.value)}; did you mean {' or '.join(near)}?"
            return Mistake(path, "type", message, near[0] if len(near) == 1 else None)
    return Mistake(path, "type", wrong_value("type", Choice(tags), written, optional=False))


def section_of(path: Path) -> str:
    """The section that a key stands in, without places of lists: data.validation is as data.source."""
    section = dotted(tuple(part for part in path[:-1] if isinstance(part, str)))
    return "data.source" if section in ("data.validation", "data.test") else section


def later_type(path: Path, node: Node) -> str | None:
    """The words for a type that a later version will have, or that is another program."""
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
    """The choice of types of a section, by its place."""
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
