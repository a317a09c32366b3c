"""The keys of the JSON schema, their places in a configuration, and another value for each."""

import json
import re
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

from partita_schema.reference import json_schema_text

Node = dict[str, Any]
"""A part of the JSON schema."""

LIKE_FINETUNING = ("preference", "kto", "reward")
"""Trainers whose sections derive from that of fine-tuning."""
SEGMENT = re.compile(r"([a-z_0-9]+)(?:\[([a-z_0-9]+)\])?")


def leaf_keys() -> dict[str, Node]:
    """Return each key with a plain value, by path, with its part of the JSON schema.

    Keys that a trainer has from fine-tuning are left out: they are those of `trainer[finetune]`.
    A path names the variant of a union in brackets: `adapter[lora].r`. A section that may also be written as a plain
    value, such as `base_model`, is a key too. Keys in lists and in mappings with free keys have the path of the list.
    """
    schema: Node = json.loads(json_schema_text())
    keys = dict(walk(schema, schema["$defs"], path=""))
    return {key: node for key, node in keys.items() if not is_inherited(key, node, keys)}


def is_inherited(key: str, node: Node, keys: dict[str, Node]) -> bool:
    """Return whether a trainer has a key from fine-tuning, whose code reads it, with the same values and meaning."""
    trainer, _, name = key.partition("].")
    of_finetuning = keys.get(f"trainer[finetune].{name}")
    return trainer.removeprefix("trainer[") in LIKE_FINETUNING and of_finetuning == node


def walk(section: Node, definitions: dict[str, Node], *, path: str) -> Iterator[tuple[str, Node]]:
    for name, node in section["properties"].items():
        key = f"{path}.{name}" if path else name
        sections = [definitions[reference] for reference in references(node)]
        if not sections or any(is_plain(arm) for arm in arms(node)):
            yield key, node
        for inner in sections:
            tag = f"[{tags(inner)[0]}]" if len(sections) > 1 else ""
            yield from walk(inner, definitions, path=key + tag)


def arms(node: Node) -> list[Node]:
    """Return the alternatives of a value."""
    inner = [*node.get("anyOf", ()), *node.get("oneOf", ())]
    return [arm for part in inner for arm in arms(part)] if inner else [node]


def references(node: Node) -> list[str]:
    """Return the names of sections that a value may be, or may be a list or mapping of."""
    results: list[str] = []
    for arm in arms(node):
        if "$ref" in arm:
            results.append(arm["$ref"].rpartition("/")[2])
        for part in (arm.get("items"), arm.get("additionalProperties")):
            results += references(part) if isinstance(part, dict) else []
    return results


def is_plain(arm: Node) -> bool:
    """Return whether an alternative is neither null nor a section."""
    return "$ref" not in arm and arm.get("type") != "null" and not references(arm)


def tags(section: Node) -> list[str]:
    """Return the values of `type` of a section."""
    kind = section["properties"].get("type", {})
    return [kind["const"]] if "const" in kind else list(kind.get("enum", ()))


def only_value(node: Node) -> Any:
    """Return the only value that a key may have, or None if it may have several."""
    return node.get("const")


def value_at(config: Node, path: str) -> Any:
    """Return the value of a key, or None if it is not written."""
    section, name = section_of(config, path)
    return section.get(name)


def with_value(config: Node, path: str, value: Any) -> Node:
    """Return a copy of a configuration with another value of a key; a mapping for `type` is the whole section."""
    changed = deepcopy(config)
    section, name = section_of(changed, path)
    if name == "type" and isinstance(value, dict):
        section.clear()
        section |= value
    else:
        section[name] = value
    return changed


def section_of(config: Node, path: str) -> tuple[Node, str]:
    """Return the mapping that holds a key, and the key's name. Sections that are not written are added."""
    *parents, last = SEGMENT.findall(path)
    section = config
    for name, tag in parents:
        inner = section.setdefault(name, {})
        if isinstance(inner, list):
            inner = inner[0]
        elif name == "parameters":
            inner = next(iter(inner.values()))
        elif name in ("match", "others"):
            inner = next(iter(inner.values())) if inner else inner.setdefault("added", {})
        result = "csv" if "path" in inner and inner["type"] != "simulation" else inner.get("type")  # type: jsonl, ...
        assert not tag or result in (tag, None), f"{path}: {name} has type {result}"
        section = inner
    return section, last[0]


def other_value(node: Node, current: Any) -> Any:
    """Return another valid value of a switch, a choice or a number."""
    current = node.get("default") if current is None else current
    for arm in arms(node):
        if arm.get("type") == "boolean" and isinstance(current, bool):
            return not current
        if "enum" in arm and (current is None or current in arm["enum"]):
            return next(value for value in arm["enum"] if value != current)
        if arm.get("type") in ("integer", "number") and isinstance(current, int | float):
            return next(value for value in (current * 2, current + 1, current / 2) if fits(arm, value, current))
    raise ValueError(f"write another value by hand than {current!r}")


def fits(arm: Node, value: float, current: float) -> bool:
    whole = arm["type"] == "number" or value == int(value)
    low = value >= arm.get("minimum", value) and value > arm.get("exclusiveMinimum", value - 1)
    high = value <= arm.get("maximum", value) and value < arm.get("exclusiveMaximum", value + 1)
    return whole and low and high and value != current
