"""Read text files as rows by index: they are read once, and stored on disk as JSON text in a temporary file.

Each row keeps its text, so no types are guessed: `007` is not 7, a date is not a timestamp, and an object does not get
the keys of its neighbors, as happens in typed columns. The file has no name, so it disappears however the process ends.
Memory holds twenty bytes per row. The file is read and not mapped, because mapped pages count as the process's memory,
which a job's memory limit may include.
"""

import json
import os
import tempfile
import weakref
from array import array
from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import Any, Self

import numpy as np

from partita.data.formats.base import FileOptions, Reader, SourceRecord, opened
from partita.data.rows import BadRow, RowKeys, Rows, digest
from partita_schema.errors import DataError, WriteError


class RowStoreWriter:
    """Append rows one by one, then return them as a RowStore."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="partita-")  # noqa: SIM115 - closed by __exit__
        self._ends = array("q", [0])
        self.numbers = array("q")
        """Number of each row in its file."""
        self.files = array("i")
        """Index of each row's file in the list of files."""

    def add(self, row: bytes, *, file: int, number: int) -> None:
        """Append a row, a JSON object in UTF-8. Raise WriteError if the disk is full."""
        try:
            self._file.write(row)
        except OSError as error:
            raise full(error) from error
        self._ends.append(self._ends[-1] + len(row))
        self.numbers.append(number)
        self.files.append(file)

    def __len__(self) -> int:
        return len(self.numbers)

    def finish(self) -> "RowStore":
        """Return the rows for reading; they remain when the writer is closed. Raise WriteError if the disk is full."""
        try:
            self._file.flush()
        except OSError as error:
            raise full(error) from error
        return RowStore(os.dup(self._file.fileno()), np.frombuffer(self._ends, dtype=np.int64))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # Closing flushes the buffer, which fails again if writing failed before.
        with suppress(OSError):
            self._file.close()


def full(error: OSError) -> WriteError:
    """Return the error for a full disk."""
    folder = tempfile.gettempdir()
    return WriteError(
        f"the rows cannot be stored in {folder}: {error.strerror}; make room, or set TMPDIR to another folder"
    )


class RowStore:
    """Rows by index, parsed when they are read."""

    def __init__(self, descriptor: int, ends: np.ndarray) -> None:
        """Read rows concatenated in a file, row i ending at `ends[i + 1]`; the file is closed with this object."""
        self._descriptor, self._ends = descriptor, ends
        weakref.finalize(self, os.close, descriptor)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getstate__(self) -> dict[str, Any]:
        """Include the data: another process cannot open the file, which has no name."""
        return {"data": self._bytes(0, int(self._ends[-1])), "ends": self._ends}

    def __setstate__(self, state: dict[str, Any]) -> None:
        with tempfile.TemporaryFile(prefix="partita-") as file:
            file.write(state["data"])
            file.flush()
            self.__init__(os.dup(file.fileno()), state["ends"])  # type: ignore[misc]  # initialized like any other

    def read(self, indices: np.ndarray) -> list[dict[str, Any]]:
        """Return rows in the order of `indices`; adjacent rows are read in one call."""
        if not len(indices):
            return []
        ranges = zip(self._ends[indices].tolist(), self._ends[indices + 1].tolist(), strict=True)
        first, last = int(indices.min()), int(indices.max())
        if last - first >= len(indices):
            return [json.loads(self._bytes(start, end)) for start, end in ranges]
        begin = int(self._ends[first])
        together = self._bytes(begin, int(self._ends[last + 1]))
        return [json.loads(together[start - begin : end - begin]) for start, end in ranges]

    def _bytes(self, start: int, end: int) -> bytes:
        data = os.pread(self._descriptor, end - start, start)
        while len(data) < end - start and (
            more := os.pread(self._descriptor, end - start - len(data), start + len(data))
        ):
            data += more  # a single call returns at most 2 GB
        return data


BROKEN_START = 1000
"""A file is rejected if its first rows, this many, are all malformed."""
MOSTLY_BROKEN = 100_000
"""A file or a stream is rejected if this many rows are malformed, and more than are good."""


def open_text(
    read: Reader, paths: Sequence[str], names: Sequence[str], *, max_row_bytes: int, options: FileOptions
) -> Rows:
    """Return the rows of all files of a text format.

    Args:
        read: Reads a file.
        paths: Paths or URLs.
        names: Name of each file in keys.
        max_row_bytes: Maximum size of a row in bytes.
        options: How the files are written.

    Raises:
        DataError: If a file cannot be read, or no row is good.
    """
    with RowStoreWriter() as spool:
        reader = FileReader(read, spool, max_row_bytes=max_row_bytes, options=options)
        hashes = [reader.read(path, name, index) for index, (path, name) in enumerate(zip(paths, names, strict=True))]
        if not len(spool):
            first = next(iter(reader.bad), None)
            what = f"has no good row: {first.key}: {first.reason}" if first is not None else "has no rows"
            raise DataError(f"{', '.join(names[:3])}{' ...' if len(names) > 3 else ''} {what}")
        keys = RowKeys(names, np.array(spool.files), np.array(spool.numbers))
        store = spool.finish()
    content = digest(*names, *hashes)
    return Rows(store, columns=list(reader.columns), keys=keys, fingerprint=content, bad=reader.bad)


class FileReader:
    """Copy rows of files to a row store, and collect the bad ones."""

    def __init__(self, read: Reader, spool: RowStoreWriter, *, max_row_bytes: int, options: FileOptions) -> None:
        """Read files into a row store.

        Args:
            read: Reads a file.
            spool: Takes the rows.
            max_row_bytes: Maximum size of a row in bytes.
            options: How the files are written.
        """
        self._read = read
        self._options = options
        self._spool = spool
        self._max_row_bytes = max_row_bytes
        self.columns: dict[str, None] = {}
        """Column names of all rows, in order of first occurrence."""
        self.bad: list[BadRow] = []
        """Rows that could not be read."""

    def read(self, path: str, name: str, number: int) -> str:
        """Read file `number` of the list; return a hash of its content. Raise DataError if it is unreadable."""
        state = blake2b(digest_size=16)
        good_before, bad_before = len(self._spool), len(self.bad)
        known: tuple[str, ...] = ()
        with opened(path, name, options=self._options) as stream:
            for record in self._read(stream, name, self._max_row_bytes):
                if record.reason:
                    key = f"{name}:{record.number}"
                    self.bad.append(
                        BadRow(key, name, record.number, record.reason, record.raw, num_before=len(self._spool))
                    )
                    state.update(f"{record.number}{record.raw}".encode())
                    check_share(name, len(self.bad) - bad_before, len(self._spool) - good_before, record)
                    continue
                self._spool.add(record.row, file=number, number=record.number)
                state.update(record.row)
                if record.columns != known:
                    known = record.columns
                    self.columns.update(dict.fromkeys(known))
        return state.hexdigest()


def check_share(name: str, num_bad: int, num_good: int, last: SourceRecord) -> None:
    """Raise DataError for a file that is malformed as a whole.

    Args:
        name: Name of the file.
        num_bad: Number of malformed rows so far.
        num_good: Number of good rows so far.
        last: The last malformed row.
    """
    if num_bad == BROKEN_START and not num_good:
        raise DataError(f"{name}: the first {BROKEN_START:,} rows are broken; {last.reason}")
    if is_mostly_broken(num_bad, num_good):
        raise DataError(
            f"{name}: {num_bad:,} of the first {num_bad + num_good:,} rows are broken; the last one is in line "
            f"{last.number:,}: {last.reason}; repair the file or leave it out"
        )


def is_mostly_broken(num_bad: int, num_good: int) -> bool:
    """Return whether many rows are malformed, and more than are good, so that the rest is not read."""
    return num_bad >= MOSTLY_BROKEN and num_bad > num_good
