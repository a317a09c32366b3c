"""Which known names a mistyped one is likely to mean."""

from collections.abc import Iterable


def distance(left: str, right: str) -> int:
    """Insertions, deletions, changes and swaps of neighbours from one text to the other (optimal string alignment)."""
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
    """The name without case, hyphens and underscores: batchSize and batch-size are batch_size."""
    return name.lower().replace("-", "").replace("_", "").replace(" ", "")


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """Known names that `name` may be a slip of, nearest first, at most three and all equally near; often empty.

    One slip is believed in any name, a second one from six letters on, a third one from twelve on.
    """
    slips = 1 if len(name) < 6 else 2 if len(name) < 12 else 3
    if len(name) > 100:
        return []
    found: dict[int, list[str]] = {}
    for candidate in dict.fromkeys(known):
        if folded(candidate) == folded(name):
            found.setdefault(0, []).append(candidate)
        elif abs(len(candidate) - len(name)) <= slips:
            found.setdefault(distance(name.lower(), candidate), []).append(candidate)
    best = min(found, default=slips + 1)
    # A name of one letter is one slip away from every other such name: that says nothing.
    if best > slips or best >= len(name):
        return []
    return found[best][:3]
