"""The folder of a sweep: its description, and the result of each trial.

sweep.json                  configuration, trials, best trial; written again after each trial
trials/007-1f2e3d4c/        the run directory of a trial
trials/007-1f2e3d4c/trial.json   its result
report.html
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

from partita.runs.files import strict_json
from partita_schema.common.files import write_atomically
from partita_schema.errors import PartitaError

SWEEP, TRIAL, TRIALS = "sweep.json", "trial.json", "trials"
State = Literal["done", "pruned", "failed"]


@dataclass(frozen=True)
class TrialEvaluation:
    """A value of the metric while a trial trains."""

    share: float
    """Share of the steps of the trial, from 0 to 1."""
    step: int
    """Optimizer step."""
    value: float
    """Value of the metric."""


@dataclass(frozen=True)
class TrialResult:
    """How a trial ended."""

    state: State
    """done, pruned (stopped early) or failed."""
    value: float | None = None
    """Value of the metric at the end; None unless done."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """All validation metrics at the end."""
    curve: tuple[TrialEvaluation, ...] = ()
    """Values of the metric while it trained, without rounds of self-training."""
    error: str | None = None
    """Why it failed."""
    cpu_seconds: float = 0.0
    """CPU seconds, of the last start."""
    seconds: float = 0.0
    """Seconds, of the last start."""


@dataclass(frozen=True)
class Trial:
    """A trial: its number, its values, and how it ended."""

    number: int
    """Number, from 0."""
    values: Mapping[str, Any]
    """Values by dotted key."""
    repeats: int | None = None
    """Number of an earlier trial with the same values, whose result it has."""
    result: TrialResult | None = None
    """None until it has ended."""

    @property
    def name(self) -> str:
        """Name of its run directory, such as 007-1f2e3d4c."""
        digest = blake2b(json.dumps(dict(self.values), sort_keys=True).encode(), digest_size=4).hexdigest()
        return f"{self.number:03d}-{digest}"


def sweep_of(run: Path) -> Path | None:
    """Return the folder of the sweep of which a run is a trial, or a fold of a trial; None for other runs."""
    above = (folder for folder in (run.parent, run.parent.parent) if folder.name == TRIALS)
    return next((folder.parent for folder in above if (folder.parent / SWEEP).is_file()), None)


def write_result(folder: Path, result: TrialResult) -> None:
    """Write the result of a trial into its run directory."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / TRIAL, strict_json(asdict(result), indent=2) + "\n")


def read_result(folder: Path) -> TrialResult | None:
    """Read the result of a trial; None if it has not ended. Raise PartitaError if the file is damaged."""
    path = folder / TRIAL
    if not path.exists():
        return None
    try:
        written = json.loads(path.read_bytes())
        curve = tuple(TrialEvaluation(**one) for one in written.pop("curve"))
        return TrialResult(**written, curve=curve)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise PartitaError(f"{path} is damaged ({error}); remove it to run the trial again") from None
