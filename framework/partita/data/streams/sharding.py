"""Which lane reads which shards, so that all lanes have nearly as many bytes.

The largest shard first, each to the lane that has the least so far (Graham 1969, "Bounds on multiprocessing timing
anomalies", section 3): the longest lane has at most a third more than it must.
"""

import heapq
from collections.abc import Sequence

import numpy as np

CLASSES = 4
"""Sizes between a number and its double that count as different when shards are put into an order."""


def deal(sizes: Sequence[float], lanes: int, *, chance: np.random.Generator | None = None) -> list[np.ndarray]:
    """Numbers of the shards of each lane, in the order in which it reads them; all that is random is `chance`.

    Shards of like size are shuffled among the lanes, and the shards of each lane among themselves. Without `chance`
    both are in order, and shards of one size are dealt in turn.
    """
    given = np.asarray(sizes, dtype=np.float64)
    order = np.arange(len(given)) if chance is None else chance.permutation(len(given))
    if lanes == 1:
        return [order]
    if not len(given) or given.min() == given.max():
        return [order[lane::lanes] for lane in range(lanes)]
    classes = given if chance is None else np.round(CLASSES * np.log2(np.maximum(given, 1)))
    order = order[np.argsort(-classes[order], kind="stable")]
    found: list[list[int]] = [[] for _ in range(lanes)]
    least = [(0.0, lane) for lane in range(lanes)]
    for shard in order.tolist():
        size, lane = least[0]
        found[lane].append(shard)
        heapq.heapreplace(least, (size + float(given[shard]), lane))
    return [np.array(sorted(own) if chance is None else chance.permutation(own), dtype=np.int64) for own in found]


def unevenness(sizes: Sequence[float], lanes: int) -> float:
    """How many times the mean of all lanes the longest has."""
    total = sum(sizes)
    return max(sum(sizes[shard] for shard in own) for own in deal(sizes, lanes)) * lanes / total if total else 1.0
