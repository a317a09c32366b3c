"""Validation of JSON values against JSON Schemas, without network access, with the most relevant error as text."""

from collections.abc import Iterator
from typing import Any

from jsonschema.exceptions import best_match
from jsonschema.validators import Draft202012Validator, validator_for
from referencing import Registry, Resource
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

MAX_DEPTH = 100
"""Maximum nesting depth of a JSON value in data, checked before any recursive function sees the value."""
MAX_WIDTH = 1_000_000
"""Maximum number of lists and dicts to visit per level, because a value in memory may contain one list many times."""
NOT_UNICODE = "not Unicode: half of a surrogate pair"
TOO_DEEP = f"nested more than {MAX_DEPTH} levels deep"


def is_too_deep(value: Any) -> bool:
    """Return whether a value is nested too deeply, which includes values that contain themselves."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [item for part in level for item in inner_collections(part)]
        if not level or len(level) > MAX_WIDTH:
            return bool(level)
    return True


def inner_collections(value: Any) -> list[Any]:
    """Return the lists and dicts directly inside a value."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [item for item in items if isinstance(item, dict | list | tuple)]


def draft_of(json_schema: dict[str, Any]) -> Any:
    """Return the validator class of the schema's draft, by default the newest, or None if the draft is unknown."""
    if not isinstance(json_schema.get("$schema", ""), str):
        return None
    if "$schema" not in json_schema:
        return Draft202012Validator
    unknown: Any = None  # the stubs allow only a class as default
    return validator_for(json_schema, default=unknown)


def json_validator(json_schema: dict[str, Any]) -> Any:
    """Return a validator for a checked schema. References are never fetched from the network."""
    return draft_of(json_schema)(json_schema, registry=Registry())


def schema_mistake(validator: Any, value: Any) -> str | None:
    """Return the most relevant violation with its path, such as `items[0].price: 'a' is not of type 'number'`, or
    None."""
    error = best_match(validator.iter_errors(value))
    if error is None:
        return None
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error.absolute_path).lstrip(".")
    return f"{path}: {error.message}" if path else str(error.message)


def broken_reference(json_schema: dict[str, Any]) -> str | None:
    """Return the first `$ref` that does not resolve inside the schema, or None."""
    identifier = json_schema.get("$id", "")
    resource = Resource.from_contents(json_schema, default_specification=DRAFT202012)
    resolver = Registry().with_resource(identifier, resource).resolver(identifier)
    for reference in references(json_schema):
        try:
            resolver.lookup(reference)
        except (Unresolvable, ValueError):
            return reference
    return None


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for item in value.values():
            yield from references(item)
    elif isinstance(value, list):
        for item in value:
            yield from references(item)
