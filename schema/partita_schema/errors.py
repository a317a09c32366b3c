"""All errors that partita raises on purpose. They are exported by `partita`."""

import linecache
import re
import sysconfig
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import ClassVar

from partita_schema.common.text import counted


class PartitaError(Exception):
    """Base class of all errors that partita raises on purpose.

    The text says what was found, where, and what to write instead. Raised directly if no subclass fits, such as for a
    folder that contains no run. All subclasses:

        PartitaError             base class; invalid input: exit status 2
          ConfigError            the configuration is invalid: all its problems at once
          DataError              rows are invalid, or cannot be read
            NothingToLearnError  transcripts contain no dialogue to train on
            NoUsableRowsError    no row of a split can be used
            RowError             one row is invalid: the reason in quarantine.jsonl
              RewrittenError     the chat template changes earlier turns of a row
          ModelError             the model cannot be loaded, or does not fit the configuration
          ResumeError            saved state does not fit the run
          JobError               the job failed with valid configuration and data: exit status 1
            OtherRankError       another process of the job failed
              LostRankError      another process exited, or does not respond
            DataWorkerError      a process that prepares rows died, or does not respond
            ExportError          an export does not answer as its model does, or another program failed to write it
            OutOfMemory          a single row does not fit in device memory
            ServerError          a server that answers rows cannot be reached, or fails one row after another
            SimulationError      a simulation cannot continue
            TrainingError        training cannot continue
              DivergenceError    the loss or the gradients are not finite
              OutOfStepError     fatal on this rank under `sharding: full`
            WriteError           results cannot be written, for example because the disk is full
    """

    exit_status: ClassVar[int] = 2
    """Exit status of a command that ends with this error: 2 for invalid input, 1 for a failed job."""

    def _render_traceback_(self) -> list[str]:
        """Return what IPython and notebooks print: the message, and the lines of the user's own code.

        The frames of partita say nothing about a mistake in a file or in the data. `%debug` still shows them.
        """
        places = [place_of(frame, line) for frame, line in traceback.walk_tb(self.__traceback__) if is_own(frame)]
        return [f"{type(self).__name__}: {self}", *places]


def is_own(frame: FrameType) -> bool:
    """Return whether a frame runs code of the user, not of partita or another package."""
    package = str(frame.f_globals.get("__name__")).partition(".")[0]
    others = ("site-packages", "<frozen ", sysconfig.get_path("stdlib"))
    installed = any(folder in frame.f_code.co_filename for folder in others)
    return package not in ("partita", "partita_trainers", "partita_schema") and not installed


def place_of(frame: FrameType, line: int) -> str:
    """Return the line of a frame for a message."""
    text = linecache.getline(frame.f_code.co_filename, line).strip()
    return f"  in line {line} of {file_name(frame)}: {text}".removesuffix(": ")


def file_name(frame: FrameType) -> str:
    """Return the name of a frame's file for a message. The files of notebook cells have no meaningful names."""
    name = frame.f_code.co_filename
    return "the cell" if frame.f_globals.get("__name__") == "__main__" and "ipykernel" in name else Path(name).name


def raised_at(error: BaseException) -> str:
    """Return where the user's code raised an error, such as ` (guest.py, line 12)`.

    That is its innermost line. Empty if the error comes from other code only.
    """
    own = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__) if is_own(frame)]
    if not own:
        return ""
    frame, line = own[-1]
    return f" ({file_name(frame)}, line {line})"


def exit_call(error: SystemExit) -> str:
    """Return the call that raised an error, such as `sys.exit(3)`."""
    return f"sys.exit({'' if error.code is None else shortened(repr(error.code))})"


MAX_PATH = 200
"""Maximum number of characters of a key in an error text."""
MAX_MESSAGE = 2000
"""Maximum number of characters of a message in an error text. Messages may quote user input."""
MAX_SHOWN = 50
"""Maximum number of problems that the text of an error lists. The others are counted."""


@dataclass(frozen=True)
class Problem:
    """One problem of a configuration file."""

    path: str
    """Keys from the top, joined by dots, with list indices in brackets: `output_features[0].type`. Empty for the
    file."""
    message: str
    """What is wrong, and what to write instead."""
    file: str | None = None
    """Name of the file, or None if the configuration did not come from a file."""
    line: int | None = None
    """Line number, from 1."""
    column: int | None = None
    """Column number, from 1."""

    def __str__(self) -> str:
        location = ":".join(str(part) for part in (self.file, self.line, self.column) if part is not None)
        parts = location, shortened(self.path, MAX_PATH), shortened(self.message, MAX_MESSAGE)
        return ": ".join(part for part in parts if part)


def shortened(text: str, length: int = 60) -> str:
    """Return a text cut to at most `length` characters, with an ellipsis if it was longer."""
    return text if len(text) <= length else f"{text[: length - 3]}..."


class ConfigError(PartitaError):
    """The configuration is invalid. `problems` has every problem in file order; the text shows the first 50."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        lines = [str(problem) for problem in problems[:MAX_SHOWN]]
        if len(problems) > MAX_SHOWN:
            lines.append(f"... and {counted(len(problems) - MAX_SHOWN, 'more mistake')}")
        super().__init__("\n".join(lines))
        self.problems = tuple(problems)
        """Every problem, in file order."""

    def __reduce__(self) -> "tuple[type[ConfigError], tuple[tuple[Problem, ...]]]":
        return type(self), (self.problems,)


class DataError(PartitaError):
    """Rows are invalid, or a data file cannot be read."""


class NothingToLearnError(DataError):
    """No dialogue of the transcripts can be used for training."""


class NoUsableRowsError(DataError):
    """No row of a split can be used."""

    def __init__(self, message: str, *, unknown_labels: bool = False) -> None:
        """Create the error; `unknown_labels` says that no row has a label of the training rows."""
        super().__init__(message)
        self.unknown_labels = unknown_labels


class RowError(DataError):
    """One row is invalid. The text is the reason in quarantine.jsonl."""


class RewrittenError(RowError):
    """The chat template changes earlier turns as the dialogue grows."""


class ModelError(PartitaError):
    """The model cannot be loaded, or does not fit the configuration."""


class ResumeError(PartitaError):
    """Saved state does not fit the run that would resume from it."""


class JobError(PartitaError):
    """The job failed, although the configuration and the data are valid."""

    exit_status = 1
    """1: the job failed."""


class OtherRankError(JobError):
    """Another process of the job failed, and this one stopped because of it. The other process reports the reason."""


class LostRankError(OtherRankError):
    """Communication with another process failed: it exited, does not respond, or cannot be reached."""

    @classmethod
    def during(cls, operation: str, error: Exception) -> "LostRankError":
        """Return the error for a collective operation that failed with `error`."""
        reason = re.sub(r"^\[\S+\.cc:\d+\] ", "", str(error)).partition(". This is typically caused by")[0]
        return cls(f"another process of the job is gone, or does not answer, at {operation}: {reason}")


class DataWorkerError(JobError):
    """A process that prepares rows (`data.loader.workers`) died, or does not respond."""


class ExportError(JobError):
    """An export does not answer as its model does, or the program that writes it failed."""


class OutOfMemory(JobError):  # noqa: N818 -- OutOfMemoryError is what torch raises, of a batch
    """A single row does not fit in the memory of the device."""


class ServerError(JobError):
    """The server of an endpoint cannot be reached, or fails one row after another."""


class SimulationError(JobError):
    """A simulation cannot continue."""


class TrainingError(JobError):
    """Training cannot continue."""

    def __init__(self, reason: str, advice: str = "") -> None:
        """Store what happened, and advice on how to continue the run; empty if there is none."""
        super().__init__(*filter(None, (reason, advice)))
        self.reason, self.advice = reason, advice

    def __str__(self) -> str:
        return "; ".join(self.args)


class DivergenceError(TrainingError):
    """The loss or the gradients are not finite."""


class OutOfStepError(TrainingError):
    """This rank failed under `sharding: full`. The other ranks wait for its shard, and fail when it exits."""


class WriteError(JobError):
    """Results cannot be written, for example because the disk is full."""
