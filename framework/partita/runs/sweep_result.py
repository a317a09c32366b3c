"""The result of a sweep: sweep.json, the best trial, and a table."""

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from partita.runs.files import strict_json
from partita.runs.sweep_record import SWEEP, TRIALS, Trial
from partita_schema.common.files import write_atomically
from partita_schema.common.text import value_text
from partita_schema.errors import PartitaError

if TYPE_CHECKING:
    import pandas as pd

FORMAT_VERSION = 1


@dataclass(frozen=True)
class SweepResult:
    """The trials of a sweep."""

    folder: Path
    """Folder of the sweep."""
    metric: str
    """Metric on the validation rows that compares trials."""
    direction: Literal["minimize", "maximize"]
    """Whether low or high values of the metric are better."""
    trials: tuple[Trial, ...]
    """All trials so far, in order."""
    total: int
    """Number of trials of the whole sweep."""

    @property
    def ranked(self) -> list[Trial]:
        """Trials that have a value, the best first; the earlier one of two equal values."""
        done = [trial for trial in self.trials if trial.result is not None and trial.result.value is not None]
        sign = 1 if self.direction == "minimize" else -1
        return sorted(done, key=lambda trial: (sign * self.value_of(trial), trial.number))

    @property
    def best(self) -> Trial | None:
        """The best trial; None if none has a value."""
        return next(iter(self.ranked), None)

    def __str__(self) -> str:
        """Return a line for each trial that has ended, the best first."""
        ranked = self.ranked
        others = [trial for trial in self.trials if trial.result is not None and trial not in ranked]
        lines = [f"  {trial_line(trial, metric=self.metric)}" for trial in (*ranked, *others)]
        return "\n".join([f"{len(lines)} of {self.total} trials of {self.folder}, the best first", *lines])

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Print the result as IPython and notebooks show it."""
        printer.text(str(self))

    def run_of(self, trial: Trial) -> Path:
        """Return the run directory of a trial, or that of the earlier trial whose values it has."""
        original = trial if trial.repeats is None else self.trials[trial.repeats]
        return self.folder / TRIALS / original.name

    def model_of(self, trial: Trial) -> Path:
        """Return the run directory of a model of a trial: its own, or with cross-validation that of its first fold."""
        run = self.run_of(trial)
        first = run / "fold-1"
        return first if first.is_dir() else run

    def value_of(self, trial: Trial) -> float:
        """Return the value of a trial; NaN without one."""
        value = trial.result.value if trial.result is not None else None
        return float("nan") if value is None else value

    def to_pandas(self) -> "pd.DataFrame":
        """Return a frame with one row per trial: its values, state, metric and run directory."""
        import pandas as pd

        return pd.DataFrame(list(self.rows()))

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield a row per trial."""
        for trial in self.trials:
            state = trial.result.state if trial.result is not None else "waiting"
            row = {"trial": trial.number, **trial.values, "state": state, self.metric: self.value_of(trial)}
            yield row | {"run": str(self.run_of(trial))}

    def record(self) -> dict[str, Any]:
        """Return the content of sweep.json without the settings."""
        best = self.best
        return {
            "format_version": FORMAT_VERSION,
            "metric": self.metric,
            "mode": self.direction,
            "total": self.total,
            "best": None if best is None else self.trial_record(best),
            "trials": [self.trial_record(trial) for trial in self.trials],
        }

    def trial_record(self, trial: Trial) -> dict[str, Any]:
        """Return a trial as JSON."""
        result = {"state": "waiting"} if trial.result is None else asdict(trial.result)
        place = {"number": trial.number, "run": str(self.run_of(trial).relative_to(self.folder))}
        return {**place, "values": dict(trial.values), "repeats": trial.repeats, **result}


def write_sweep(result: SweepResult, *, settings: Mapping[str, Any]) -> None:
    """Write sweep.json."""
    text = strict_json({**result.record(), "settings": dict(settings)}, indent=2)
    write_atomically(result.folder / SWEEP, text + "\n")


def read_sweep(folder: Path) -> dict[str, Any] | None:
    """Read sweep.json; None if there is none. Raise PartitaError if it is damaged or of a newer version."""
    path = folder / SWEEP
    if not path.exists():
        return None
    try:
        written = json.loads(path.read_bytes())
        newer = written["format_version"] > FORMAT_VERSION
        settings = written["settings"]
    except (ValueError, KeyError, TypeError) as error:
        message = f"{path} is damaged ({error!r}); remove it and rerun the same command, which writes it again"
        raise PartitaError(message) from None
    if newer or not isinstance(settings, dict):
        raise PartitaError(f"{path} was written by another version of partita; update partita to read it")
    assert isinstance(written, dict)
    return written


def trial_line(trial: Trial, *, metric: str) -> str:
    """Return one line about a trial that has ended."""
    result = trial.result
    assert result is not None
    values = ", ".join(f"{key} {parameter_text(value)}" for key, value in trial.values.items())
    if result.value is not None:
        end = f"{metric} {result.value:.4g}"
    elif result.state == "pruned":
        end = f"stopped early at {result.curve[-1].share:.0%}, {metric} {result.curve[-1].value:.4g}"
    else:
        end = f"failed: {(result.error or '').splitlines()[0] if result.error else ''}"
    return f"trial {trial.number}: {end} ({values})"


def predict_command(run: Path) -> str:
    """Return the command that answers rows with the model of a trial."""
    return f"partita predict {shlex.quote(str(run))} --dataset ROWS --output FILE"


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """Return a name of each parameter for charts and narrow tables: the last parts of its key that tell it apart."""
    names: dict[str, str] = {}
    for key in keys:
        parts = key.split(".")
        endings = [".".join(parts[-count:]) for count in range(1, len(parts) + 1)]
        others = [f".{other}" for other in keys if other != key]
        names[key] = next((name for name in endings if not any(one.endswith(f".{name}") for one in others)), key)
    return names


def parameter_text(value: Any) -> str:
    """Return a value of a parameter for people, on one line: numbers with four digits, line ends as \\n."""
    return "\\n".join(value_text(value, digits=4).splitlines())
