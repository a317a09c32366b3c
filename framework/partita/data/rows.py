"""Rows of user data by index, whatever they came from, each with a key that is the same in every run."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Protocol

import numpy as np

Indices = Sequence[int] | np.ndarray
"""Places of rows, from 0."""


@dataclass(frozen=True)
class BadRow:
    """A row that could not be read."""

    key: str
    """What names the row, as RowKeys makes it."""
    file: str
    """Name of the file."""
    number: int
    """Line of a text file, row of any other, from 1."""
    reason: str
    """What is wrong with it."""
    raw: str
    """What stands there, cut to a sane size."""
    place: int = 0
    """Number of readable rows before it in the source."""


class RowKeys(Sequence[str]):
    """Keys such as `train.jsonl:17`, in twelve bytes a row.

    The number is the line of a text file and the row of anything else, both from 1. Keys are unique: files of one
    source have different names. Rows that were made of one row of a file have its key and a number of their own, from
    1: `chats.jsonl:17#2`.
    """

    def __init__(
        self,
        names: Sequence[str],
        files: np.ndarray,
        numbers: np.ndarray,
        *,
        parts: np.ndarray | None = None,
        last: np.ndarray | None = None,
    ) -> None:
        """Keys `names[files[i]]:numbers[i]#parts[i]`; `last` marks the last part of each row of a file."""
        self.names = tuple(names)
        self.files = np.asarray(files, dtype=np.int32)
        self.numbers = np.asarray(numbers, dtype=np.int64)
        self.parts = None if parts is None else np.asarray(parts, dtype=np.int32)
        self.last = None if last is None else np.asarray(last, dtype=np.bool_)

    @classmethod
    def counted(cls, name: str, length: int) -> "RowKeys":
        """Keys `name:1` to `name:length`."""
        return cls([name], np.zeros(length, dtype=np.int32), np.arange(1, length + 1))

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.take(np.arange(len(self))[index])
        part = "" if self.parts is None else f"#{self.parts[index]}"
        return f"{self.source_key(index)}{part}"

    def source_key(self, index: int) -> str:
        """Return the key of the row of a file that a row was made of."""
        return f"{self.names[self.files[index]]}:{self.numbers[index]}"

    def sampling_key(self, index: int) -> str:
        """Return the key that a sampled answer to a row follows from.

        The last part of a row asks what the row itself asks, so it has the key of the row itself.
        """
        is_last = self.last is not None and bool(self.last[index])
        return self.source_key(index) if is_last else str(self[index])

    def place(self, index: int) -> tuple[str, int]:
        """File and number of a row."""
        return self.names[self.files[index]], int(self.numbers[index])

    def take(self, indices: Indices) -> "RowKeys":
        """Keys of some rows, in the order asked for."""
        chosen = np.asarray(indices, dtype=np.int64)
        parts = None if self.parts is None else self.parts[chosen]
        last = None if self.last is None else self.last[chosen]
        return RowKeys(self.names, self.files[chosen], self.numbers[chosen], parts=parts, last=last)

    def digest(self) -> bytes:
        """A hash of all keys and their order."""
        parts = b"" if self.parts is None else self.parts.tobytes()
        return blake2b("\0".join(self.names).encode() + self.files.tobytes() + self.numbers.tobytes() + parts).digest()


class Store(Protocol):
    """Where rows lie: a spool on disk, an Arrow table, a frame."""

    def __len__(self) -> int:
        """Number of rows."""

    def read(self, indices: np.ndarray) -> list[dict[str, Any]]:
        """Rows as new dictionaries, in the order asked for."""


class Rows:
    """Rows by index; selections are views that keep the keys of the rows they show."""

    def __init__(
        self,
        store: Store,
        *,
        columns: Sequence[str],
        keys: RowKeys,
        fingerprint: str,
        bad: Sequence[BadRow] = (),
        index: np.ndarray | None = None,
    ) -> None:
        self._store = store
        self._index = index
        self.columns = tuple(columns)
        """Names of the columns, in the order of the source."""
        self.keys = keys
        """Key of each row."""
        self.fingerprint = fingerprint
        """The same in every run for the same content and order."""
        self.bad = tuple(bad)
        """Rows of the source that could not be read; they are not among the rows, and not part of selections."""

    def __len__(self) -> int:
        return len(self.keys)

    def key(self, index: int) -> str:
        """What names a row in logs, journals and the quarantine."""
        return str(self.keys[index])

    def sampling_key(self, index: int) -> str:
        """Return the key that a sampled answer to a row follows from."""
        return self.keys.sampling_key(index)

    def get(self, indices: Indices) -> list[dict[str, Any]]:
        """Rows as new dictionaries, in the order asked for."""
        chosen = np.asarray(indices, dtype=np.int64)
        return self._store.read(chosen if self._index is None else self._index[chosen])

    def iterate(self, start: int = 0, chunk: int = 1000) -> Iterator[list[dict[str, Any]]]:
        """Rows from `start` on, `chunk` at a time."""
        for first in range(start, len(self), chunk):
            yield self.get(np.arange(first, min(first + chunk, len(self))))

    def select(self, indices: Indices) -> "Rows":
        """A view of some rows, in the order given."""
        chosen = np.asarray(indices, dtype=np.int64)
        return Rows(
            self._store,
            columns=self.columns,
            keys=self.keys.take(chosen),
            fingerprint=digest(self.fingerprint, chosen.tobytes()),
            index=chosen if self._index is None else self._index[chosen],
        )

    def with_bad(self, bad: Sequence[BadRow]) -> "Rows":
        """The same rows, with bad rows to answer for."""
        return Rows(
            self._store,
            columns=self.columns,
            keys=self.keys,
            fingerprint=self.fingerprint,
            bad=bad,
            index=self._index,
        )


def digest(*parts: str | bytes | np.ndarray) -> str:
    """A short stable hash of parts; where one ends and the next begins counts."""
    state = blake2b(digest_size=16)
    for part in parts:
        data = (
            part.data if isinstance(part, np.ndarray) else memoryview(part.encode() if isinstance(part, str) else part)
        )
        state.update(data.nbytes.to_bytes(8, "little"))
        state.update(data)
    return state.hexdigest()


class ListStore:
    """Rows that are a list of mappings already."""

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, indices: np.ndarray) -> list[dict[str, Any]]:
        return [dict(self._rows[i]) for i in indices.tolist()]


class ColumnStore:
    """Rows that are lists by column."""

    def __init__(self, columns: Mapping[str, Sequence[Any]]) -> None:
        self._columns = columns

    def __len__(self) -> int:
        return len(next(iter(self._columns.values()), ()))

    def read(self, indices: np.ndarray) -> list[dict[str, Any]]:
        return [{name: values[i] for name, values in self._columns.items()} for i in indices.tolist()]


class FrameStore:
    """Rows of a pandas frame; missing values become None."""

    def __init__(self, frame: Any) -> None:
        self._frame = frame

    def __len__(self) -> int:
        return len(self._frame)

    def read(self, indices: np.ndarray) -> list[dict[str, Any]]:
        part = self._frame.iloc[indices]
        missing = part.isna().to_numpy()
        rows = part.to_dict("records")
        for place, column in zip(*missing.nonzero(), strict=True):
            rows[place][part.columns[column]] = None
        return [{str(name): value for name, value in row.items()} for row in rows]


class DatasetStore:
    """Rows of a `datasets.Dataset`, usually Arrow memory mapped from disk."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset.with_format(None)

    def __len__(self) -> int:
        return len(self._dataset)

    def read(self, indices: np.ndarray) -> list[dict[str, Any]]:
        columns = self._dataset[indices.tolist()]
        return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
