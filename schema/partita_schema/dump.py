"""Serialization of a configuration to YAML: all values with their origin, or only the values that were set."""

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import yaml

from partita_schema.config import Config
from partita_schema.load import LoadedConfig
from partita_schema.yaml.block import BlockDumper
from partita_schema.yaml.tree import Path, dotted
from partita_schema.yaml.variables import escaped


def resolved_yaml(loaded: LoadedConfig) -> str:
    """Return every value of the configuration, including defaults, with its origin as a comment.

    Loading the YAML returns an equal Config.
    """
    return with_origins(escaped(loaded.config.model_dump(mode="json")), loaded.origins)


def chosen_yaml(loaded: LoadedConfig) -> tuple[str, int]:
    """Return the values that were set or are `auto`, with their origins, and the number of values left out.

    Loading the YAML returns an equal Config.
    """
    values = escaped(loaded.config.model_dump(mode="json"))
    text = with_origins(without_defaults(values, (), loaded.origins), loaded.origins)
    return text, len(loaded.origins) - sum(line.count("  # ") for line in text.splitlines())


def without_defaults(value: Any, path: Path, origins: Mapping[str, str]) -> Any:
    """Return a section without values that are plain defaults, or {} if nothing is left."""
    if isinstance(value, dict) and value:
        section = {key: without_defaults(item, (*path, key), origins) for key, item in value.items()}
        return {
            key: item for key, item in section.items() if item != {} or origins.get(dotted((*path, key))) not in PLAIN
        }
    if isinstance(value, list) and any(isinstance(entry, dict) for entry in value):
        return [without_defaults(entry, (*path, index), origins) for index, entry in enumerate(value)]
    return {} if origins.get(dotted(path)) == "default" and value != "auto" else value


PLAIN = (None, "default")
"""Origins of values that may be left out: None for sections, and default."""


def with_origins(values: Mapping[str, object], origins: Mapping[str, str]) -> str:
    """Return YAML with the origin of every value as a comment."""
    lines = list(section_lines(values, (), origins))
    width = min(60, max(len(line) for line, _ in lines))
    return "".join(f"{line.ljust(width)}  # {origin}\n" if origin else f"{line}\n" for line, origin in lines)


def native_yaml(config: Config) -> str:
    """Return the values that were set, with the current key names. Loading the YAML returns an equal Config."""
    values = config.model_dump(mode="json", exclude_unset=True)
    values.pop("model_type", None)
    dumped = yaml.dump(
        {"version": 1, **types_first(escaped(values))},
        Dumper=BlockDumper,
        sort_keys=False,
        allow_unicode=True,
        width=100,
    )
    assert isinstance(dumped, str)
    return dumped


def types_first(value: Any) -> Any:
    """Return nested mappings with their keys `name` and `type` first."""
    if isinstance(value, dict):
        first = {key: value[key] for key in ("name", "type") if key in value}
        return {key: types_first(item) for key, item in {**first, **value}.items()}
    return [types_first(item) for item in value] if isinstance(value, list) else value


def section_lines(value: Mapping[str, object], path: Path, origins: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    indent = "  " * sum(isinstance(part, str) for part in path)
    first = {key: value[key] for key in ("name", "type") if key in value}
    for key, item in {**first, **value}.items():
        yield from item_lines(item, (*path, key), f"{indent}{scalar(key)}:", origins)


def item_lines(item: object, path: Path, head: str, origins: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the lines of a value, each with its origin.

    Args:
        item: The value.
        path: Its keys from the top.
        head: The key with its indentation and colon.
        origins: Origin of each value, by path.
    """
    if isinstance(item, dict) and item:
        yield head, ""
        yield from section_lines(item, path, origins)
    elif isinstance(item, list) and any(isinstance(entry, dict) for entry in item):
        yield head, ""
        for index, entry in enumerate(item):
            yield from entry_lines(entry, (*path, index), origins)
    else:
        yield f"{head} {scalar(item)}", origins.get(dotted(path), "")


def entry_lines(entry: object, path: Path, origins: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the lines of a list item; the first line starts with a dash."""
    indent = "  " * (sum(isinstance(part, str) for part in path) - 1)
    if not isinstance(entry, dict) or not entry:
        yield f"{indent}- {scalar(entry)}", origins.get(dotted(path), "")
        return
    lines = list(section_lines(entry, path, origins))
    first, origin = lines[0]
    yield f"{indent}- {first.lstrip()}", origin
    yield from lines[1:]


def scalar(value: object) -> str:
    """Return a value on one line, quoted if YAML would otherwise read something else."""
    return cached_scalar(value) if isinstance(value, str | int | None) else written_scalar(value)


def written_scalar(value: object) -> str:
    quoted = isinstance(value, str) and not re.fullmatch(r"[\w./-]*", value)
    style: dict[str, Any] = {"default_style": '"'} if quoted else {"default_flow_style": True}
    text = yaml.safe_dump(value, allow_unicode=True, width=float("inf"), **style)
    return str(text).removesuffix("\n").removesuffix("\n...")


cached_scalar = lru_cache(maxsize=1024, typed=True)(written_scalar)
"""Cached, because the same values occur often and each dump takes 80 microseconds."""
