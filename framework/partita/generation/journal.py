"""The journal: answers are saved as they are made, so that a killed job loses at most the batch in flight.

The file is append-only JSON lines. The first line is a header with the number of rows and a fingerprint of
everything that determines an answer, by name (model, generation, prompt, data). One record per row follows, in the
order of completion. If a row has several records, the last one counts. Each line ends with a checksum: damaged
records are ignored, so that their rows are generated again. A torn last line is removed before appending.

Memory holds a few numbers per row, never its text: records are read from the file by their offset.
"""

import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from partita.data.rows import is_digest
from partita.generation.record import STATUSES, PredictionRecord, Status, json_line, read_record
from partita.outputs.base import clip
from partita.runs.files import append_whole, open_private, why_not_written
from partita.runs.locks import try_lock
from partita_schema.common.checksums import DamagedError, sealed_line, unsealed_line
from partita_schema.common.files import temporary_path
from partita_schema.errors import ResumeError, WriteError

logger = logging.getLogger(__name__)

VERSION = 1
SYNC_SECONDS = 2.0
"""Interval after which written records are flushed to disk."""

RECORDS_AT_ONCE = 1000
"""Records copied from another journal at a time."""

ABSENT = -1
ANY_ROWS = 2**63
"""More rows than any job has."""
MAX_ATTEMPTS = int(np.iinfo(np.int16).max)
"""The largest number of attempts that is kept."""


class Journal:
    """An open journal: for appending under an exclusive lock, or for reading.

    A context manager. Rows are numbered from 0 to `rows` - 1.
    """

    def __init__(self, path: Path, *, descriptor: int, rows: int, writable: bool) -> None:
        """Use `open` or `read_only` instead."""
        self.path = path
        self._descriptor: int | None = descriptor
        self._writable = writable
        self._size = 0
        self._synced = time.monotonic()
        self._offsets = np.full(rows, ABSENT, dtype=np.int64)
        self._lengths = np.zeros(rows, dtype=np.int32)
        self._statuses = np.full(rows, ABSENT, dtype=np.int8)
        self._attempts = np.zeros(rows, dtype=np.int16)

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        fingerprint: Mapping[str, str],
        keys: "npt.NDArray[np.uint8]",
        fresh: bool = False,
    ) -> "Journal":
        """Open or create the journal at `path`, lock it, and index its records.

        Args:
            path: The file.
            fingerprint: What determines an answer, by name.
            keys: Keys of the rows, [rows, 16]. Records with another key are ignored.
            fresh: Discard existing records.

        Raises:
            ResumeError: Another process writes the journal, the fingerprint differs, or the file is not a journal.
            WriteError: The file cannot be written, such as a symbolic link.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = open_private(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        except OSError as error:
            raise WriteError(why_not_written(error, path)) from error
        journal = cls(path, descriptor=descriptor, rows=len(keys), writable=True)
        try:
            _lock(descriptor, path)
            if not os.path.samestat(os.fstat(descriptor), path.stat()):  # another process has just replaced it
                raise _in_use(path)
            if fresh and path.stat().st_size:
                journal._replace(())
            header = _header(fingerprint, len(keys))
            try:
                has_header = journal._has_header(header)
            except DamagedError:
                journal._replace_header(header, keys)
                has_header = True
            if has_header:
                journal._index(keys)
            else:
                os.ftruncate(descriptor, 0)
                journal._write(sealed_line(json_line(header)))
                journal.sync()
        except BaseException:
            os.close(descriptor)
            raise
        return journal

    @classmethod
    def read_only(cls, path: Path, *, keys: "npt.NDArray[np.uint8] | None" = None) -> "Journal":
        """Open a journal for reading, without a lock.

        Args:
            path: The journal.
            keys: row_key of each row, [rows, 16]: records of other keys, such as other prompts of a row, are passed
                over. None reads the last record of each row.

        Raises:
            ResumeError: It is not a journal.
        """
        try:
            descriptor = open_private(path, os.O_RDONLY)
        except OSError as error:
            raise ResumeError(f"{path} cannot be read: {error.strerror}") from None
        try:
            header = _read_header(path)
            if header is None:
                raise ResumeError(f"{path} holds no answers yet")
            journal = cls(path, descriptor=descriptor, rows=header["rows"], writable=False)
            journal._index(keys)
        except DamagedError as error:
            os.close(descriptor)
            raise ResumeError(f"{path} {error}; run the same predict command again, which repairs it") from None
        except BaseException:
            os.close(descriptor)
            raise
        return journal

    def __enter__(self) -> "Journal":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._offsets)

    def done(self, *, retry_errors: bool = False) -> "npt.NDArray[np.bool_]":
        """Return which rows are done, [rows]; with `retry_errors`, rows with an error are not."""
        recorded: npt.NDArray[np.bool_] = self._statuses != ABSENT
        if retry_errors:
            recorded &= self._statuses != STATUSES.index("error")
        return recorded

    def count(self, status: Status) -> int:
        """Return the number of rows with this status."""
        return int((self._statuses == STATUSES.index(status)).sum())

    def all_attempts(self) -> "npt.NDArray[np.int16]":
        """Return how often each row was tried, [rows]."""
        return self._attempts.copy()

    def append(self, records: Sequence[PredictionRecord]) -> None:
        """Append records, all or none. Raise WriteError, for example on a full disk; earlier records are kept."""
        lines = [sealed_line(json_line(vars(record))) for record in records]
        start = self._size
        self._write(b"".join(lines))
        for record, line in zip(records, lines, strict=True):
            self._set_location(record.row, record.status, record.attempt, start, len(line))
            start += len(line)
        if time.monotonic() - self._synced > SYNC_SECONDS:
            self.sync()

    def absorb(self, path: Path, *, fingerprint: Mapping[str, str], keys: "npt.NDArray[np.uint8]") -> None:
        """Copy the records of another journal of this job, and delete it; one of another job is only deleted.

        Args:
            path: The other journal.
            fingerprint: What determines an answer of this job, by name.
            keys: Keys of the rows, [rows, 16]. Records with another key are ignored.

        Raises:
            ResumeError: Another process still writes it.
        """
        with os.fdopen(open_private(path, os.O_RDWR), "rb") as file:
            _lock(file.fileno(), path)
            own = _header(fingerprint, len(self))
            try:
                header = _read_header(path)
            except DamagedError:  # each record names its row
                header = own
            if header is not None and not _changes(header, own):
                damaged = 0
                lines = (line for offset, line in _lines(path) if offset)
                while some := list(islice(lines, RECORDS_AT_ONCE)):
                    records = [read_record(line, rows=len(self)) for line in some]
                    damaged += sum(
                        record is None and line.endswith(b"\n") for record, line in zip(records, some, strict=True)
                    )
                    self.append([record for record in records if record is not None and _is_of(record, keys)])
                self.sync()
                if damaged:
                    logger.warning("%s: %s damaged records; their rows count as not done", path, damaged)
            path.unlink()

    def record(self, row: int) -> PredictionRecord | None:
        """Return the last record of a row, or None."""
        if self._offsets[row] == ABSENT:
            return None
        assert self._descriptor is not None, "the journal is closed"
        line = os.pread(self._descriptor, int(self._lengths[row]), int(self._offsets[row]))
        record = read_record(line, rows=len(self))
        if record is None:
            raise ResumeError(f"{self.path} was damaged while it was in use; start the same command again")
        return record

    def sync(self) -> None:
        """Flush written records to disk."""
        assert self._descriptor is not None, "the journal is closed"
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise WriteError(_full(self.path, error)) from error
        self._synced = time.monotonic()

    def close(self) -> None:
        """Flush all records to disk and close the file."""
        if self._descriptor is None:
            return
        try:
            if self._writable:
                self.sync()
        finally:
            os.close(self._descriptor)
            self._descriptor = None

    def _has_header(self, own: Mapping[str, Any]) -> bool:
        """Return whether the file has a header of this job. A torn header counts as none: no record follows it."""
        header = _read_header(self.path)
        if header is None:
            if self.path.stat().st_size:
                logger.warning("%s: its first line is torn, so none of its answers are reused", self.path)
            return False
        changes = _changes(header, own)
        if changes:
            raise ResumeError(
                f"{self.path} holds answers of another job: {'; '.join(changes)}. Undo the change, write to another "
                "path, or start again with --fresh, which forgets these answers"
            )
        return True

    def _replace_header(self, own: Mapping[str, Any], keys: "npt.NDArray[np.uint8]") -> None:
        """Rewrite the file with a header of this job and the intact records of its rows."""
        records = ((line, read_record(line, rows=len(self))) for _, line in _lines(self.path))
        intact = (line for line, record in records if record is not None and _is_of(record, keys))
        num_records = self._replace(chain([sealed_line(json_line(own))], intact)) - 1
        logger.warning(
            "%s: its first line is damaged; %s records of this job are reused", self.path, f"{num_records:,}"
        )

    def _replace(self, lines: Iterable[bytes]) -> int:
        """Replace the file by a new one with these lines, and return their number.

        Results in this process that still read the old file keep it.
        """
        assert self._descriptor is not None
        temporary = temporary_path(self.path)
        try:
            temporary.unlink(missing_ok=True)
            with os.fdopen(open_private(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND), "wb") as file:
                written = sum(file.write(line) > 0 for line in lines)
                file.flush()
                os.fsync(file.fileno())
                _lock(file.fileno(), self.path)
                temporary.replace(self.path)
                # The same open file description, so the lock stays.
                os.dup2(file.fileno(), self._descriptor, inheritable=False)
        except OSError as error:
            raise WriteError(why_not_written(error, self.path)) from error
        return written

    def _index(self, keys: "npt.NDArray[np.uint8] | None") -> None:
        """Index the offset of every record, and truncate a torn last line if the journal is writable."""
        damaged = stale = 0
        for offset, line in _lines(self.path):
            if not line.endswith(b"\n"):
                break
            self._size = offset + len(line)
            if offset == 0:
                continue
            record = read_record(line, rows=len(self))
            if record is None:
                damaged += 1
            elif keys is not None and not _is_of(record, keys):
                stale += 1
            else:
                self._set_location(record.row, record.status, record.attempt, offset, len(line))
        if damaged or (stale and self._writable):
            logger.warning(
                "%s: %s damaged and %s outdated records; their rows count as not done", self.path, damaged, stale
            )
        if self._writable:
            assert self._descriptor is not None
            torn = os.fstat(self._descriptor).st_size - self._size
            if torn:
                logger.warning("%s: its torn end of %s bytes is cut off", self.path, f"{torn:,}")
            os.ftruncate(self._descriptor, self._size)

    def _set_location(self, row: int, status: Status, attempt: int, offset: int, length: int) -> None:
        self._offsets[row], self._lengths[row] = offset, length
        self._statuses[row] = STATUSES.index(status)
        self._attempts[row] = min(attempt, MAX_ATTEMPTS)

    def _write(self, data: bytes) -> None:
        """Append all of `data`, or nothing."""
        assert self._descriptor is not None, "the journal is closed"
        try:
            append_whole(self._descriptor, data)
        except OSError as error:
            raise WriteError(_full(self.path, error)) from error
        self._size += len(data)


def _lock(descriptor: int, path: Path) -> None:
    if not try_lock(descriptor, path):
        raise _in_use(path)


def _in_use(path: Path) -> ResumeError:
    return ResumeError(f"{path} is being written by another process; wait for it to end, or write to another path")


def _is_of(record: PredictionRecord, keys: "npt.NDArray[np.uint8]") -> bool:
    """Return whether a record belongs to the current row with its number."""
    return bool(bytes.fromhex(record.key) == keys[record.row].tobytes())


def _full(path: Path, error: OSError) -> str:
    return f"{why_not_written(error, path)}. The answers so far are saved; start the same command again afterwards"


def _header(fingerprint: Mapping[str, str], rows: int) -> dict[str, Any]:
    return {"journal": VERSION, "rows": rows, "fingerprint": dict(fingerprint)}


def _changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return the differences of two headers as text."""
    before, after = ({**header["fingerprint"], "rows": header["rows"]} for header in (old, new))
    names = [*after, *(name for name in before if name not in after)]
    return [
        f"{name} changed{_change(before.get(name), after.get(name))}"
        for name in names
        if before.get(name) != after.get(name)
    ]


def _change(old: Any, new: Any) -> str:
    """Return both values in parentheses; nothing for hashes, which say nothing to a reader."""
    if any(isinstance(value, str) and is_digest(value) for value in (old, new)):
        return ""
    return f" ({_format_value(old)} -> {_format_value(new)})"


def _format_value(value: Any) -> str:
    return "none" if value is None else clip(str(value), most=80).strip("'")


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield each line, including its end, with its offset."""
    offset = 0
    with os.fdopen(open_private(path, os.O_RDONLY), "rb") as file:
        for line in file:
            yield offset, line
            offset += len(line)


def _read_header(path: Path) -> dict[str, Any] | None:
    """Return the header; None if there is none or it is torn.

    Raises DamagedError if intact records follow a damaged header, and ResumeError if the file is not a journal.
    """
    line = next(_lines(path), (0, b""))[1]
    if not line:
        return None
    try:
        header = unsealed_line(line)
    except DamagedError:
        header = {}
    version = header.get("journal")
    if line.endswith(b"\n") and isinstance(version, int):
        if version > VERSION:
            raise ResumeError(f"{path} was written by a newer partita (journal {version}); update partita")
        return header
    start = f'{{"journal": {VERSION}'.encode()
    if not line.endswith(b"\n") and (line.startswith(start) or start.startswith(line)):
        return None
    if any(read_record(line, rows=ANY_ROWS) is not None for _, line in _lines(path)):
        raise DamagedError("has a damaged first line")
    raise ResumeError(
        f"{path} is not a journal of predictions; write to another path, or start again with --fresh, which replaces it"
    )
