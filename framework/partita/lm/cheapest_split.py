"""Splits a sequence into consecutive parts of the least total cost."""

from collections.abc import Callable


def cheapest_split(count: int, cost: Callable[[int, int], float]) -> list[tuple[int, int]]:
    """Return the start and the end of the parts that `count` items are split into.

    Args:
        count: Number of items, at least 1.
        cost: Returns the cost of the part from a start to an end; infinity if there may be no such part.
    """
    total, starts = [0.0], [0]  # of the best split of the first items, and the start of its last part
    for end in range(1, count + 1):
        costs = [total[start] + cost(start, end) for start in range(end)]
        total.append(min(costs))
        starts.append(costs.index(total[-1]))
    parts = [(starts[count], count)]
    while parts[-1][0] > 0:
        parts.append((starts[parts[-1][0]], parts[-1][0]))
    return parts[::-1]
