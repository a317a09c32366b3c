"""Advice about unknown keys: the key that was meant, or where it belongs."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from partita_schema.base import ConfigModel
from partita_schema.common.text import distance, folded, nearest
from partita_schema.compat.aliases import FOREIGN
from partita_schema.compat.ludwig_keys import IGNORED, RENAMED
from partita_schema.config import Config
from partita_schema.schema_tree import Items, Section, Shape, Tagged, keys_of, models_of
from partita_schema.sections.trainer import UNSUPPORTED_BY_HOGWILD, HogwildTrainer, NoTrainer
from partita_schema.yaml.overrides import ORIGIN
from partita_schema.yaml.tree import Node, Path, dotted

EXTENDS_IN_A_SECTION = "write extends at the top of the file"
EXTENDS_BY_SET = "files are merged before values are set; name both files instead: base.yaml run.yaml"
"""Advice about `extends`; merging removes it from the top of a file, so there it comes from `--set`."""


NO_BREAK_SPACE = "\u00a0"
"""A space that YAML reads as a part of a key, as copied from a page."""


@dataclass(frozen=True)
class Advice:
    """A message about a key, and the key of the same section that was most likely meant."""

    message: str
    meant: str | None = None


def unknown_key(
    path: Path, *, model: type[ConfigModel], siblings: Tagged | None, section: Mapping[str, Node]
) -> Advice:
    """Return advice about the last key of `path`, which `model` does not have.

    Args:
        path: Path of the unknown key.
        model: The section that the key is in.
        siblings: The union that `model` belongs to, or None.
        section: All keys of the section in the file.
    """
    key, own = str(path[-1]), keys_of(model)
    where = re.sub(r"\[\d+\]", "", dotted(path))
    if model is HogwildTrainer and key in UNSUPPORTED_BY_HOGWILD:
        return Advice(UNSUPPORTED_BY_HOGWILD[key])
    if key == "extends":
        return Advice(f"unknown key; {EXTENDS_BY_SET if len(path) == 1 else EXTENDS_IN_A_SECTION}")
    if NO_BREAK_SPACE in key:
        return Advice("unknown key; there is a no-break space in it, write an ordinary one")
    mangled = mangled_key(key, own)
    if mangled is not None:
        return mangled
    foreign = FOREIGN.get(f"{dotted(path[:-1])}.{key}") or FOREIGN.get(key)
    if foreign is not None and foreign != where:
        return Advice(f"unknown key; write {relative(foreign, path)}")
    ludwig = ludwig_key(path)
    if ludwig is not None:
        return Advice(ludwig)
    near = nearest(key, own)
    if near and (len(key) > 3 or folded(near[0]) == folded(key)):
        return meant(near, section)
    other = other_arm(path, model, siblings, section=section)
    if other is not None:
        return Advice(other)
    elsewhere = paths_of(key)
    inside = other_type(key, elsewhere, section=where.rpartition(".")[0], model=model)
    if inside is not None:
        return Advice(inside)
    if elsewhere:
        sections = [path.rpartition(".")[0] or "the top of the file" for path in elsewhere[:2]]
        return Advice(f"unknown key; {key} belongs to {' or '.join(sections)}")
    if near:
        return meant(near, section)
    far = similar_elsewhere(key)
    if far:
        return Advice(f"unknown key; did you mean {' or '.join(far[:2])}?")
    return Advice(f"unknown key; {allowed(own)}")


def similar_elsewhere(key: str) -> list[str]:
    """Return the paths of keys of other sections that `key` may be a misspelling of.

    There are hundreds of them, so one is similar only with an edit for every six letters.
    """
    near = nearest(key, known_names()) if len(key) > 4 else []
    return [
        path for name in near if distance(folded(key), folded(name)) <= max(len(key) // 6, 1) for path in paths_of(name)
    ]


def ludwig_key(path: Path) -> str | None:
    """Return advice about a key that only Ludwig has, or None."""
    pattern = ".".join("*" if isinstance(part, int) else part for part in path)
    if pattern in RENAMED:
        return f"unknown key; write {relative(RENAMED[pattern], path)}"
    if pattern in IGNORED:
        return f"this key of Ludwig's has no effect here: {IGNORED[pattern]}; remove it"
    return None


def meant(near: list[str], section: Mapping[str, Node]) -> Advice:
    free = [name for name in near if name not in section] or near
    only = free[0] if len(free) == 1 and free[0] not in section else None
    return Advice(f"unknown key; did you mean {' or '.join(free)}?", meant=only)


def allowed(own: Mapping[str, object]) -> str:
    if len(own) <= 25:
        return f"write one of {', '.join(own)}"
    return "see partita schema --markdown for the keys of this section"


def mangled_key(key: str, own: Mapping[str, object]) -> Advice | None:
    """Return advice about `r:8` without a space, or `trainer.epochs` as one key."""
    name, colon, value = key.partition(":")
    if colon and name in own:
        return Advice(f"a space is missing after the colon; write {name}: {value}")
    section, dot, rest = key.partition(".")
    if dot and section in own:
        return Advice(f"keys are not joined by dots in the file; write {section}: {{{rest}: ...}}")
    return None


def relative(target: str, path: Path) -> str:
    """Return a key path relative to the section of `path`."""
    section = "".join(f"{part}." for part in path[:-1] if isinstance(part, str))
    return target.removeprefix(section) if section else target


def other_arm(
    path: Path, model: type[ConfigModel], siblings: Tagged | None, *, section: Mapping[str, Node]
) -> str | None:
    """Return advice about a key that belongs to another type of the same section, or None.

    Args:
        path: Path of the key.
        model: The section that the key is in.
        siblings: The union that `model` belongs to, or None.
        section: All keys of the section in the file.
    """
    if siblings is None:
        return None
    key = str(path[-1])
    tags = [tag for tag, other in siblings.arms if other is not model and key in keys_of(other)]
    own = next(tag for tag, other in siblings.arms if other is model)
    if not tags:
        return None
    if model is NoTrainer:
        return f"nothing is trained with type: none; write type: {tags[0]} or remove {key}"
    belongs = f"it belongs to type: {' or '.join(tags[:3])}"
    if "type" in section and section["type"].origin == ORIGIN:
        belongs += f"; to replace the whole section, write --set '{dotted(path[:-1])}={{type: {own}}}'"
    return f"{key} has no effect with type: {own}; remove it, {belongs}"


def other_type(key: str, paths: Iterable[str], *, section: str, model: type[ConfigModel]) -> str | None:
    """Return advice about a key that belongs into this section, but with another type of it; otherwise None.

    Args:
        key: The unknown key.
        paths: Where a key of this name belongs.
        section: Path of the section that the key is in, without indices.
        model: That section.
    """
    for path in paths if section else ():
        if not path.startswith(f"{section}.") or has_key(model, path.removeprefix(f"{section}.").split(".")):
            continue
        for length in range(1, path.count(".") + 1):
            parts = path.split(".")
            union = shape_at(parts[:length])
            if isinstance(union, Tagged):
                tags = [tag for tag, arm in union.arms if has_key(arm, parts[length:])]
                owner = ".".join(parts[:length])
                return f"unknown key; {key} is for {owner} with type: {' or '.join(tags[:3])}; remove it"
    return None


def has_key(model: type[ConfigModel], parts: Sequence[str]) -> bool:
    """Return whether a section has a key, given by its path within the section."""
    key = keys_of(model).get(parts[0])
    if key is None or len(parts) == 1:
        return key is not None
    return any(has_key(inner, parts[1:]) for _, inner in models_of(key.shape))


def shape_at(parts: Sequence[str]) -> Shape | None:
    """Return the shape of a key of the file, an item's for lists; None inside a union."""
    shape: Shape = Section(Config)
    for part in parts:
        if not isinstance(shape, Section) or part not in keys_of(shape.model):
            return None
        shape = keys_of(shape.model)[part].shape
        shape = shape.item if isinstance(shape, Items) else shape
    return shape


@cache
def all_paths() -> dict[str, tuple[str, ...]]:
    """Return the paths of every key, shortest first."""
    by_name: dict[str, list[str]] = {}
    for path, name in sorted(walk(Config, ""), key=lambda item: item[0].count(".")):
        by_name.setdefault(name, [])
        if path not in by_name[name]:
            by_name[name].append(path)
    return {name: tuple(paths) for name, paths in by_name.items()}


def walk(model: type[ConfigModel], section: str) -> Iterator[tuple[str, str]]:
    for name, key in keys_of(model).items():
        yield f"{section}{name}", name
        mark = "[]" if isinstance(key.shape, Items) and not isinstance(key.shape.item, Section | Tagged) else ""
        for _, inner in models_of(key.shape):
            yield from walk(inner, f"{section}{name}{mark}.")


def known_names() -> list[str]:
    return list(all_paths())


def paths_of(name: str) -> tuple[str, ...]:
    """Return the paths where a key of this name belongs; empty for names that occur everywhere."""
    return () if name in ("type", "name", "column", "split", "int") else all_paths().get(name, ())
