"""Messages about invalid values: what was found, what to write, and how YAML read the value."""

import re

from partita_schema.common.text import nearest
from partita_schema.compat.aliases import ALREADY_AUTO, ELSEWHERE_TYPES, NOT_YET_TYPES
from partita_schema.errors import shortened
from partita_schema.schema_tree import Choice, Items, Leaf, Named, OneOf, Section, Shape, Tagged, keys_of, listed, words
from partita_schema.sections.objectives import DPO_VARIANTS
from partita_schema.yaml.tree import Node

KEY_OF_SINGLE_VALUES = {"data": "source", "prompt": "task", "quantization": "bits"}
"""The key that a single value in place of a section most likely belongs to."""


def wrong_value(key: str, shape: Shape, node: Node, *, optional: bool, can_be_off: bool = False) -> str:
    """Return one sentence with the expected and the actual value, and the YAML pitfall if it is a known one.

    Args:
        key: Name of the key.
        shape: What the key accepts.
        node: The invalid value.
        optional: Whether null is allowed.
        can_be_off: Whether null differs from leaving the key out.
    """
    value = node.value
    if value == "auto" and key in ALREADY_AUTO:
        return "auto is what happens without the key; remove it"
    expected = f"{words(shape)}, or null" if can_be_off else words(shape)
    trap = (
        null_trap(shape, node)
        or boolean_trap(shape, node, expected=expected)
        or quote_trap(shape, node)
        or text_trap(shape, node, optional=optional)
        or nesting_trap(key, shape, node)
    )
    return trap or f"write {expected}; got {got(node)}"


def got(node: Node) -> str:
    """Return the value as written, or a description of its type."""
    value = node.value
    if isinstance(value, dict):
        return f"a mapping with {', '.join(list(value)[:3])}" if value else "an empty mapping"
    if isinstance(value, list):
        return f"a list of {len(value)}" if value else "an empty list"
    if node.text is not None:
        return short(node.text) or "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else short(repr(value))


def short(text: str) -> str:
    return shortened(" ".join(text.split()))


def accepts(shape: Shape, kind: str) -> bool:
    if isinstance(shape, OneOf):
        return any(accepts(arm, kind) for arm in shape.arms)
    return isinstance(shape, Leaf) and shape.kind == kind


def choices(shape: Shape) -> tuple[str, ...]:
    if isinstance(shape, OneOf):
        return tuple(value for arm in shape.arms for value in choices(arm))
    if isinstance(shape, Tagged):
        return tuple(tag for tag, _ in shape.arms)
    return tuple(value for value in shape.values if isinstance(value, str)) if isinstance(shape, Choice) else ()


def null_trap(shape: Shape, node: Node) -> str | None:
    if node.value is not None:
        return None
    written = "there is no value" if not node.text else f"{node.text} is read as nothing"
    if "none" in choices(shape):
        return (
            f"{written}; write none, as a word" if not isinstance(shape, Tagged) else f"{written}; write {{type: none}}"
        )
    return f"{written}; write {words(shape)}, or remove the key"


def boolean_trap(shape: Shape, node: Node, *, expected: str) -> str | None:
    """Return a message if `no`, `yes`, `on` or `off` was read as a boolean.

    Args:
        shape: What the key accepts.
        node: The value.
        expected: What to write, in words.
    """
    if not isinstance(node.value, bool) or node.text is None or accepts(shape, "flag"):
        return None
    plain = str(node.value).lower()
    read = f"got {node.text}" if node.text.lower() == plain else f"{node.text} is read by YAML as {plain}"
    if not node.value and "none" in choices(shape):
        return f"{read}; write {'{type: none}' if isinstance(shape, Tagged) else 'none'}"
    if isinstance(shape, Choice) and node.text not in shape.values:
        return f"{read}; write {expected}"
    if accepts(shape, "text") or node.text in choices(shape):
        return f"{read}; write '{node.text}' in quotes"
    return f"{read}; write {expected}"


def quote_trap(shape: Shape, node: Node) -> str | None:
    """Return a message if a number is given where text is expected."""
    value = node.value
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    text = node.text if node.text is not None else str(value)
    if isinstance(shape, Leaf) and shape.kind == "text":
        return f"{text} is a number; write '{text}' in quotes"
    if isinstance(value, float) and accepts(shape, "integer") and not accepts(shape, "number") and value.is_integer():
        return f"write {words(shape)}; got {text}, write {int(value)}"
    return None


def text_trap(shape: Shape, node: Node, *, optional: bool) -> str | None:
    """Return a message for text in place of another type: a quoted number, None, or a misspelled name."""
    text = node.value
    if not isinstance(text, str):
        return None
    if text.lower() in ("none", "null", "nil") and optional:
        return f"{text} is a text here; write null, or remove the key"
    near = nearest(text, choices(shape))
    if near and isinstance(shape, Choice | OneOf):
        written = short(text) if text == text.strip() else repr(text)
        return f"got {written}; did you mean {' or '.join(near)}?"
    if isinstance(shape, Choice):
        return f"write {words(shape)}; got {short(text)!r}" if text else f"write {words(shape)}; got an empty text"
    number = number_in(text)
    if number is not None and (accepts(shape, "integer") or accepts(shape, "number")):
        if node.text is None and str(number) == text.strip():
            return f"{text!r} is a text in quotes; write {words(shape)}, without quotes"
        if isinstance(number, int) and accepts(shape, "integer"):
            return f"write {words(shape)}; {text} is a text to YAML, write {number}"
    if text.lower() in ("true", "false") and accepts(shape, "flag"):
        return f"{text!r} is a text in quotes; write {text.lower()} without quotes"
    return f"the text is empty; write {words(shape)}" if text == "" else None


def number_in(text: str) -> int | float | None:
    if len(text) > 40 or not re.fullmatch(r"\s*[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d{1,2})?\s*", text, re.ASCII):
        return None
    number = float(text)
    return int(number) if number.is_integer() and abs(number) < 2**53 else number


def nesting_trap(key: str, shape: Shape, node: Node) -> str | None:
    """Return a message for a mapping in place of text, text in place of a mapping, or one value in place of a list."""
    value = node.value
    if isinstance(value, dict) and accepts(shape, "text") and len(value) == 1:
        (name, only), *_ = value.items()
        if only.value is None:
            return f"{{{name}}} without quotes is a mapping to YAML; write {key}: '{{{name}}}' in quotes"
    if isinstance(shape, Tagged) and isinstance(value, str):
        tags = choices(shape)
        if value in ELSEWHERE_TYPES.get(key, ()):
            return ELSEWHERE_TYPES[key][value]
        if value in NOT_YET_TYPES.get(key, ()):
            return f"{value} is not available yet; write {words(shape)}"
        if key == "loss" and value in DPO_VARIANTS:
            return f"write a mapping; got {value}, write loss: {{type: dpo, variant: {value}}}"
        near = [value] if value in tags else nearest(value, tags)
        if near:
            return f"write a mapping; got {short(value)}, write {key}: {{type: {near[0]}}}"
        return f"write {words(shape)}; got {short(value)!r}; types are {listed(tags)}"
    if isinstance(shape, Tagged) and isinstance(value, int):
        sections = (Section(model) for _, model in shape.arms)
        return next(filter(None, (section_trap(key, section, node) for section in sections)), None)
    if isinstance(shape, Section) and isinstance(value, str | int):
        return section_trap(key, shape, node)
    if isinstance(shape, Items) and not shape.fixed and not isinstance(value, list):
        return f"write {words(shape)}; got {got(node)}{as_list(key, shape, node)}"
    if isinstance(shape, Items) and shape.least and value == []:
        return f"the list is empty; write at least {shape.least} of them"
    if isinstance(shape, Named | Section | Tagged) and isinstance(value, list):
        return f"write {words(shape)}; got a list, write the keys without dashes"
    return None


def section_trap(key: str, shape: Section, node: Node) -> str | None:
    """Return a message for a single value in place of a mapping, with the key that it most likely belongs to."""
    value, keys = node.value, keys_of(shape.model)
    required = [name for name, one in keys.items() if one.required]
    meant = KEY_OF_SINGLE_VALUES.get(key, required[0] if len(required) == 1 else None)
    if key == "prompt" and "{" in str(value):
        meant = "template"
    if meant in keys and takes(keys[meant].shape, value):
        return f"write a mapping; got {got(node)}, write {key}: {{{meant}: {got(node)}}}"
    if not isinstance(value, str):
        return None
    for name, one in keys.items():
        near = nearest(value, choices(one.shape))
        if near:
            return f"write a mapping; got {short(value)}, write {key}: {{{name}: {near[0]}}}"
    if "type" in keys:
        return f"write a mapping with type: {words(keys['type'].shape)}; got {short(value)}"
    return None


def takes(shape: Shape, value: object) -> bool:
    """Return whether a key accepts a text or a number."""
    if isinstance(shape, OneOf):
        return any(takes(arm, value) for arm in shape.arms)
    return value in shape.values if isinstance(shape, Choice) else isinstance(value, str) and accepts(shape, "text")


def as_list(key: str, shape: Items, node: Node) -> str:
    if isinstance(node.value, dict):
        return f", write a dash before its first key (- {next(iter(node.value), 'name')}: ...)"
    return f", write {key}: [{got(node)}]" if isinstance(shape.item, Leaf | Choice) and node.value is not None else ""
