"""Read text files as rows by index: they are read once, and stored on disk as JSON text (row_store.py)."""

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from partita.data.rows import BadRow, RowKeys, Rows, digest
from partita.data.sources.opened import opened
from partita.data.sources.readers import READERS
from partita.data.sources.records import SourceRecord
from partita.data.sources.row_store import RowStoreWriter
from partita_schema.errors import DataError

BROKEN_START = 1000
"""A file is rejected if its first rows, this many, are all malformed."""
MOSTLY_BROKEN = 100_000
"""A file or a stream is rejected if this many rows are malformed, and more than are good."""


def open_text(kind: str, paths: Sequence[str], names: Sequence[str], *, max_row_bytes: int) -> Rows:
    """Return the rows of all files of a text format.

    Args:
        kind: Format of the files.
        paths: Paths or URLs.
        names: Name of each file in keys.
        max_row_bytes: Maximum size of a row in bytes.

    Raises:
        DataError: If a file cannot be read, or no row is good.
    """
    with RowStoreWriter() as spool:
        reader = FileReader(kind, spool, max_row_bytes=max_row_bytes)
        hashes = [reader.read(path, name, place) for place, (path, name) in enumerate(zip(paths, names, strict=True))]
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

    def __init__(self, kind: str, spool: RowStoreWriter, *, max_row_bytes: int) -> None:
        self._kind = kind
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
        with opened(path, name) as stream:
            for record in READERS[self._kind](stream, name, self._max_row_bytes):
                if record.reason:
                    key = f"{name}:{record.number}"
                    place = len(self._spool)
                    self.bad.append(BadRow(key, name, record.number, record.reason, record.raw, place=place))
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
