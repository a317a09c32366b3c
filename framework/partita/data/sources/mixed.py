"""Join several indexed sources, choosing the source of each next row so that shares are exact after every row.

The order is that of the chairman assignment problem (Tijdeman 1980, "The chairman assignment problem", section 2):
among the sources that are due, the one whose next row is due first. After n rows each of k sources has contributed its
share of n to within 1 - 1/(2k - 2) rows. Nothing is random, and the counts so far are the whole state. After as many
rows as the integer shares sum to, each source has contributed exactly its share, and the state is the initial one.
Without weights, an epoch in which every row occurs once has the rows of each source spread evenly over it. Keys are
prefixed with the name of their source.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from math import gcd, lcm
from pathlib import Path
from typing import Any, Literal

import numpy as np

from partita.data.rows import RowKeys, Rows, digest
from partita.data.sources.sources import errors_at, open_rows
from partita.data.sources.transcripts import ANSWERS, WantedRows
from partita_schema.errors import DataError
from partita_schema.sections.batching import ChunkBatching, FixedBatching
from partita_schema.sections.data import Data

Stop = Literal["first", "all", "all_once"]
WHOLE = 1_000_000
"""Weights without a simple ratio are rounded to parts of this."""
MAX_ROWS = 1 << 31
"""Maximum number of rows in an epoch; more is taken for a mistake."""


def whole_shares(weights: Sequence[float]) -> list[int]:
    """Return the smallest integers in the same ratio; to one part in a million if the ratio is not simple."""
    parts = [Fraction(weight).limit_denominator(10_000) for weight in weights]
    scale = lcm(*(part.denominator for part in parts))
    whole = [int(part * scale) for part in parts]
    exact = all(abs(part - weight) <= 1e-9 * weight for part, weight in zip(parts, weights, strict=True))
    if not exact or sum(whole) > WHOLE or not all(whole):
        total = sum(weights)
        whole = [max(1, round(WHOLE * weight / total)) for weight in weights]
    divisor = gcd(*whole)
    return [part // divisor for part in whole]


class Mixer:
    """Choose sources row by row, with exact shares."""

    def __init__(self, weights: Sequence[float], *, counts: Sequence[int] | None = None) -> None:
        """Start mixing, or continue from the `counts` of an earlier mixer."""
        self._shares = whole_shares(weights)
        self._whole = sum(self._shares)
        self._fold = max(1, 2 * len(weights) - 2)
        self.counts = list(counts) if counts is not None else [0] * len(weights)
        """Rows from each source since its share was last exact."""

    def choose(self) -> int:
        """Return the source of the next row, without counting it."""
        if len(self.counts) == 1:
            return 0
        number, whole, fold = sum(self.counts) + 1, self._whole, self._fold
        best, soonest = -1, 0.0
        for source, (share, count) in enumerate(zip(self._shares, self.counts, strict=True)):
            if fold * (number * share - count * whole) >= whole:
                due = (fold * count + fold - 1) / share
                if best < 0 or due < soonest:
                    best, soonest = source, due
        return best

    def count(self, source: int) -> None:
        """Count a row of a source."""
        self.counts[source] += 1
        if sum(self.counts) == self._whole:
            self.counts = [0] * len(self.counts)


def choices(weights: Sequence[float], length: int) -> np.ndarray:
    """Return the sources of the first rows that a Mixer chooses, int64, [length].

    The choices repeat after as many rows as the integer shares sum to.
    """
    mixer, period = Mixer(weights), sum(whole_shares(weights))
    sources = np.empty(min(period, length), dtype=np.int64)
    for index in range(len(sources)):
        sources[index] = source = mixer.choose()
        mixer.count(source)
    return np.resize(sources, length) if length else sources


class MixedOrder:
    """Order the rows of several indexed sources for an epoch; each source is shuffled on its own."""

    def __init__(
        self,
        sizes: Sequence[int],
        weights: Sequence[float] | None,
        stop: Stop,
        *,
        shuffle: bool = True,
        names: Sequence[str] = (),
    ) -> None:
        """Plan the order.

        Args:
            sizes: Number of rows of each source, in the order of concatenation.
            weights: Relative share of each source. None: its number of rows; only with `all_once`.
            stop: When the epoch ends.
            shuffle: Whether to shuffle each source.
            names: Names of the sources, for messages.

        Raises:
            DataError: If a source has no rows, or an epoch would be too long.
        """
        if not all(sizes):
            empty = list(sizes).index(0)
            named = names[empty] if names else f"source {empty + 1}"
            raise DataError(f"{named} of data.mix has no rows to train on; remove it, or see why in quarantine.jsonl")
        shares = "by size" if weights is None else ", ".join(f"{weight:g}" for weight in weights)
        self.fingerprint_inputs = {"mix": f"weights {shares}, stop {stop}"}
        """What decides the order besides the rows, by readable names."""
        self._sizes, self._shuffle = list(sizes), shuffle
        if weights is None:
            self._choices = spread(sizes)
        else:
            self._choices = once(sizes, weights) if stop == "all_once" else repeated(sizes, weights, stop)

    @property
    def length(self) -> int:
        """Number of rows in every epoch."""
        return len(self._choices)

    def order(self, epoch: int, rng: np.random.Generator) -> np.ndarray:
        """Return the row indices of an epoch over the concatenated sources, int64, [length].

        A source that repeats within the epoch is shuffled again. `rng` is the only source of randomness.
        """
        order = np.empty(self.length, dtype=np.int64)
        first = 0
        for source, size in enumerate(self._sizes):
            chosen = np.flatnonzero(self._choices == source)
            passes = -(-len(chosen) // size)
            rows = [rng.permutation(size) if self._shuffle else np.arange(size) for _ in range(passes)]
            if rows:
                order[chosen] = np.concatenate(rows)[: len(chosen)] + first
            first += size
        return order


def repeated(sizes: Sequence[int], weights: Sequence[float], stop: Stop) -> np.ndarray:
    """Return the sources of an epoch that ends with the first source, or once all have ended."""
    shares = whole_shares(weights)
    whole, end = sum(shares), min if stop == "first" else max
    # The last row of a source is within a row of its share, that is less than whole/share rows later or earlier.
    about = end((size + 1) * whole // share + 1 for size, share in zip(sizes, shares, strict=True))
    if about > MAX_ROWS:
        raise DataError(
            f"an epoch of this mix would have {about:,} rows, since the sources end so far from each other; "
            "write stop: first or all_once, or a larger weight for the source that ends last"
        )
    sources = choices(weights, about)
    last = [int(np.flatnonzero(sources == source)[size - 1 : size].sum()) for source, size in enumerate(sizes)]
    reached = [np.count_nonzero(sources == source) >= size for source, size in enumerate(sizes)]
    ends = [index + 1 for index, there in zip(last, reached, strict=True) if there]
    return sources[: end(ends)]


def once(sizes: Sequence[int], weights: Sequence[float]) -> np.ndarray:
    """Return the sources of an epoch that has every row once, with shares among the sources that still have rows."""
    left = dict(enumerate(sizes))
    sources_by_stage: list[np.ndarray] = []
    while left:
        sources = np.array(list(left))
        part = sources[repeated([left[source] for source in left], [weights[source] for source in left], "first")]
        sources_by_stage.append(part)
        counts = np.bincount(part, minlength=len(sizes))
        left = {source: size - int(counts[source]) for source, size in left.items() if size > counts[source]}
    return np.concatenate(sources_by_stage)


def spread(sizes: Sequence[int]) -> np.ndarray:
    """Return the sources of an epoch that has every row once, with those of each source at equal distances."""
    places = np.concatenate([(np.arange(size) + 0.5) / size for size in sizes])
    return np.repeat(np.arange(len(sizes)), sizes)[np.argsort(places, kind="stable")]


def open_mix(data: Data, *, folder: Path, wanted: WantedRows = ANSWERS) -> dict[str, Rows]:
    """Open the rows of each source of a mix, by name; `wanted` is what transcripts of simulations are read for."""
    opened, limit = {}, data.max_row_bytes
    for index, (name, part) in enumerate(zip(data.mix_names, data.mix or (), strict=True)):
        with errors_at(f"data.mix[{index}].source"):
            opened[name] = open_rows(part.source, folder=folder, name=name, max_row_bytes=limit, wanted=wanted)
    return opened


def joined(parts: Mapping[str, Rows]) -> Rows:
    """Concatenate the rows of all sources; keys are `source/key`."""
    names = [f"{source}/{name}" for source, rows in parts.items() for name in rows.keys.names]
    firsts = np.cumsum([0, *(len(rows.keys.names) for rows in parts.values())]).tolist()
    keys = RowKeys(
        names,
        np.concatenate([rows.keys.files + first for rows, first in zip(parts.values(), firsts, strict=False)]),
        np.concatenate([rows.keys.numbers for rows in parts.values()]),
    )
    starts = np.cumsum([0, *map(len, parts.values())]).tolist()
    bad = [
        replace(row, key=f"{source}/{row.key}", file=f"{source}/{row.file}", num_before=row.num_before + start)
        for (source, rows), start in zip(parts.items(), starts, strict=False)
        for row in rows.bad
    ]
    return Rows(
        JoinedStore(list(parts.values())),
        columns=list(dict.fromkeys(column for rows in parts.values() for column in rows.columns)),
        keys=keys,
        fingerprint=digest(*(text for source, rows in parts.items() for text in (source, rows.fingerprint))),
        bad=bad,
    )


class JoinedStore:
    """Concatenated rows of several sources."""

    def __init__(self, parts: Sequence[Rows]) -> None:
        self._parts = list(parts)
        self._ends = np.cumsum([len(rows) for rows in parts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, indices: np.ndarray) -> list[dict[str, Any]]:
        sources = np.searchsorted(self._ends, indices, side="right")
        result: list[dict[str, Any]] = [{}] * len(indices)
        for source in np.unique(sources).tolist():
            selected = np.flatnonzero(sources == source)
            first = int(self._ends[source]) - len(self._parts[source])
            rows = self._parts[source].get(np.asarray(indices)[selected] - first)
            for index, row in zip(selected.tolist(), rows, strict=True):
                result[index] = row
        return result


def mixed_order(data: Data, keys: RowKeys) -> MixedOrder | None:
    """Return the order of an epoch over the rows with these keys; None if they are not from a mix.

    Raises:
        DataError: If a source has no row left.
    """
    sizes = source_sizes(data, keys)
    if not sizes:
        return None
    by_size = data.stop == "all_once" and not any(part.weight for part in data.mix or ())
    weights = None if by_size else data.mix_weights
    shuffle = not isinstance(data.batching, FixedBatching | ChunkBatching) or data.batching.shuffle
    return MixedOrder(list(sizes.values()), weights, data.stop, shuffle=shuffle, names=list(sizes))


def source_sizes(data: Data, keys: RowKeys) -> dict[str, int]:
    """Return the number of rows of each source of a mix; empty if the rows are not from a mix."""
    return {name: len(indices) for name, indices in row_indices_by_source(data, keys).items()}


def row_indices_by_source(data: Data, keys: RowKeys) -> dict[str, np.ndarray]:
    """Return the indices of the rows of each source of a mix, [rows]; empty if the rows are not from a mix."""
    sources = {name: number for number, name in enumerate(data.mix_names)}
    numbers = np.array([sources.get(name.partition("/")[0], -1) for name in keys.names])
    if not sources or np.any(numbers < 0):
        return {}
    return {name: np.flatnonzero(numbers[keys.files] == number) for name, number in sources.items()}
