"""Join several indexed sources; keys are prefixed with the name of their source."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from partita.data.mixing import MixedOrder
from partita.data.rows import RowKeys, Rows, digest
from partita.data.sources.sources import open_rows
from partita_schema.batching import FixedBatching
from partita_schema.data import Data


def open_mix(data: Data, *, folder: Path) -> dict[str, Rows]:
    """Open the rows of each source of a mix, by name."""
    mix = data.mix or ()
    return {
        name: open_rows(part.source, folder=folder, name=name, max_row_bytes=data.max_row_bytes)
        for name, part in zip(data.mix_names, mix, strict=True)
    }


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
        replace(row, key=f"{source}/{row.key}", file=f"{source}/{row.file}", place=row.place + start)
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
            places = np.flatnonzero(sources == source)
            first = int(self._ends[source]) - len(self._parts[source])
            rows = self._parts[source].get(np.asarray(indices)[places] - first)
            for place, row in zip(places.tolist(), rows, strict=True):
                result[place] = row
        return result


def mixed_order(data: Data, keys: RowKeys) -> MixedOrder | None:
    """Return the order of an epoch over the rows with these keys; None if they are not from a mix.

    Raises:
        DataError: If a source has no row left.
    """
    sizes = source_sizes(data, keys)
    if not sizes:
        return None
    weights = [part.weight for part in data.mix or ()]
    shuffle = not isinstance(data.batching, FixedBatching) or data.batching.shuffle
    return MixedOrder(list(sizes.values()), weights, data.stop, shuffle=shuffle, names=list(sizes))


def source_sizes(data: Data, keys: RowKeys) -> dict[str, int]:
    """Return the number of rows of each source of a mix; empty if the rows are not from a mix."""
    return {name: len(places) for name, places in places_by_source(data, keys).items()}


def places_by_source(data: Data, keys: RowKeys) -> dict[str, np.ndarray]:
    """Return the indices of the rows of each source of a mix, [rows]; empty if the rows are not from a mix."""
    sources = {name: number for number, name in enumerate(data.mix_names)}
    numbers = np.array([sources.get(name.partition("/")[0], -1) for name in keys.names])
    if not sources or np.any(numbers < 0):
        return {}
    return {name: np.flatnonzero(numbers[keys.files] == number) for name, number in sources.items()}
