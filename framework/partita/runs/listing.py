"""The runs in a folder: what each one is, how it ended, and how good it is."""

import os
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, get_args

from partita.runs.locks import is_locked
from partita.runs.manifest import MANIFESTS, read_manifest
from partita.runs.origin import data_options
from partita_schema.errors import DataError, PartitaError
from partita_schema.sections.outputs import OUTPUT_MODELS, direction_of

MAX_DEPTH = 4
"""Folders below the one that is searched, such as those of the trials of sweeps."""
OUTPUTS = ("transcripts", "journal", "evaluations")
"""Folders that other verbs than `train` leave in a folder without a run."""
SPLITS = ("test", "validation")
"""Splits whose metrics describe a run, the best one first."""
METRIC_OF_TYPE = {
    get_args(model.model_fields["type"].annotation)[0]: next(iter(model.METRICS)) for model in OUTPUT_MODELS
}
"""The metric by which an output is judged, by type of output."""

Status = Literal["running", "done", "interrupted", "failed", "dead", "outputs", "unreadable"]
"""Status of a run.

running: a process has the run open. dead: its process ended without recording why, such as after `kill -9`. outputs: no
run, but answers or dialogues of a model that was not trained here. unreadable: the manifest is damaged.
"""
Order = Literal["date", "name", "metric", "size"]


@dataclass(frozen=True)
class MetricValue:
    """A metric of a split."""

    name: str
    """Name of the metric, such as `team.accuracy`."""
    split: str
    """The rows that it was measured on, such as `test`."""
    value: float
    """Its value."""

    @property
    def higher_is_better(self) -> bool:
        """Whether higher values are better."""
        return direction_of(self.name) == "higher"


@dataclass(frozen=True)
class RunSummary:
    """A run in a list."""

    name: str
    """Path below the folder that was searched."""
    folder: Path
    """The run directory."""
    status: Status
    """`running`, `done`, `interrupted`, `failed`, `dead`, `outputs` or `unreadable`."""
    manifest: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """What the run has recorded; {} if it cannot be read."""
    bytes: int = 0
    """Size of all files."""
    updated: float = 0.0
    """Time of the last change, in seconds since 1970."""
    problem: str | None = None
    """Why the run failed or cannot be read."""

    @property
    def config(self) -> Mapping[str, Any]:
        """The configuration; {} if it is not recorded."""
        config: Mapping[str, Any] = self.manifest.get("config") or {}
        return config

    @property
    def metrics(self) -> Mapping[str, Mapping[str, float]]:
        """The latest metrics by split, without values that are missing."""
        recorded: Mapping[str, Mapping[str, Any]] = self.manifest.get("metrics") or {}
        return {
            split: {name: value for name, value in values.items() if isinstance(value, int | float)}
            for split, values in recorded.items()
        }

    def metric(self, name: str | None = None) -> MetricValue | None:
        """Return a metric of the test rows, else of the validation rows; None if the run does not have it.

        Args:
            name: Its name, such as `label.accuracy` or `accuracy`. Default: the one that selects the checkpoint, unless
                that is the loss and answers were scored.
        """
        metrics = self.metrics
        names = main_metrics(self.config) if name is None else [name]
        for one in names:
            for split in (*SPLITS, *(key for key in metrics if key not in SPLITS)):
                found = find_metric(one, metrics.get(split, {}))
                if found is not None:
                    return MetricValue(found, split, metrics[split][found])
        return None

    def record(self, metric: str | None = None) -> dict[str, Any]:
        """Return the run as a JSON-compatible dictionary; `metric` is named as for `metric`."""
        chosen = self.metric(metric)
        return {
            "name": self.name,
            "folder": str(self.folder),
            "status": self.status,
            "problem": self.problem,
            "model": model_of(self.config),
            "data": data_of(self.manifest),
            "metric": None if chosen is None else vars(chosen),
            "metrics": self.metrics,
            "steps": self.manifest.get("steps"),
            "created": self.manifest.get("created"),
            "updated": datetime.fromtimestamp(self.updated, tz=UTC).isoformat(timespec="seconds"),
            "bytes": self.bytes,
        }


def main_metrics(config: Mapping[str, Any]) -> list[str]:
    """Return the names of metrics that describe a run best, the best one first."""
    outputs = config.get("output_features") or []
    chosen = (config.get("trainer") or {}).get("validation_metric") or "loss"
    names = [] if chosen == "loss" else [chosen]
    names += [f"{output.get('name')}.{chosen}" for output in outputs[:1] if chosen != "loss"]
    if len(outputs) > 1:
        names.append("exact_match")
    return [*names, *(f"{output.get('name')}.{metric_of(output)}" for output in outputs), "loss"]


def metric_of(output: Mapping[str, Any]) -> str:
    """Return the metric by which an output is judged; a head is rarely exact to the last digit."""
    kind = output.get("type", "")
    return "mae" if kind == "number" and output.get("head") else METRIC_OF_TYPE.get(kind, "loss")


def find_metric(name: str, values: Collection[str]) -> str | None:
    """Return the metric of this name, else the first one whose name ends with it; None without one."""
    if name in values:
        return name
    return next((known for known in values if known.endswith(f".{name}")), None)


def model_of(config: Mapping[str, Any]) -> str:
    """Return the base model in few words: its id, or what is new."""
    base = config.get("base_model")
    if isinstance(base, Mapping):
        kind = base.get("architecture", "") if base.get("type") == "scratch" else base.get("type", "")
        return " ".join(filter(None, ("new", str(kind), str(base.get("size") or ""))))
    return str(base or "")


def data_of(manifest: Mapping[str, Any]) -> str:
    """Return the sources of the rows: those of the file, or what the command names instead."""
    named = data_options(manifest)
    if "--dataset" in named:
        return named[named.index("--dataset") + 1]
    data = (manifest.get("config") or {}).get("data") or {}
    source = data.get("source")
    sources = [part.get("source") for part in data.get("mix") or ()] or [source or data.get("test")]
    return ", ".join(str(source_name(one)) for one in sources if one is not None)


def source_name(source: Any) -> Any:
    """Return what names a source: its path, or the path in its section."""
    if isinstance(source, Mapping):
        return next((source[key] for key in ("path", "target", "name", "type") if source.get(key)), "custom source")
    return ", ".join(map(str, source)) if isinstance(source, list | tuple) else source


def read_runs(folder: Path) -> list[RunSummary]:
    """Return the runs below a folder, in the order of their paths. Damaged ones have a `problem`.

    Raises:
        DataError: There is no such folder, or it is a run itself.
    """
    if is_run(folder):
        raise DataError(
            f"{folder} is a run itself; write partita runs show {shlex.quote(str(folder))}, or the folder above"
        )
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}; name the folder that holds the runs, such as runs")
    return [read_summary(path, name=path.relative_to(folder).as_posix()) for path in find_runs(folder)]


def find_runs(folder: Path, *, depth: int = MAX_DEPTH, root: Path | None = None) -> Iterator[Path]:
    """Yield the folders below a folder that hold a run, or outputs without one, in the order of their names.

    Args:
        folder: The folder.
        depth: How many folders deep to search.
        root: The folder where the search began; links to folders in it, or above it, are left out.
    """
    root = folder.resolve() if root is None else root
    try:
        children = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    except PermissionError:  # the folder of somebody else
        return
    for path in children:
        if path.is_symlink() and (path.resolve().is_relative_to(root) or root.is_relative_to(path.resolve())):
            continue
        if is_run(path) or any((path / name).is_dir() for name in OUTPUTS):
            yield path
        elif depth > 1:
            yield from find_runs(path, depth=depth - 1, root=root)


def is_run(folder: Path) -> bool:
    """Return whether a folder has the manifest of a run, readable or not."""
    return os.path.lexists(folder / MANIFESTS[0])


def read_summary(folder: Path, *, name: str | None = None) -> RunSummary:
    """Return the run in a folder. A damaged one has a `problem`.

    Args:
        folder: The run directory.
        name: Its name in the list. Default: the path.
    """
    name, size, changed = name or str(folder), size_of(folder), last_change(folder)
    try:
        manifest = read_manifest(folder)
    except PartitaError as error:
        return RunSummary(name, folder, "unreadable", {}, size, changed, str(error))
    except OSError as error:
        advice = "change the permissions there" if isinstance(error, PermissionError) else "restore it"
        problem = f"{error.filename} cannot be read: {error.strerror}; {advice}"
        return RunSummary(name, folder, "unreadable", {}, size, changed, problem)
    if not manifest and is_run(folder):
        problem = f"{folder / MANIFESTS[0]} is a link to a file that does not exist; restore the file"
        return RunSummary(name, folder, "unreadable", {}, size, changed, problem)
    if not manifest:
        return RunSummary(name, folder, "outputs", {}, size, changed)
    if not has_plausible_parts(manifest):
        problem = f"{folder / MANIFESTS[0]} has a config, metrics or data that partita does not write; restore it"
        return RunSummary(name, folder, "unreadable", {}, size, changed, problem)
    status: Any = manifest.get("status")
    if status == "running" and not is_locked(folder):
        status = "dead"
    return RunSummary(name, folder, status, manifest, size, updated_at(manifest, changed), manifest.get("error"))


def has_plausible_parts(manifest: Mapping[str, Any]) -> bool:
    """Return whether the parts of a manifest that are listed have the structure that partita writes."""
    config = manifest.get("config") or {}
    sections = [config.get(key) for key in ("data", "trainer")] + [manifest.get(key) for key in ("data", "metrics")]
    features = [one for key in ("input_features", "output_features") for one in config.get(key) or ()]
    values = [one for key in ("data", "metrics") for one in (manifest.get(key) or {}).values()]
    named = all(isinstance(one, Mapping) and "name" in one and "type" in one for one in features)
    return named and all(one is None or isinstance(one, Mapping) for one in [*sections, *values])


def updated_at(manifest: Mapping[str, Any], changed: float) -> float:
    """Return when the manifest was written, in seconds since 1970; `changed` if that is not recorded."""
    try:
        return datetime.fromisoformat(manifest["updated"]).timestamp()
    except (KeyError, TypeError, ValueError):
        return changed


def last_change(folder: Path) -> float:
    """Return when the manifest of a folder, or else the folder, was changed, in seconds since 1970."""
    manifest = folder / MANIFESTS[0]
    return (manifest if manifest.exists() else folder).lstat().st_mtime


def size_of(path: Path) -> int:
    """Return the bytes of a file, or of all files below a folder; links count as themselves."""
    if path.is_symlink() or not path.is_dir():
        return path.lstat().st_size if os.path.lexists(path) else 0
    total = 0
    for base, _, files in os.walk(path):
        for file in files:
            try:
                total += os.lstat(os.path.join(base, file)).st_size  # noqa: PTH118 -- ten times as fast as Path
            except FileNotFoundError:  # the run is writing
                continue
    return total


def in_order(runs: Iterable[RunSummary], order: Order, *, metric: str | None = None) -> list[RunSummary]:
    """Return runs in an order: the newest first, by name, the best first, or the largest first.

    Runs with different metrics are in groups, and those without one come last.

    Args:
        runs: The runs.
        order: date, name, metric or size.
        metric: Name of the metric, as for `RunSummary.metric`.
    """
    by_name = sorted(runs, key=lambda run: run.name)
    if order == "name":
        return by_name
    if order == "metric":
        return sorted(by_name, key=lambda run: metric_rank(run.metric(metric)))
    return sorted(by_name, key=lambda run: -(run.updated if order == "date" else run.bytes))


def metric_rank(value: MetricValue | None) -> tuple[bool, str, str, float]:
    """Return what sorts metrics: the best first, in groups of the same metric and split."""
    if value is None:
        return True, "", "", 0.0
    return False, value.name, value.split, -value.value if value.higher_is_better else value.value


def metric_names(runs: Sequence[RunSummary]) -> list[str]:
    """Return the names of all metrics of the runs."""
    return list(dict.fromkeys(name for run in runs for values in run.metrics.values() for name in values))
