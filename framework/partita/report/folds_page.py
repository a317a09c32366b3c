"""`report.html` of a cross-validation: the means of its metrics, and those of each fold."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partita.report.charts import Table
from partita.report.number_text import as_number
from partita.report.page import render_page
from partita.report.section import Link, NamedTable, Section
from partita.runs.listing import find_metric, main_metrics
from partita.runs.manifest import MANIFESTS, read_manifest
from partita_schema.common.text import counted
from partita_schema.errors import DataError
from partita_schema.sections.outputs import METRICS_BY_NAME

FOLDS = "folds.json"
"""File of the means of a cross-validation, in the folder of its runs."""
NOTE = (
    "In brackets: 95 % intervals of Student's t over folds. The training rows of folds overlap, so the intervals are "
    "too narrow."
)


@dataclass(frozen=True)
class Folds:
    """The results of a cross-validation."""

    folder: Path
    metrics: Mapping[str, Mapping[str, float | None]]
    """Means over folds, by split."""
    intervals: Mapping[str, Mapping[str, tuple[float | None, float | None]]]
    """Their intervals, by split."""
    folds: tuple[Mapping[str, Mapping[str, float | None]], ...]
    """Metrics of each fold, by split."""
    runs: tuple[str, ...]
    """Folder of each fold."""

    def main(self) -> tuple[str, str] | None:
        """Return the split and the name of the metric that describes the models best; None without metrics."""
        first = self.folder / self.runs[0] if self.runs else self.folder
        manifest: Mapping[str, Any] = read_manifest(first) if (first / MANIFESTS[0]).is_file() else {}
        for split in ("test", "validation"):
            for name in main_metrics(manifest.get("config") or {}):
                known = find_metric(name, self.metrics.get(split, {}))
                if known is not None:
                    return split, known
        return None

    def value(self, split: str, name: str) -> str:
        """Return the mean of a metric with its interval."""
        low, high = (as_number(name, end) for end in self.intervals.get(split, {}).get(name, (None, None)))
        text = as_number(name, self.metrics[split][name])
        return f"{text} ({low} to {high})" if low and high and low != high else text


def read_folds(folder: Path) -> Folds:
    """Read the results of a cross-validation. Raise DataError if the file is damaged."""
    path = folder / FOLDS
    try:
        content = json.loads(path.read_bytes())
        parts = [content[name] for name in ("metrics", "intervals", "folds", "runs")]
    except (OSError, ValueError, KeyError, TypeError):
        raise DataError(f"{path} is damaged; rerun the training, which writes it again") from None
    return Folds(folder, parts[0], parts[1], tuple(parts[2]), tuple(parts[3]))


def folds_page(folds: Folds) -> str:
    """Return the page of a cross-validation as HTML."""
    sections = []
    for split, means in folds.metrics.items():
        names = [name for name in means if not any(part in name for part in METRICS_BY_NAME)]
        rows = [
            [name, folds.value(split, name), *(as_number(name, fold.get(split, {}).get(name)) for fold in folds.folds)]
            for name in names
        ]
        table = Table(["metric", "mean", *folds.runs], rows)
        sections.append(Section(split.capitalize(), [NamedTable("", table, note=NOTE)]))
    links = [Link(f"The report of {run} is", f"{run}/report.html", f"{run}/report.html") for run in folds.runs]
    links = [link for link in links if (folds.folder / link.path).is_file()]
    sections += [Section("Folds", links)] if links else []
    return render_page("/".join(folds.folder.resolve().parts[-2:]), lead=lead_of(folds), sections=sections)


def lead_of(folds: Folds) -> str:
    """Return the most important sentence."""
    number, main = counted(len(folds.folds), "fold"), folds.main()
    if main is None:
        return f"The cross-validation has {number} and no metric."
    split, name = main
    values = [fold.get(split, {}).get(name) for fold in folds.folds]
    known = [value for value in values if value is not None and math.isfinite(value)]
    low, high = (as_number(name, pick(known)) for pick in (min, max)) if known else ("", "")
    spread = f", from {low} to {high}" if low != high else ""
    return f"The mean {name} of {number} is {folds.value(split, name)} on the {split} rows{spread}."
