"""Every error that partita raises on purpose; `from partita import ...` has all of them.

PartitaError             what a user wrote is wrong: the base of all, exit status 2
  ConfigError            the file is wrong: all its problems at once
  DataError              rows are wrong, or cannot be read
    NothingToLearnError  transcripts hold no dialogue to learn from
    RowError             one row is wrong: the reason in quarantine.jsonl
      RewrittenError     a chat template changes a row's text on the way
  ModelError             the model cannot be loaded, or does not fit the file
  ResumeError            saved state does not fit the run
  JobError               the file and the data are right, and the job failed: exit status 1
    OtherRankError       another process of the job failed, and says why
      LostRankError      another process is gone, or does not answer
    OutOfMemory          not even one row fits the device
    ServerError          the server of an endpoint cannot be reached, or fails one row after the other
    SimulationError      a simulation cannot continue
    TrainingError        training cannot continue
      DivergenceError    the loss or the gradients are not finite
      OutOfStepError     fatal on this rank under `sharding: full`
    WriteError           results cannot be written, such as on a full disk
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from partita_schema.counted import counted


class PartitaError(Exception):
    """Base of every error that partita raises on purpose.

    The text says what was found, where, and what to write instead. Raised itself where none of the classes below fits,
    such as for a folder that holds no run.
    """

    exit_status: ClassVar[int] = 2
    """Exit status of a command that ends with this error: 2 for a mistake in the input, 1 for a job that failed."""


MAX_PATH = 200
"""Characters of a key that an error shows."""
MAX_MESSAGE = 2000
"""Characters of a message that an error shows: it may quote what was written."""
MAX_SHOWN = 50
"""Mistakes of a file that the text of an error lists; the others are counted."""


@dataclass(frozen=True)
class Problem:
    """One mistake of a configuration file."""

    path: str
    """Keys from the top, joined by dots; list places in brackets: `output_features[0].type`. Empty for the file."""
    message: str
    """What is wrong and what to write instead."""
    file: str | None = None
    """Name of the file; None where the configuration did not come from one."""
    line: int | None = None
    """Line, from 1."""
    column: int | None = None
    """Column, from 1."""

    def __str__(self) -> str:
        place = ":".join(str(part) for part in (self.file, self.line, self.column) if part is not None)
        parts = place, shortened(self.path, MAX_PATH), shortened(self.message, MAX_MESSAGE)
        return ": ".join(part for part in parts if part)


def shortened(text: str, length: int = 60) -> str:
    """Return the beginning of a text, `length` characters at most."""
    return text if len(text) <= length else f"{text[: length - 3]}..."


class ConfigError(PartitaError):
    """The file is wrong. `problems` holds every mistake, in the order of the file; the text shows the first 50."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        lines = [str(problem) for problem in problems[:MAX_SHOWN]]
        if len(problems) > MAX_SHOWN:
            lines.append(f"... and {counted(len(problems) - MAX_SHOWN, 'more mistake')}")
        super().__init__("\n".join(lines))
        self.problems = tuple(problems)

    def __reduce__(self) -> "tuple[type[ConfigError], tuple[tuple[Problem, ...]]]":
        return type(self), (self.problems,)


class DataError(PartitaError):
    """Rows are wrong, or a file of rows cannot be read."""


class NothingToLearnError(DataError):
    """No dialogue of the transcripts can be learned from."""


class RowError(DataError):
    """One row is wrong; its text is the reason that quarantine.jsonl gives."""


class RewrittenError(RowError):
    """The chat template writes earlier turns in another way as the dialogue grows."""


class ModelError(PartitaError):
    """The model cannot be loaded, or does not fit the file."""


class ResumeError(PartitaError):
    """Saved state does not fit the run that would continue from it."""


class JobError(PartitaError):
    """The job failed, though the file and the data are right."""

    exit_status = 1


class OtherRankError(JobError):
    """Another process of the job failed. Its own words say why; this one has only ended with it."""


class LostRankError(OtherRankError):
    """An exchange with another process failed: it is gone, or does not answer, or cannot be reached."""


class OutOfMemory(JobError):  # noqa: N818 -- OutOfMemoryError is what torch raises, of a batch
    """Not even one row fits the device."""


class ServerError(JobError):
    """The server of an endpoint cannot be reached, or fails one row after the other."""


class SimulationError(JobError):
    """A simulation cannot continue."""


class TrainingError(JobError):
    """Training cannot continue."""


class DivergenceError(TrainingError):
    """The loss or the gradients are not finite."""


class OutOfStepError(TrainingError):
    """This rank failed while the others wait for its part of the weights: they end when it is gone."""


class WriteError(JobError):
    """Results cannot be written, such as on a full disk."""
