"""Splits a sequence into consecutive parts of the least total cost."""

import math
from collections.abc import Callable, Iterable


def cheapest_split(count: int, parts: Callable[[int], Iterable[tuple[int, float]]]) -> list[tuple[int, int]]:
    """Return the start and the end of the parts that `count` items are split into.

    Args:
        count: Number of items, at least 1.
        parts: Returns the end and the cost of each part that may begin at a start, of which one has a single item.
    """
    total = [0.0, *[math.inf] * count]  # of the best split of the first items
    starts = [0] * (count + 1)  # of the last part of that split
    for start in range(count):
        before = total[start]
        for end, cost in parts(start):
            if before + cost < total[end]:
                total[end], starts[end] = before + cost, start
    found = [(starts[count], count)]
    while found[-1][0] > 0:
        found.append((starts[found[-1][0]], found[-1][0]))
    return found[::-1]
