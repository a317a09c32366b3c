"""Store rows of text formats as JSON in a temporary file.

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
from contextlib import suppress
from typing import Any, Self

import numpy as np

from partita_schema.errors import WriteError


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
        f"the rows cannot be kept in {folder}: {error.strerror}; make room, or set TMPDIR to another folder"
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
        places = zip(self._ends[indices].tolist(), self._ends[indices + 1].tolist(), strict=True)
        first, last = int(indices.min()), int(indices.max())
        if last - first >= len(indices):
            return [json.loads(self._bytes(start, end)) for start, end in places]
        begin = int(self._ends[first])
        together = self._bytes(begin, int(self._ends[last + 1]))
        return [json.loads(together[start - begin : end - begin]) for start, end in places]

    def _bytes(self, start: int, end: int) -> bytes:
        data = os.pread(self._descriptor, end - start, start)
        while len(data) < end - start and (
            more := os.pread(self._descriptor, end - start - len(data), start + len(data))
        ):
            data += more  # a single call returns at most 2 GB
        return data
