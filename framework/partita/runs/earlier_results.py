"""Results of weights that a run had before it was trained further."""

import logging
import shlex
from collections.abc import Mapping
from typing import Any

from partita.runs.directory import RunDirectory
from partita.runs.row_results import BASE, FOLDER, recorded_header

logger = logging.getLogger(__name__)


def step_of_weights(manifest: Mapping[str, Any]) -> int | None:
    """Return the training step of the weights that a run ended with; None if it was not trained."""
    steps: int | None = manifest.get("steps")
    best: int | None = manifest.get("best_step")
    restores_best = manifest.get("config", {}).get("trainer", {}).get("restore_best", False)
    return best if restores_best and best is not None else steps


def remove_earlier_results(run: RunDirectory) -> None:
    """Remove evaluations of earlier weights from a run that was finished and has been trained further.

    Evaluations of the base model are kept.
    """
    earlier = run.manifest.get("earlier_evaluations")
    if earlier is None:
        return
    current = {one["split"] for one in run.manifest.get("evaluations", [])[earlier:]}
    step, removed = step_of_weights(run.manifest), set[str]()
    for path in (run.folder / FOLDER).glob("*.jsonl"):
        header = None if path.stem.endswith(BASE) else recorded_header(path)
        if header is None or header.split in current:
            continue
        if header.step in (None, step):
            current.add(header.split)
        else:
            path.unlink()
            removed.add(header.split)
    metrics: Mapping[str, Any] = run.manifest.get("metrics", {})
    removed |= metrics.keys() - current
    if removed:
        run.note(metrics={split: values for split, values in metrics.items() if split in current})
        logger.info(
            "results of the earlier weights are removed: %s; partita evaluate %s gives those of the new ones",
            ", ".join(sorted(removed)),
            shlex.quote(str(run.folder)),
        )
