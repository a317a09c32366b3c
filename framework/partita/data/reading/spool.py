"""Rows of text formats as JSON lines in a temporary file that is memory mapped.

Each row stays the text that it was, so nothing is guessed about types: `007` is not 7, a date is not a timestamp, and
an object does not gain the keys of its neighbours, as happens in typed columns. The file has no name: nothing is left
behind, however the process ends. Memory holds twenty bytes a row.
"""

import json
import mmap
import tempfile
from array import array
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Self

import numpy as np

from partita_schema.errors import WriteError


class SpoolWriter:
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

    def finish(self) -> "Spool":
        """The rows, for reading; they stay when the writer is closed. Raises WriteError."""
        try:
            self._file.flush()
        except OSError as error:
            raise full(error) from error
        empty = self._ends[-1] == 0
        data = b"" if empty else mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
        return Spool(data, np.frombuffer(self._ends, dtype=np.int64))

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


class Spool:
    """Rows by index, parsed when they are asked for."""

    def __init__(self, data: Any, ends: np.ndarray) -> None:
        self._data = data
        self._ends = ends

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getstate__(self) -> dict[str, Any]:
        """A copy in another process holds the rows in its memory: the file has no name to open it by."""
        return {"_data": bytes(self._data), "_ends": self._ends}

    def read(self, indices: np.ndarray) -> list[dict[str, Any]]:
        return [json.loads(text) for text in self._texts(indices)]

    def _texts(self, indices: np.ndarray) -> Iterator[bytes]:
        for start, end in zip(self._ends[indices].tolist(), self._ends[indices + 1].tolist(), strict=True):
            yield self._data[start:end]
