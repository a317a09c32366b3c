"""Text for messages: numbers with nouns, repeated names, and suggestions for misspelled ones."""

import json
from collections.abc import Iterable
from typing import Any


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """Return a number with its noun, such as `1 row` or `2,000 rows`. Pass `plural` for irregular nouns."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def describe_error(error: BaseException) -> str:
    """Return the class of an exception and its text, if it has one."""
    try:
        text = str(error)
    except Exception as other:  # of a class of the user
        text = f"its text cannot be read ({type(other).__name__})"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def value_text(value: Any, *, digits: int | None = None) -> str:
    """Return a value of a configuration or an answer for people: a text as it is, other values as JSON.

    Args:
        value: The value.
        digits: Significant digits of a number with a fraction. Default: all.
    """
    if isinstance(value, float) and digits is not None:
        return f"{value:.{digits}g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def distance(left: str, right: str) -> int:
    """Return the edit distance with swaps of adjacent characters (optimal string alignment)."""
    before: list[int] = []
    above = list(range(len(right) + 1))
    for row, first in enumerate(left, start=1):
        current = [row]
        for column, second in enumerate(right, start=1):
            cost = min(above[column] + 1, current[-1] + 1, above[column - 1] + (first != second))
            if row > 1 and column > 1 and first == right[column - 2] and left[row - 2] == second:
                cost = min(cost, before[column - 2] + 1)
            current.append(cost)
        before, above = above, current
    return above[-1]


def folded(name: str) -> str:
    """Return the name in lower case without separators, so that batchSize and batch-size equal batch_size."""
    return name.lower().replace("-", "").replace("_", "").replace(" ", "")


def first_repeated(names: Iterable[str]) -> str | None:
    """Return the first name that equals an earlier one; None if all differ."""
    earlier = set[str]()
    for name in names:
        if name in earlier:
            return name
        earlier.add(name)
    return None


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """Return up to three known names that `name` may be a misspelling of, all at the smallest distance.

    Up to 1 edit is allowed for names under 6 characters, 2 under 12, and 3 for longer names.
    """
    max_edits = 1 if len(name) < 6 else 2 if len(name) < 12 else 3
    if len(name) > 100:
        return []
    by_distance: dict[int, list[str]] = {}
    for candidate in dict.fromkeys(known):
        if folded(candidate) == folded(name):
            by_distance.setdefault(0, []).append(candidate)
        elif abs(len(candidate) - len(name)) <= max_edits:
            by_distance.setdefault(distance(name.lower(), candidate.lower()), []).append(candidate)
    best = min(by_distance, default=max_edits + 1)
    # Every name of one letter is one edit away from every other: such a match means nothing.
    if best > max_edits or best >= len(name):
        return []
    return by_distance[best][:3]
