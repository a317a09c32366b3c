"""Dialogues as they end: a file that only grows while a simulation runs, and at its end one in the order of the tasks.

A line is a dialogue, and is written once that has ended: what a kill interrupts leaves nothing, and is had again. The
first line says what decides the dialogues; another file or model does not go on where this one was.
"""

import fcntl
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from partita.runs.files import writing
from partita.simulation.dialogue import Dialogue, from_line
from partita_schema.errors import ResumeError

SYNC_SECONDS = 2.0
"""Time after which lines are forced onto the disk."""


class Transcripts:
    """The dialogues of one history. A context manager; nobody else writes them meanwhile."""

    def __init__(self, folder: Path, history: str, *, decided_by: Mapping[str, str], fresh: bool = False) -> None:
        """`decided_by` is what decides the dialogues, by part. With `fresh` those that are there are forgotten.

        Raises ResumeError where they were decided by something else, or another process writes them.
        """
        self.path = folder / f"{history}.jsonl"
        """The dialogues in the order of their tasks, once all are there."""
        self.growing = folder / f".{history}.jsonl"
        self.decided_by, self.fresh = dict(decided_by), fresh
        self.done: dict[str, Dialogue] = {}
        """Dialogues that have ended, by key."""
        self.descriptor: int | None = None
        self.synced = time.monotonic()

    def __enter__(self) -> "Transcripts":
        with writing(self.path.parent):
            self.descriptor = os.open(self.growing, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self.descriptor)
            raise ResumeError(f"{self.path.parent} is in use by another process") from None
        try:
            self.read()
        except BaseException:
            os.close(self.descriptor)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self.descriptor is not None
        os.fsync(self.descriptor)
        os.close(self.descriptor)

    def read(self) -> None:
        """Take in what is there; a torn last line is cut off."""
        assert self.descriptor is not None
        if self.fresh:
            os.ftruncate(self.descriptor, 0)
        whole, _, torn = self.growing.read_bytes().rpartition(b"\n")
        if torn:
            os.ftruncate(self.descriptor, len(whole) + bool(whole))
        lines = [json.loads(line) for line in whole.splitlines()]
        if not lines:
            self.write({"decided_by": self.decided_by})
            return
        before = lines[0]["decided_by"]
        changed = [name for name in {**before, **self.decided_by} if before.get(name) != self.decided_by.get(name)]
        if changed:
            raise ResumeError(
                f"{self.path.parent} holds dialogues of another {', '.join(changed)}; write --fresh to begin anew, or "
                "--output for another folder"
            )
        self.done = {line["dialogue"]: from_line(line) for line in lines[1:]}

    def add(self, dialogue: Dialogue) -> None:
        """Keep a dialogue that has ended."""
        self.write(dialogue.line())
        self.done[dialogue.key] = dialogue

    def write(self, line: Mapping[str, Any]) -> None:
        assert self.descriptor is not None
        with writing(self.path.parent):
            os.write(self.descriptor, json.dumps(line, ensure_ascii=False).encode() + b"\n")
            if time.monotonic() - self.synced > SYNC_SECONDS:
                os.fsync(self.descriptor)
                self.synced = time.monotonic()

    def finish(self, keys: Sequence[str]) -> None:
        """Write all dialogues in this order, as one file."""
        write_lines(self.path, (self.done[key].line() for key in keys))


def write_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """A file of JSON lines that is there whole or not at all."""
    beside = path.with_name(f".{path.name}.writing")
    with writing(path.parent):
        with beside.open("w", encoding="utf8") as file:
            for line in lines:
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
