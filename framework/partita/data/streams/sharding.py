"""Assign shards to shard groups so that all groups have about the same number of bytes.

Shards are assigned in order of decreasing size, each to the group with the least so far (Graham 1969, "Bounds on
multiprocessing timing anomalies", section 3): the largest group is at most a third above the optimum.
"""

import heapq
from collections.abc import Sequence

import numpy as np

CLASSES = 4
"""Number of size classes per doubling; shards of one class are shuffled together."""


def assign_shards(
    sizes: Sequence[float], num_groups: int, *, rng: np.random.Generator | None = None
) -> list[np.ndarray]:
    """Return the shard indices of each group in reading order; `rng` is the only source of randomness.

    Shards of similar size are shuffled among the groups, and the shards of each group among themselves. Without
    `rng` both are in order, and shards of one size are assigned in turn.
    """
    sizes_S = np.asarray(sizes, dtype=np.float64)
    order = np.arange(len(sizes_S)) if rng is None else rng.permutation(len(sizes_S))
    if num_groups == 1:
        return [order]
    if not len(sizes_S) or sizes_S.min() == sizes_S.max():
        return [order[group::num_groups] for group in range(num_groups)]
    classes = sizes_S if rng is None else np.round(CLASSES * np.log2(np.maximum(sizes_S, 1)))
    order = order[np.argsort(-classes[order], kind="stable")]
    groups: list[list[int]] = [[] for _ in range(num_groups)]
    least = [(0.0, group) for group in range(num_groups)]
    for shard in order.tolist():
        size, group = least[0]
        groups[group].append(shard)
        heapq.heapreplace(least, (size + float(sizes_S[shard]), group))
    return [np.array(sorted(own) if rng is None else rng.permutation(own), dtype=np.int64) for own in groups]


def unevenness(sizes: Sequence[float], num_groups: int) -> float:
    """Return the size of the largest group divided by the mean of all groups."""
    total = sum(sizes)
    return (
        max(sum(sizes[shard] for shard in own) for own in assign_shards(sizes, num_groups)) * num_groups / total
        if total
        else 1.0
    )
