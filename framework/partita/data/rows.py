"""Rows of user data by index, from any source, each with a key that is the same in every run."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from partita.data.arrow_values import convert_rows, converters
from partita.data.short_floats import SHORT, same_text
from partita_schema.json_values import is_too_deep

if TYPE_CHECKING:
    import pyarrow

CHUNK = 1000
"""Rows that are read at a time."""
DIGEST = re.compile(r"[0-9a-f]{32}")
"""Results of `digest`."""

Indices = Sequence[int] | np.ndarray
"""Row indices, from 0."""


@dataclass(frozen=True)
class BadRow:
    """A row that could not be read."""

    key: str
    """Key of the row, in the format of RowKeys."""
    file: str
    """Name of the file."""
    number: int
    """Line number in a text file, row number in any other, from 1."""
    reason: str
    """Why it could not be read."""
    raw: str
    """The content, truncated."""
    num_before: int = 0
    """Number of readable rows before it in the source."""


class RowKeys(Sequence[str]):
    """Row keys such as `train.jsonl:17`, stored in twelve bytes per row.

    The number is the line in a text file and the row in anything else, both from 1. Keys are unique, since the files of
    one source have different names. If a row of a file gives several examples, they share its key and are numbered from
    1: `chats.jsonl:17#2`.
    """

    def __init__(
        self,
        names: Sequence[str],
        files: np.ndarray,
        numbers: np.ndarray,
        *,
        examples: np.ndarray | None = None,
        last: np.ndarray | None = None,
    ) -> None:
        """Create the keys `names[files[i]]:numbers[i]#examples[i]`.

        Args:
            names: File names.
            files: Index of each row's file in `names`, [N].
            numbers: Line or row number in the file, [N], from 1.
            examples: Number of each example among those of the same row of a file, [N], from 1.
            last: Marks the last example of each row of a file, [N].
        """
        self.names = tuple(names)
        self.files = np.asarray(files, dtype=np.int32)
        self.numbers = np.asarray(numbers, dtype=np.int64)
        self.examples = None if examples is None else np.asarray(examples, dtype=np.int32)
        self.last = None if last is None else np.asarray(last, dtype=np.bool_)

    @classmethod
    def counted(cls, name: str, length: int) -> "RowKeys":
        """Return the keys `name:1` to `name:length`."""
        return cls([name], np.zeros(length, dtype=np.int32), np.arange(1, length + 1))

    @classmethod
    def joined(cls, several: Sequence["RowKeys"]) -> "RowKeys":
        """Concatenate keys of the same files; they must have no numbers of examples."""
        if len(several) == 1:
            return several[0]
        files, numbers = ([getattr(keys, name) for keys in several] for name in ("files", "numbers"))
        return cls(several[0].names, np.concatenate(files), np.concatenate(numbers))

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.take(np.arange(len(self))[index])
        number = "" if self.examples is None else f"#{self.examples[index]}"
        return f"{self.source_key(index)}{number}"

    def __iter__(self) -> Iterator[str]:
        files, numbers = self.files.tolist(), self.numbers.tolist()
        keys = (f"{self.names[file]}:{number}" for file, number in zip(files, numbers, strict=True))
        if self.examples is None:
            return keys
        return (f"{key}#{number}" for key, number in zip(keys, self.examples.tolist(), strict=True))

    def source_key(self, index: int) -> str:
        """Return the key of the source row that a row was expanded from."""
        return f"{self.names[self.files[index]]}:{self.numbers[index]}"

    def sampling_key(self, index: int) -> str:
        """Return the key that seeds the sampling of a row's answer.

        The last example of a row has the same prompt as the row itself, so it has the row's key.
        """
        is_last = self.last is not None and bool(self.last[index])
        return self.source_key(index) if is_last else str(self[index])

    def location(self, index: int) -> tuple[str, int]:
        """Return file name and number of a row."""
        return self.names[self.files[index]], int(self.numbers[index])

    def take(self, indices: Indices) -> "RowKeys":
        """Return the keys at `indices`, in that order."""
        chosen = np.asarray(indices, dtype=np.int64)
        examples = None if self.examples is None else self.examples[chosen]
        last = None if self.last is None else self.last[chosen]
        return RowKeys(self.names, self.files[chosen], self.numbers[chosen], examples=examples, last=last)

    def digest(self) -> bytes:
        """Return a hash of all keys and their order."""
        examples = b"" if self.examples is None else self.examples.tobytes()
        return blake2b(
            "\0".join(self.names).encode() + self.files.tobytes() + self.numbers.tobytes() + examples
        ).digest()


class Store(Protocol):
    """Storage of rows: a file on disk, an Arrow table, a data frame."""

    def __len__(self) -> int:
        """Return the number of rows."""

    def read(self, indices: np.ndarray) -> list[dict[str, Any]]:
        """Return rows as new dictionaries, in the order of `indices`."""


class Rows:
    """Rows by index; selections are views that keep the keys of their rows."""

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
        """Select rows of a store.

        Args:
            store: Reads rows.
            columns: Column names, in the order of the source.
            keys: Key of each selected row.
            fingerprint: A hash that is the same in every run for the same content and order.
            bad: Rows of the source that could not be read.
            index: Index of each selected row in the store. Default: all rows.
        """
        self._store = store
        self._index = index
        self.columns = tuple(columns)
        """Column names, in the order of the source."""
        self.keys = keys
        """Key of each row."""
        self.fingerprint = fingerprint
        """A hash that is the same in every run for the same content and order."""
        self.bad = tuple(bad)
        """Rows of the source that could not be read; they have no index and are not part of selections."""

    def __len__(self) -> int:
        return len(self.keys)

    def key(self, index: int) -> str:
        """Return the key of a row, used in logs, journals and the quarantine."""
        return str(self.keys[index])

    def sampling_key(self, index: int) -> str:
        """Return the key that seeds the sampling of a row's answer."""
        return self.keys.sampling_key(index)

    def get(self, indices: Indices) -> list[dict[str, Any]]:
        """Return rows as new dictionaries, in the order of `indices`."""
        chosen = np.asarray(indices, dtype=np.int64)
        return self._store.read(chosen if self._index is None else self._index[chosen])

    def iterate(self) -> Iterator[list[dict[str, Any]]]:
        """Yield all rows, `CHUNK` at a time."""
        for first in range(0, len(self), CHUNK):
            yield self.get(np.arange(first, min(first + CHUNK, len(self))))

    def select(self, indices: Indices) -> "Rows":
        """Return a view of the rows at `indices`, in that order."""
        chosen = np.asarray(indices, dtype=np.int64)
        return Rows(
            self._store,
            columns=self.columns,
            keys=self.keys.take(chosen),
            fingerprint=digest(self.fingerprint, chosen.tobytes()),
            index=chosen if self._index is None else self._index[chosen],
        )

    def with_bad(self, bad: Sequence[BadRow]) -> "Rows":
        """Return the same rows, with `bad` as the unreadable ones."""
        return Rows(
            self._store,
            columns=self.columns,
            keys=self.keys,
            fingerprint=self.fingerprint,
            bad=bad,
            index=self._index,
        )


def is_digest(value: str) -> bool:
    """Return whether a text is a result of `digest`."""
    return DIGEST.fullmatch(value) is not None


def digest(*values: str | bytes | np.ndarray) -> str:
    """Return a short stable hash of `values`; the boundaries between them count."""
    state = blake2b(digest_size=16)
    for value in values:
        if isinstance(value, np.ndarray):
            data = value.data
        else:
            data = memoryview(value.encode() if isinstance(value, str) else value)
        state.update(data.nbytes.to_bytes(8, "little"))
        state.update(data)
    return state.hexdigest()


class ListStore:
    """Rows in a list of mappings."""

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, indices: np.ndarray) -> list[dict[str, Any]]:
        return [{str(name): value for name, value in self._rows[i].items()} for i in indices.tolist()]


class ColumnStore:
    """Rows in lists by column."""

    def __init__(self, columns: Mapping[str, Sequence[Any]]) -> None:
        self._columns = columns

    def __len__(self) -> int:
        return len(next(iter(self._columns.values()), ()))

    def read(self, indices: np.ndarray) -> list[dict[str, Any]]:
        return [{name: values[i] for name, values in self._columns.items()} for i in indices.tolist()]


class FrameStore:
    """Rows of a pandas data frame; missing values become None."""

    def __init__(self, frame: Any) -> None:
        self._frame = frame
        kinds = {column: str(kind).lower().partition("[")[0] for column, kind in frame.dtypes.items()}
        self._converters = {
            column: partial(same_text, kind=SHORT[kind]) for column, kind in kinds.items() if kind in SHORT
        }

    def __len__(self) -> int:
        return len(self._frame)

    def read(self, indices: np.ndarray) -> list[dict[str, Any]]:
        part = self._frame.iloc[indices]
        missing = part.isna().to_numpy()
        rows = part.to_dict("records")
        for index, column in zip(*missing.nonzero(), strict=True):
            rows[index][part.columns[column]] = None
        convert_rows(rows, self._converters)
        return [{str(name): value for name, value in row.items()} for row in rows]


class ArrowStore:
    """Rows of an Arrow table, which may have columns that `datasets` cannot represent."""

    def __init__(self, table: "pyarrow.Table") -> None:
        from datasets.table import InMemoryTable

        self._table = InMemoryTable(table)
        self._converters = converters(table.schema)

    def __len__(self) -> int:
        return len(self._table)

    def read(self, indices: np.ndarray) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self._table.fast_gather(indices).to_pylist() if len(indices) else []
        convert_rows(rows, self._converters)
        return rows


class DatasetStore:
    """Rows of a `datasets.Dataset`, usually Arrow memory-mapped from disk."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset.with_format(None)
        self._converters = converters(dataset.features.arrow_schema)

    def __len__(self) -> int:
        return len(self._dataset)

    def read(self, indices: np.ndarray) -> list[dict[str, Any]]:
        columns = self._dataset[indices.tolist()]
        rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        convert_rows(rows, self._converters)
        return rows


def hash_rows(store: Store, indices: np.ndarray | None = None) -> str:
    """Return a hash of the rows' content, or of the rows at `indices`; it is the same in every run."""
    state = blake2b(digest_size=16)
    chosen = np.arange(len(store)) if indices is None else indices
    for start in range(0, len(chosen), CHUNK):
        rows = store.read(chosen[start : start + CHUNK])
        content = json_or_none(rows)
        state.update(b"".join(map(row_bytes, rows)) if content is None else content)
    return state.hexdigest()


def json_or_none(value: Any) -> bytes | None:
    """Return a value as JSON; None if JSON cannot represent it, or it is nested too deeply for it."""
    try:
        return json.dumps(value, default=repr).encode()
    except (TypeError, ValueError, RecursionError):
        return None


def row_content(row: Mapping[str, Any]) -> bytes:
    """Return the content of a row for a hash."""
    content = json_or_none(row)
    return row_bytes(row) if content is None else content


def row_bytes(row: Any) -> bytes:
    """Return a row as text; for a row that is nested too deeply, or contains itself, its columns."""
    shown = list(row) if is_too_deep(row) else row
    return repr(shown).encode("utf-8", "surrogatepass")
