"""Every error that partita raises on purpose.

PartitaError
  ConfigError     the file is wrong: all its problems at once
  DataError       rows are wrong
  ModelError      the model cannot be loaded, or does not fit the file
  OtherRankError  another process of the job failed, and says why
    LostRankError another process is gone, or does not answer
  OutOfMemory     not even one row fits the device
  ResumeError     saved state does not fit the run
  TrainingError   training cannot go on
  WriteError      results cannot be written, such as on a full disk
"""

from collections.abc import Sequence
from dataclasses import dataclass


class PartitaError(Exception):
    """Something that a person can mend; its text says what was found, where, and what to write instead."""


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
        return ": ".join(part for part in (place, self.path, self.message) if part)


class ConfigError(PartitaError):
    """The file is wrong. `problems` holds every mistake, in the order of the file."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = tuple(problems)

    def __reduce__(self) -> "tuple[type[ConfigError], tuple[tuple[Problem, ...]]]":
        return type(self), (self.problems,)


class DataError(PartitaError):
    """Rows are wrong, or a file of rows cannot be read."""


class ModelError(PartitaError):
    """The model cannot be loaded, or does not fit the file."""


class OtherRankError(PartitaError):
    """Another process of the job failed. Its own words say why; this one has only ended with it."""


class LostRankError(OtherRankError):
    """An exchange with another process failed: it is gone, or does not answer, or cannot be reached."""


class OutOfMemory(PartitaError):  # noqa: N818 -- OutOfMemoryError is what torch raises, of a batch
    """Not even one row fits the device."""


class ResumeError(PartitaError):
    """Saved state does not fit the run that would continue from it."""


class TrainingError(PartitaError):
    """Training cannot go on."""


class SimulationError(PartitaError):
    """A simulation cannot go on."""


class WriteError(PartitaError):
    """Results cannot be written, such as on a full disk."""
