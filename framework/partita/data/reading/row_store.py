"""Rows of text formats as JSON in a temporary file.

Each row stays the text that it was, so nothing is guessed about types: `007` is not 7, a date is not a timestamp, and
an object does not gain the keys of its neighbours, as happens in typed columns. The file has no name: nothing is left
behind, however the process ends. Memory holds twenty bytes a row: the file is read and not mapped, because pages that
are mapped count as the process's own, which a job's limit on memory may hold against it.
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
    """Takes rows one after the other, then becomes a Spool."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="partita-")  # noqa: SIM115 - closed by __exit__
        self._ends = array("q", [0])
        self.numbers = array("q")
        """Number of each row in its file."""
        self.files = array("i")
        """Place of each row's file in the list of files."""

    def add(self, row: bytes, *, file: int, number: int) -> None:
        """Keep a row, a JSON object in UTF-8. Raises WriteError."""
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
        """The rows, for reading; they stay when the writer is closed. Raises WriteError."""
        try:
            self._file.flush()
        except OSError as error:
            raise full(error) from error
        return RowStore(os.dup(self._file.fileno()), np.frombuffer(self._ends, dtype=np.int64))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # Closing writes what is buffered, which fails again where writing failed before.
        with suppress(OSError):
            self._file.close()


def full(error: OSError) -> WriteError:
    """The error of a disk that takes no more rows."""
    folder = tempfile.gettempdir()
    return WriteError(
        f"the rows cannot be kept in {folder}: {error.strerror}; make room, or set TMPDIR to another folder"
    )


class RowStore:
    """Rows by index, parsed when they are asked for."""

    def __init__(self, descriptor: int, ends: np.ndarray) -> None:
        """The rows stand one behind the other in the file, up to their `ends` [rows + 1]; it is closed with this."""
        self._descriptor, self._ends = descriptor, ends
        weakref.finalize(self, os.close, descriptor)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getstate__(self) -> dict[str, Any]:
        """A copy in another process has a file of its own: this one has no name to open it by."""
        return {"data": self._bytes(0, int(self._ends[-1])), "ends": self._ends}

    def __setstate__(self, state: dict[str, Any]) -> None:
        with tempfile.TemporaryFile(prefix="partita-") as file:
            file.write(state["data"])
            file.flush()
            self.__init__(os.dup(file.fileno()), state["ends"])  # type: ignore[misc]  # made as any other

    def read(self, indices: np.ndarray) -> list[dict[str, Any]]:
        """Rows in the order asked for; neighbours are read at once."""
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
        found = os.pread(self._descriptor, end - start, start)
        while len(found) < end - start and (
            more := os.pread(self._descriptor, end - start - len(found), start + len(found))
        ):
            found += more  # a single call gives 2 GB at most
        return found
