"""The published JSON schema for editors and the configuration reference in Markdown, generated from the models."""

import ast
import inspect
import json
import textwrap
from collections.abc import Iterator
from functools import cache
from typing import Any

from pydantic import BaseModel

from partita_schema.base import ConfigModel
from partita_schema.config import Config
from partita_schema.layers import EXTENDS, EXTENDS_DOC
from partita_schema.schema_tree import Items, Key, Leaf, Named, OneOf, Section, Shape, Tagged, keys_of, models_of, words

EXTENDS_SCHEMA: dict[str, Any] = {
    "anyOf": [{"type": "string", "minLength": 1}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]
}


@cache
def field_docs(model: type[BaseModel]) -> dict[str, str]:
    """Return the documentation of a model's fields by name, including fields of its base classes."""
    docs: dict[str, str] = {}
    for part in reversed(model.__mro__):
        if issubclass(part, ConfigModel) and part is not ConfigModel:
            docs |= class_docs(part)
    return docs


def class_docs(model: type[BaseModel]) -> dict[str, str]:
    body = ast.parse(textwrap.dedent(inspect.getsource(model))).body[0]
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(sentence))):
                docs[name] = " ".join(sentence.split())
    return docs


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of the file with a description of every key, for completion and checks in editors."""
    schema = Config.model_json_schema()
    described: list[tuple[type[BaseModel], dict[str, Any]]] = [(Config, schema)]
    models = {model.__name__: model for model in all_models()}
    described += [(models[name], definition) for name, definition in schema["$defs"].items() if name in models]
    for model, definition in described:
        for name, entry in definition.get("properties", {}).items():
            entry["description"] = field_docs(model)[name]
            entry.pop("title", None)
    schema["properties"] = {EXTENDS: EXTENDS_SCHEMA | {"description": EXTENDS_DOC}, **schema["properties"]}
    # What is required may be in the file that this one extends.
    schema["anyOf"] = [{"required": [EXTENDS]}, {"required": schema.pop("required")}]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "partita configuration"}


def json_schema_text() -> str:
    return json.dumps(json_schema(), indent=1, ensure_ascii=False) + "\n"


def all_models() -> list[type[ConfigModel]]:
    """Return every section of the file once, in file order."""
    models: dict[type[ConfigModel], None] = {}

    def visit(model: type[ConfigModel]) -> None:
        if model not in models:
            models[model] = None
            for key in keys_of(model).values():
                for _, inner in models_of(key.shape):
                    visit(inner)

    visit(Config)
    return list(models)


def markdown() -> str:
    """Return the configuration reference: a table of keys for each section."""
    lines = [
        "# Configuration reference",
        "",
        "Made from the schema by `partita schema --markdown`; do not edit.",
        "",
        *table(Config, anchors={}),
    ]
    heading = lines.index("|---|---|---|---|")
    lines.insert(heading + 1, f"| `{EXTENDS}` | a text; or a list of texts | null | {escaped(EXTENDS_DOC)} |")
    shown: dict[type[ConfigModel], str] = {Config: ""}
    for key in keys_of(Config).values():
        lines += section_pages(key, key.name, shown)
    return "\n".join(lines) + "\n"


def section_pages(key: Key, path: str, shown: dict[type[ConfigModel], str]) -> Iterator[str]:
    """Yield headings and tables of the sections under a key, each model once."""
    models: dict[type[ConfigModel], list[str]] = {}
    for tag, model in models_of(key.shape):
        models.setdefault(model, []).extend([tag] if tag else [])
    for model, tags in models.items():
        if model in shown:
            continue
        tags = tags or [tag for tag in own_tag(model) if isinstance(key.shape, OneOf)]
        title = f"{path}: {', '.join(tags)}" if tags else path
        shown[model] = title
        yield from ("", f"{'#' * min(4, 2 + path.count('.'))} {title}", "", first_line(model), "")
        yield from table(model, anchors=shown)
        for inner in keys_of(model).values():
            yield from section_pages(inner, f"{path}.{inner.name}", shown)


def own_tag(model: type[ConfigModel]) -> list[str]:
    key = keys_of(model).get("type")
    return [words(key.shape)] if key is not None and key.required else []


def first_line(model: type[ConfigModel]) -> str:
    return " ".join((model.__doc__ or "").split("\n\n")[0].split())


def table(model: type[ConfigModel], *, anchors: dict[type[ConfigModel], str]) -> Iterator[str]:
    yield "| key | type | default | meaning |"
    yield "|---|---|---|---|"
    for name, key in keys_of(model).items():
        see = [anchors[inner] for _, inner in models_of(key.shape) if inner in anchors and inner is not model]
        link = f" See [{see[0]}](#{anchor(see[0])})." if see and see[0] else ""
        meaning = escaped(field_docs(model)[name]) + link
        yield f"| `{name}` | {escaped(type_words(key.shape))} | {default_words(key)} | {meaning} |"


def anchor(title: str) -> str:
    """Return the Markdown fragment of a heading."""
    return "".join(mark for mark in title.lower().replace(" ", "-") if mark.isalnum() or mark in "-_")


def type_words(shape: Shape) -> str:
    """Return the type in plain words, with every value of a choice."""
    if isinstance(shape, Tagged):
        return "by `type`: " + ", ".join(f"`{tag}`" for tag, _ in shape.arms)
    if isinstance(shape, OneOf):
        return "; or ".join(type_words(arm) for arm in shape.arms)
    if isinstance(shape, Items) and isinstance(shape.item, Section | Tagged):
        return (
            "a list of mappings" if isinstance(shape.item, Section) else f"a list of mappings, {type_words(shape.item)}"
        )
    if isinstance(shape, Named) and isinstance(shape.value, Leaf | OneOf):
        return "a mapping with free keys"
    return words(shape).removeprefix("one of ")


def default_words(key: Key) -> str:
    if key.required:
        return "**required**"
    value = key.default
    if isinstance(value, BaseModel):
        tag = getattr(value, "type", None)
        return f"`{{type: {tag}}}`" if isinstance(tag, str) and isinstance(key.shape, Tagged) else "see below"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple | list):
        return f"`[{', '.join(map(str, value))}]`"
    if value is None:
        return "null"
    return f"`{value}`" if value not in ("", {}) else "empty"


def escaped(text: str) -> str:
    """Return a text for a cell of a Markdown table. In code spans, `<` stands for itself."""
    parts = text.replace("|", "\\|").split("`")
    return "`".join(part if index % 2 else part.replace("<", "&lt;") for index, part in enumerate(parts))
