"""Transcript files: an append-only file while a simulation runs, and at its end one in the order of the tasks.

A dialogue is written as one line when it ends. A dialogue interrupted by a kill leaves no line and is run again. The
first line holds hashes of everything that decides the dialogues; a simulation with another configuration or model does
not resume from the file. Each line ends with a checksum: the dialogue of a damaged line is run again.

With several processes each rank has a separate file, such as `.predicted.rank-3.jsonl` next to that of rank 0. A
simulation that starts, with any number of processes, first takes over the lines of all ranks.

Users correct answers in the final file and remove the checksums of these lines. A simulation that is resumed keeps
such lines. A file with lines that it cannot keep is copied before it is replaced.
"""

import logging
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import count, zip_longest
from pathlib import Path
from types import TracebackType
from typing import Any

from partita.data.episode import Episode, from_line
from partita.runs.files import append_whole, open_private, rank_path, rank_paths, writing
from partita.runs.locks import try_lock
from partita.runs.settings import differences
from partita_schema.common.checksums import DamagedError, sealed_line, unsealed_line
from partita_schema.common.files import replacing
from partita_schema.common.json_text import json_bytes
from partita_schema.common.text import counted, describe_error
from partita_schema.errors import ResumeError
from partita_trainers.process_group import SINGLE_PROCESS, ProcessGroup, main_process_first

logger = logging.getLogger(__name__)

SYNC_SECONDS = 2.0
"""Interval between calls of `fsync`."""
RUN_AGAIN = "their dialogues are run again"
"""What happens to damaged lines of an unfinished simulation."""


def changes_of(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Return what has changed, one line each: settings with both values, and names of parts that are hashes."""
    changed = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    lines = []
    for name in changed:
        old, new = before.get(name), after.get(name)
        if isinstance(old, dict | list) and isinstance(new, dict | list):
            lines += differences({name: old}, {name: new}, without=())
        else:
            lines.append(f"{name}: changed")
    return "".join(f"\n  {line}" for line in lines)


class Transcripts:
    """The dialogues of one history. A context manager that holds an exclusive lock on the file."""

    def __init__(
        self, folder: Path, history: str, *, decided_by: Mapping[str, Any], fresh: bool = False, rank: int = 0
    ) -> None:
        """Store the settings; the file is opened, locked and read on entering the context.

        Entering raises ResumeError if the dialogues in the file were decided by something else, or another process
        holds the lock.

        Args:
            folder: Folder of the transcripts.
            history: Name of the history, which names the file.
            decided_by: Everything that decides the dialogues, by name: settings, and hashes of what is no setting.
            fresh: Whether to discard existing dialogues.
            rank: Rank of this process.
        """
        self.path = folder / f"{history}.jsonl"
        """The final file: all dialogues in the order of their tasks."""
        self.partial_path = rank_path(folder / f".{history}.jsonl", rank)
        self.decided_by, self.fresh = dict(decided_by), fresh
        self.done: dict[str, Episode] = {}
        """Dialogues in this file, by key."""
        self.descriptor: int | None = None
        self.synced = time.monotonic()

    def __enter__(self) -> "Transcripts":
        with writing(self.path.parent):
            self.descriptor = open_private(self.partial_path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
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
        """Flush to disk and close the file, which releases the lock."""
        if self.descriptor is None:
            return
        descriptor, self.descriptor = self.descriptor, None
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def lock(self, descriptor: int) -> None:
        """Lock the file. Raises ResumeError if another process holds the lock."""
        if not try_lock(descriptor, self.path):
            raise ResumeError(f"{self.path.parent} is in use by another process")

    def read(self) -> None:
        """Read the existing dialogues and cut off a torn last line."""
        assert self.descriptor is not None
        if self.fresh:
            os.ftruncate(self.descriptor, 0)
        lines, size = read_undamaged_lines(self.partial_path, damaged=RUN_AGAIN)
        os.ftruncate(self.descriptor, size)
        if not size:
            self.write({"decided_by": self.decided_by})
            return
        before = lines[0].get("decided_by") if lines else None
        if not isinstance(before, dict):
            raise ResumeError(
                f"the first line of {self.partial_path} is damaged, so it is not known what decided its dialogues; "
                "write --fresh to start over, or --output for another folder"
            )
        if before != self.decided_by:
            raise ResumeError(
                f"{self.path.parent} holds dialogues with other settings:{changes_of(before, self.decided_by)}\nwrite "
                "--fresh to start again, or --output for another folder"
            )
        self.done = {line["dialogue"]: from_line(line) for line in lines[1:]}

    def absorb(self) -> None:
        """Move the dialogues of other ranks into this file and remove theirs. With `fresh` they are discarded.

        With `fresh`, a final file that a user has edited is renamed.
        Raises ResumeError if one of the ranks is still running.
        """
        if self.fresh:
            self.rename_edited()
        for left in rank_paths(self.partial_path):
            with left.open("rb") as file:
                self.lock(file.fileno())
                lines, _ = read_undamaged_lines(left, damaged=RUN_AGAIN)
                if lines and lines[0] == {"decided_by": self.decided_by} and not self.fresh:
                    # Some lines may be here already, if a kill came before the file was removed.
                    for line in lines[1:]:
                        here = self.done.get(line["dialogue"])
                        if here is None or here.status == "failed":
                            self.write(line)
                            self.done[line["dialogue"]] = from_line(line)
                self.sync()
                left.unlink()

    def add(self, episode: Episode) -> None:
        """Append a dialogue that has ended."""
        self.write(episode.line())
        self.done[episode.key] = episode

    @property
    def last_failure(self) -> str | None:
        """Reason of the last failed dialogue; None if none failed."""
        return next((done.reason for done in reversed(self.done.values()) if done.status == "failed"), None)

    def write(self, line: Mapping[str, Any]) -> None:
        assert self.descriptor is not None, "the transcripts are closed"
        with writing(self.path.parent):
            append_whole(self.descriptor, line_of(line))
        if time.monotonic() - self.synced > SYNC_SECONDS:
            self.sync()

    def sync(self) -> None:
        """Flush written lines to disk."""
        assert self.descriptor is not None, "the transcripts are closed"
        with writing(self.path.parent):
            os.fsync(self.descriptor)
        self.synced = time.monotonic()

    def finish(self, keys: Sequence[str]) -> list[Episode]:
        """Write the dialogues of all ranks to the final file in the order of `keys`, and return them.

        Lines of these dialogues that a user has edited stay as they are; those returned are without the edits. All
        other ranks must have closed their files.
        """
        self.fresh = False  # `fresh` applies to earlier dialogues, not to those of this simulation
        self.absorb()
        episodes = [self.done[key] for key in keys]
        edited = self.edited_lines({episode.key: episode for episode in episodes})

        def lines() -> Iterator[bytes]:
            return (edited.get(episode.key) or line_of(episode.line()) for episode in episodes)

        if not holds(self.path, lines()):
            write_file(self.path, lines())
        return episodes

    def edited_lines(self, episodes: Mapping[str, Episode]) -> dict[str, bytes]:
        """Return the edited lines of `episodes` in the final file, by key; copy the file if there are others."""
        edited, problems = dict[str, bytes](), list[str]()
        for number, line in unsealed_lines(self.path):
            try:
                episode = from_line(unsealed_line(line, required=False))
                if episode.key in edited or not is_same(episode, episodes.get(episode.key)):
                    raise ValueError(f"{episode.key} is there twice, not of this simulation, or has other messages")
                edited[episode.key] = line + b"\n"
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                reason = str(error) if isinstance(error, ValueError) else describe_error(error)
                problems.append(f"\n  line {number}: {reason}")
        if edited:
            logger.info("%s: %s kept", self.path, counted(len(edited), "edited line"))
        if problems:
            copy = free_path(self.path)
            with writing(self.path.parent):
                shutil.copyfile(self.path, copy)
            logger.warning(
                "%s: %s not kept; the file as it was is %s: correct these lines there and copy them back:%s",
                *(self.path, counted(len(problems), "edited or damaged line"), copy, "".join(problems)),
            )
        return edited

    def rename_edited(self) -> None:
        """Rename the final file if a user has edited it, so that it is not replaced."""
        edited = sum(1 for _ in unsealed_lines(self.path))
        if edited:
            copy = free_path(self.path)
            with writing(self.path.parent):
                self.path.rename(copy)
            lines = counted(edited, "edited or damaged line")
            logger.warning("%s: the new simulation does not use its %s; the file is now %s", self.path, lines, copy)


@contextmanager
def open_transcripts(
    folder: Path,
    history: str,
    *,
    decided_by: Mapping[str, Any],
    fresh: bool = False,
    process_group: ProcessGroup = SINGLE_PROCESS,
    kind: type[Transcripts] = Transcripts,
) -> Iterator[Transcripts]:
    """Open the transcripts of this process. Rank 0 first takes over the dialogues of all earlier ranks.

    Args:
        folder: Folder of the transcripts.
        history: Name of the history.
        decided_by: Everything that decides the dialogues, by name: settings, and hashes of what is no setting.
        fresh: Whether to discard existing dialogues.
        process_group: Processes that run the simulation.
        kind: Class of the transcripts.

    Raises:
        ResumeError: As for `Transcripts`.
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


def discard(folder: Path, history: str) -> None:
    """Discard the unfinished dialogues of a history. Raises ResumeError if a process is writing them."""
    with Transcripts(folder, history, decided_by={}, fresh=True) as transcripts:
        transcripts.absorb()
        transcripts.partial_path.unlink()


def read_undamaged_lines(path: Path, *, damaged: str, edited: bool = False) -> tuple[list[dict[str, Any]], int]:
    """Return the undamaged lines of a file, and its size in bytes without a torn last line.

    Args:
        path: The file.
        damaged: What happens to damaged lines, for the warning.
        edited: Whether a user may have edited lines, whose checksums are removed.
    """
    whole, newline, torn = path.read_bytes().rpartition(b"\n")
    if torn:
        logger.warning("%s: its last line is not complete, so its %s bytes are ignored", path, f"{len(torn):,}")
    written = whole.split(b"\n") if newline else []
    lines = list[dict[str, Any]]()
    for line in written:
        with suppress(DamagedError):
            lines.append(unsealed_line(line, required=not edited))
    if len(lines) < len(written):
        logger.warning("%s: %s; %s", path, counted(len(written) - len(lines), "damaged line"), damaged)
    return lines, len(whole) + len(newline)


def line_of(value: Mapping[str, Any]) -> bytes:
    """Encode a line of a transcript file, with its checksum."""
    return sealed_line(json_bytes(value))


def write_file(path: Path, lines: Iterable[bytes]) -> None:
    """Write a file of lines atomically."""
    with writing(path.parent), replacing(path) as file:
        file.writelines(lines)


def holds(path: Path, lines: Iterable[bytes]) -> bool:
    """Return whether a file exists and holds exactly these lines."""
    if not path.exists():
        return False
    with path.open("rb") as file:
        return all(one == other for one, other in zip_longest(file, lines))


def unsealed_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file, with their numbers, that have no valid checksum: those that a user has edited."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                unsealed_line(line.rstrip())
            except DamagedError:
                if line.strip():
                    yield number, line.rstrip()


def is_same(edited: Episode, episode: Episode | None) -> bool:
    """Return whether an edited line is of a dialogue: it has its seed, and its messages up to corrections."""
    return episode is not None and [edited.seed, *texts_of(edited)] == [episode.seed, *texts_of(episode)]


def texts_of(episode: Episode) -> list[tuple[str, str]]:
    """Return the role and text of each message."""
    return [(message["role"], message["content"]) for message in episode.messages]


def free_path(path: Path) -> Path:
    """Return the first unused name for a copy of an edited file: `predicted.jsonl.edited-1`, `-2` and so on."""
    names = (path.with_name(f"{path.name}.edited-{number}") for number in count(1))
    return next(name for name in names if not name.exists())
