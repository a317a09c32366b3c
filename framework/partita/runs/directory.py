"""The files of an open run. `opening.py` opens it.

config.yaml     the file as written              resolved.yaml   every value with its origin
samples.json    some training rows
manifest.json   status, versions, sizes, metrics  log.jsonl       one line per step
checkpoints/    model/    journal/    quarantine.jsonl    ledger.json
evaluations/    results of the rows of each evaluated split
"""

import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager
from numbers import Integral
from pathlib import Path
from typing import Any

from partita.runs.cost import Cost
from partita.runs.files import strict_json, without_infinities
from partita.runs.manifest import now, read_manifest
from partita.runs.plain_values import plain_values
from partita.runs.progress import show_progress
from partita.runs.tracking import Trackers
from partita_schema.common.checksums import sealed
from partita_schema.common.files import write_atomically
from partita_schema.common.json_text import parse_json
from partita_schema.common.text import counted
from partita_schema.config import Config
from partita_schema.errors import ConfigError, Problem, shortened
from partita_schema.records import ManifestRecord

logger = logging.getLogger(__name__)


class RunDirectory:
    """An open run, locked by this process until it is closed."""

    def __init__(self, folder: Path, *, config: Config, quiet: bool = False) -> None:
        self.folder, self.config, self.quiet = folder, config, quiet
        self.manifest: dict[str, Any] = read_manifest(folder)
        self.cost: Cost | None = None
        """What the run takes; None unless this process runs it."""
        self.trackers = Trackers(config.tracking, folder=folder, settings=config.model_dump(mode="json"))

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.folder / "checkpoints"

    @property
    def finished(self) -> bool:
        """Whether the run is complete."""
        return self.manifest.get("status") == "done"

    @property
    def has_checkpoints(self) -> bool:
        """Whether the run has a checkpoint to resume from."""
        return any(self.checkpoints.glob("step-*"))

    def log_step(self, record: Mapping[str, Any]) -> None:
        """Append a record to log.jsonl, and pass it to the trackers.

        Raises:
            ConfigError: The record of a custom trainer has no step, which is a whole number, or a value that cannot be
                written as JSON.
        """
        if not isinstance(record.get("step"), Integral):
            message = (
                f"run.log_step got a record without a whole number as step: {shortened(repr(dict(record)))}; "
                'write one, such as {"step": 1, "loss": 0.5}'
            )
            raise ConfigError([Problem("trainer.target", message)])
        record = plain_values(record, method="run.log_step")
        with (self.folder / "log.jsonl").open("a", encoding="utf8") as file:
            file.write(strict_json(record) + "\n")
        self.trackers.log({f"train/{key}": value for key, value in record.items()}, step=record["step"])

    def truncate_log(self, step: int) -> None:
        """Remove logged steps after `step`, a torn last line, and damaged lines."""
        path = self.folder / "log.jsonl"
        if not path.exists():
            return
        lines, damaged = list[bytes](), 0
        for line in path.read_bytes().splitlines(keepends=True):
            logged = step_of(line)
            if logged is not None and logged <= step:
                lines.append(line.removesuffix(b"\n") + b"\n")
            damaged += logged is None and line.endswith(b"\n")
        if damaged:
            logger.warning("%s: %s left out", path, counted(damaged, "damaged line"))
        write_atomically(path, b"".join(lines))
        evaluations = [record for record in self.manifest.get("evaluations", []) if record["step"] <= step]
        resumed = [*self.manifest.get("resumed", []), step] if step else []
        self.note(evaluations=evaluations, resumed=resumed)

    def report(self, metrics: Mapping[str, float], *, step: int, split: str) -> None:
        """Record the metrics of a split, and pass them to the trackers. Raises ConfigError as `note` does."""
        metrics = plain_values(metrics, method="run.report")
        latest = {**self.manifest.get("metrics", {}), split: dict(metrics)}
        evaluations = [*self.manifest.get("evaluations", []), {"step": step, "split": split, **metrics}]
        self.note(metrics=latest, evaluations=evaluations)
        self.trackers.log({f"{split}/{key}": value for key, value in metrics.items()}, step=step)

    def note(self, **values: Any) -> None:
        """Store values in manifest.json, with what the run has taken so far.

        If one of the values cannot be written, none of them is kept, so that the next ones can be written.

        Raises:
            ConfigError: A value cannot be written as JSON.
        """
        values = plain_values(values, method="run.note")
        cost = {} if self.cost is None else {"cost": self.cost_so_far}
        noted = {**self.manifest, **cost, **values, "updated": now()}
        manifest = strict_json(sealed(without_infinities(ManifestRecord().dump(noted))), indent=2)
        self.manifest = noted
        write_atomically(self.folder / "manifest.json", f"{manifest}\n")

    @property
    def cost_so_far(self) -> dict[str, float]:
        """What the run has taken in this process and in earlier starts; {} if this process does not run it."""
        return {} if self.cost is None else self.cost.record()

    def progress(self, total: int, description: str, *, completed: int = 0) -> AbstractContextManager[Any]:
        """Return a progress bar, or plain lines without a terminal."""
        return show_progress(total, description, completed=completed, quiet=self.quiet)


def step_of(line: bytes) -> int | None:
    """Return the step of a line of log.jsonl; None if the line is torn or damaged."""
    try:
        return int(parse_json(line)["step"])
    except (ValueError, TypeError, KeyError):
        return None


class FollowedRun(RunDirectory):
    """The run on ranks that write nothing: noted values stay in memory."""

    def __init__(self, folder: Path, *, config: Config, manifest: Mapping[str, Any], resumes: bool) -> None:
        """Follow a run that another rank writes.

        Args:
            folder: The run directory.
            config: The configuration.
            manifest: The manifest of the writing rank.
            resumes: Whether the writing rank sees checkpoints.
        """
        self.folder, self.config, self.quiet = folder, config, True
        self.manifest = dict(manifest)
        self.cost = Cost({})
        self.resumes = resumes
        self.trackers = Trackers((), folder=folder, settings={})

    @property
    def has_checkpoints(self) -> bool:
        """Whether the writing rank found a checkpoint; another machine may see new files later."""
        return self.resumes

    def log_step(self, record: Mapping[str, Any]) -> None:
        """Do nothing; rank 0 writes the log."""

    def truncate_log(self, step: int) -> None:
        """Do nothing; rank 0 writes the log."""

    def note(self, **values: Any) -> None:
        """Store values in memory."""
        self.manifest |= values
