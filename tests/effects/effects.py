"""The classes of the tables: which keys are changed in which configuration, and what must differ then."""

import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .observers import Config, Observer

GENERIC: Any = object()
"""The other value is chosen by the JSON schema."""


@dataclass(frozen=True)
class Flip:
    """Another value of a key."""

    value: Any = GENERIC
    given: Config = field(default_factory=dict)
    """Sections of both configurations, merged into the base."""
    also: Config = field(default_factory=dict)
    """Sections of the changed configuration only, for keys that have to change together."""
    part: str | None = None
    """The part of the observation that must differ; `refusal` if the changed configuration must be refused."""


@dataclass(frozen=True)
class Group:
    """Keys that are changed in one configuration, one at a time."""

    name: str
    observer: Observer
    base: Config
    part: str
    flips: dict[str, Any]
    """A Flip or another value by path."""
    long: bool = False
    """Whether the group is too slow for the quick tests."""
    prepare: Callable[[Path], None] | None = None
    """Adds inputs that only this group needs, once."""


@dataclass(frozen=True)
class Case:
    """One key of a group."""

    group: Group
    key: str
    flip: Flip

    @property
    def base(self) -> Config:
        return merged(self.group.base, self.flip.given)

    @property
    def name_of_base(self) -> str:
        """Return a name, equal for cases that share an observation of their base."""
        return json.dumps([self.group.name, self.base], sort_keys=True)

    @property
    def part(self) -> str:
        return self.flip.part or self.group.part


def cases(*groups: Group) -> list[Case]:
    return [
        Case(group, key, flip if isinstance(flip, Flip) else Flip(flip))
        for group in groups
        for key, flip in group.flips.items()
    ]


def merged(config: Config, changes: Config) -> Config:
    """Return a configuration with other values; mappings are merged, unless they have another `type`."""
    result = deepcopy(config)
    for key, value in changes.items():
        before = result.get(key)
        same = (
            isinstance(value, dict)
            and isinstance(before, dict)
            and value.get("type", before.get("type")) == before.get("type")
        )
        result[key] = merged(before, value) if same else deepcopy(value)
    return result
