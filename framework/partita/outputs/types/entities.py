"""Entities in the tags of words.

The tags are those of the schemes IOB1, IOB2, IOE, IOBES (S for an entity of one word, E for its end) and BILOU (U and L
for the same). Entities are read as conlleval (Tjong Kim Sang and Buchholz 2000) and seqeval by default do: a tag that
the scheme does not allow there, such as I at the beginning of an entity, begins or continues an entity.
"""

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

OUTSIDE = "O"
"""Tag of a word that is in no entity."""
UNNAMED = "_"
"""Type of entities whose tags have only a prefix."""
TAG = re.compile(r"([BIESLU])(?:-(.*))?", re.DOTALL)
"""Prefix and type of a tag."""
PREFIXES = {"L": "E", "U": "S"}
"""Prefixes of BILOU and those of IOBES with the same meaning."""


class Entity(NamedTuple):
    """Consecutive words of one type."""

    start: int
    """Index of the first word."""
    end: int
    """Index of one past the last word."""
    type: str


def entities(tags: Iterable[str]) -> list[Entity]:
    """Return the entities of a row in their order.

    Tags of other schemes, such as parts of speech, are types of entities of one word.
    """
    return list(_entities(tags))


def tag_words(entities: Iterable[Entity], count: int) -> list[str]:
    """Return the tags of words in the scheme IOB2, from entities that do not overlap."""
    tags = [OUTSIDE] * count
    for entity in entities:
        tags[entity.start : entity.end] = [f"I-{entity.type}"] * (entity.end - entity.start)
        tags[entity.start] = f"B-{entity.type}"
    return tags


def _entities(tags: Iterable[str]) -> Iterator[Entity]:
    start, before, type_before = 0, OUTSIDE, UNNAMED
    position = -1
    for position, tag in enumerate(tags):
        prefix, type_ = _parts(tag)
        continues = prefix in "IE" and before in "BI" and type_ == type_before
        if before != OUTSIDE and not continues:
            yield Entity(start, position, type_before)
        if not continues:
            start = position
        before, type_before = prefix, type_
    if before != OUTSIDE:
        yield Entity(start, position + 1, type_before)


@lru_cache(maxsize=4096)
def _parts(tag: str) -> tuple[str, str]:
    """Return the prefix of a tag, one of O, B, I, E and S, and its type."""
    if tag == OUTSIDE:
        return OUTSIDE, UNNAMED
    match = TAG.fullmatch(tag)
    if match is None:
        return "S", tag
    return PREFIXES.get(match[1], match[1]), match[2] or UNNAMED
