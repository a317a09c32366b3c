"""Dialogues as they end: a file that only grows while a simulation runs, and at its end one in the order of the tasks.

A line is a dialogue, and is written once that has ended: what a kill interrupts leaves nothing, and is had again. The
first line says what decides the dialogues; another file or model does not go on where this one was. Each line ends with
a checksum: a damaged line counts as absent, and its dialogue is run again.

Of several processes each has a file of its own, `.predicted.rank-3.jsonl` beside that of rank 0. Whenever a simulation
is started, by whatever number of processes, what all of them have left is taken over first.
"""

import fcntl
import json
import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from partita.data.episode import Episode, from_line
from partita.runs.files import open_private, writing
from partita_schema.counted import counted
from partita_schema.errors import ResumeError
from partita_schema.sealed import DamagedError, sealed_line, unsealed_line
from partita_trainers.process_group import SINGLE_PROCESS, ProcessGroup, main_process_first

logger = logging.getLogger(__name__)

SYNC_SECONDS = 2.0
"""Time after which lines are forced onto the disk."""


class Transcripts:
    """The dialogues of one history. A context manager; nobody else writes them meanwhile."""

    def __init__(
        self, folder: Path, history: str, *, decided_by: Mapping[str, str], fresh: bool = False, rank: int = 0
    ) -> None:
        """`decided_by` is what decides the dialogues, by part. With `fresh` those that are there are forgotten.

        Raises ResumeError where they were decided by something else, or another process writes them.
        """
        self.path = folder / f"{history}.jsonl"
        """The dialogues in the order of their tasks, once all are there."""
        self.growing = folder / (f".{history}.rank-{rank}.jsonl" if rank else f".{history}.jsonl")
        self.decided_by, self.fresh = dict(decided_by), fresh
        self.done: dict[str, Episode] = {}
        """Dialogues that have ended and stand in this file, by key."""
        self.descriptor: int | None = None
        self.synced = time.monotonic()

    def __enter__(self) -> "Transcripts":
        with writing(self.path.parent):
            self.descriptor = open_private(self.growing, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        try:
            self.lock(self.descriptor)
            self.read()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Force everything onto the disk and let go of the file."""
        if self.descriptor is None:
            return
        descriptor, self.descriptor = self.descriptor, None
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def lock(self, descriptor: int) -> None:
        """Raises ResumeError where another process has it."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ResumeError(f"{self.path.parent} is in use by another process") from None

    def read(self) -> None:
        """Take in what is there; a torn last line is cut off."""
        assert self.descriptor is not None
        if self.fresh:
            os.ftruncate(self.descriptor, 0)
        lines, size = whole_lines(self.growing)
        os.ftruncate(self.descriptor, size)
        if not size:
            self.write({"decided_by": self.decided_by})
            return
        before = lines[0].get("decided_by") if lines else None
        if not isinstance(before, dict):
            raise ResumeError(
                f"the first line of {self.growing} is damaged, so it is not known what decided its dialogues; write "
                "--fresh to start over, or --output for another folder"
            )
        changed = [name for name in {**before, **self.decided_by} if before.get(name) != self.decided_by.get(name)]
        if changed:
            raise ResumeError(
                f"{self.path.parent} holds dialogues of another {', '.join(changed)}; write --fresh to start again, or "
                "--output for another folder"
            )
        self.done = {line["dialogue"]: from_line(line) for line in lines[1:]}

    def absorb(self) -> None:
        """Take over what other ranks keep of these dialogues, and remove their files. With `fresh` they are forgotten.

        Raises ResumeError where one of them is still at work.
        """
        for left in rank_files(self.growing):
            with left.open("rb") as file:
                self.lock(file.fileno())
                lines, _ = whole_lines(left)
                if lines and lines[0] == {"decided_by": self.decided_by} and not self.fresh:
                    # Some may stand here already: a kill has come before the file was removed.
                    for line in (line for line in lines[1:] if line["dialogue"] not in self.done):
                        self.write(line)
                        self.done[line["dialogue"]] = from_line(line)
                self.sync()
                left.unlink()

    def add(self, episode: Episode) -> None:
        """Keep a dialogue that has ended."""
        self.write(episode.line())
        self.done[episode.key] = episode

    @property
    def last_failure(self) -> str | None:
        """Why the last of the dialogues failed that did; None where none did."""
        return next((done.reason for done in reversed(self.done.values()) if done.status == "failed"), None)

    def write(self, line: Mapping[str, Any]) -> None:
        assert self.descriptor is not None, "the transcripts are closed"
        with writing(self.path.parent):
            os.write(self.descriptor, line_of(line))
        if time.monotonic() - self.synced > SYNC_SECONDS:
            self.sync()

    def sync(self) -> None:
        """Force what was written onto the disk."""
        assert self.descriptor is not None, "the transcripts are closed"
        with writing(self.path.parent):
            os.fsync(self.descriptor)
        self.synced = time.monotonic()

    def finish(self, keys: Sequence[str]) -> list[Episode]:
        """The dialogues in this order, of all ranks, which have closed theirs; and write them so, as one file."""
        self.fresh = False  # what ranks have kept since the start is not forgotten
        self.absorb()
        found = [self.done[key] for key in keys]
        write_lines(self.path, (dialogue.line() for dialogue in found))
        return found


@contextmanager
def open_transcripts(
    folder: Path,
    history: str,
    *,
    decided_by: Mapping[str, str],
    fresh: bool = False,
    process_group: ProcessGroup = SINGLE_PROCESS,
    kind: type[Transcripts] = Transcripts,
) -> Iterator[Transcripts]:
    """The transcripts of this process. Those of rank 0 hold what was had before, by whatever number of processes.

    Raises as `Transcripts` does.
    """
    own: Transcripts | None = None
    try:
        with main_process_first(process_group, "opening the transcripts"):
            own = kind(
                folder, history, decided_by=decided_by, fresh=fresh or process_group.rank > 0, rank=process_group.rank
            )
            own.__enter__()
            if process_group.rank == 0:
                own.absorb()
        yield own
    finally:
        if own is not None:
            own.close()


def forget(folder: Path, history: str) -> None:
    """Nothing was had in this folder. Raises ResumeError where a process is at it."""
    with Transcripts(folder, history, decided_by={}, fresh=True) as transcripts:
        transcripts.absorb()
        transcripts.growing.unlink()


def rank_files(growing: Path) -> list[Path]:
    """Files beside the one of rank 0 in which other ranks keep dialogues."""
    return sorted(growing.parent.glob(f"{growing.stem}.rank-*{growing.suffix}"))


def whole_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The lines of a file without damaged ones, and the size in bytes of all but a torn last one."""
    whole, newline, torn = path.read_bytes().rpartition(b"\n")
    if torn:
        logger.warning("%s: its torn end of %s bytes is cut off", path, f"{len(torn):,}")
    written = whole.split(b"\n") if newline else []
    found = list[dict[str, Any]]()
    for line in written:
        with suppress(DamagedError):
            found.append(unsealed_line(line))
    if len(found) < len(written):
        damaged = len(written) - len(found)
        logger.warning("%s: %s; their dialogues are run again", path, counted(damaged, "damaged line"))
    return found, len(whole) + len(newline)


def line_of(value: Mapping[str, Any]) -> bytes:
    """A line of a file of dialogues, with its checksum."""
    return sealed_line(json.dumps(value, ensure_ascii=False).encode())


def write_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """A file of JSON lines that is there whole or not at all."""
    beside = path.with_name(f".{path.name}.writing")
    with writing(path.parent):
        with beside.open("wb") as file:
            for line in lines:
                file.write(line_of(line))
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
