"""Cross-validation: a run per fold, and the means of their metrics."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from partita.backends.context import RunContext
from partita.backends.open import open_backend
from partita.data.run_data import open_run_data
from partita.report.folds_page import FOLDS
from partita.runs.directory_choice import ChosenRun, fold_folder, folds_of
from partita.runs.files import strict_json, writing
from partita.runs.manifest import MANIFESTS, read_manifest
from partita_schema.common.files import write_atomically
from partita_schema.dump import native_yaml
from partita_schema.errors import ResumeError
from partita_schema.load import LoadedConfig, load_config
from partita_trainers.base import Metrics, TrainResult

logger = logging.getLogger(__name__)

CONFIDENCE = 0.95


def train_folds(
    context: RunContext,
    dataset: Any,
    run: Path | None,
    *,
    callbacks: Sequence[object],
    report: Callable[[Path], object],
) -> TrainResult:
    """Train each fold in a separate run directory, `fold-1` and so on, and return the means of their metrics.

    Finished folds are not trained again, and an unfinished one is resumed.

    Args:
        context: The configuration.
        dataset: Replaces data.source.
        run: Folder of the runs. Default: runs/NAME, or the next free NAME-2.
        callbacks: Called in the training of each fold.
        report: Writes the report of a run.
    """
    process_group = context.process_group
    chosen = process_group.run_on_rank_zero(lambda: choose_folder_of_folds(context, run), "the folder of the runs")
    folder = chosen.folder
    if chosen.not_continued:
        logger.info("%s", chosen.not_continued)
    process_group.run_on_rank_zero(lambda: check_same_data(context, folder, dataset), "the rows of finished folds")
    results: list[TrainResult] = []
    folds = folds_of(context.config)
    for fold in range(1, folds + 1):
        place = fold_folder(folder, fold)
        logger.info("fold %d of %d", fold, folds)
        results.append(open_backend(fold_context(context, fold)).train(dataset, place, callbacks=callbacks))
        report(place)
    result = summary_of(results, folder)
    process_group.run_on_rank_zero(lambda: write_folds(result), "the result of the folds")
    report(folder)
    return result


def choose_folder_of_folds(context: RunContext, run: Path | None) -> ChosenRun:
    """Return the folder of the runs. Raise ResumeError if it is a run itself."""
    chosen = context.choose_run(run)
    if (chosen.folder / MANIFESTS[0]).exists():
        raise ResumeError(
            f"{chosen.folder} is a run, and cross-validation writes a run for each fold; name another folder with --run"
        )
    return chosen


def check_same_data(context: RunContext, folder: Path, dataset: Any) -> None:
    """Raise ResumeError if a cross-validation would be continued with other rows than those of its finished folds.

    Args:
        context: The configuration.
        folder: Folder of the runs.
        dataset: Replaces data.source.
    """
    folds = range(1, folds_of(context.config) + 1)
    manifests = {fold: read_manifest(fold_folder(folder, fold)) for fold in folds}
    done = [fold for fold, manifest in manifests.items() if manifest.get("status") == "done"]
    if len(done) == len(folds):  # each is checked when its result is used
        return
    for fold in done:
        config = fold_config(context, fold).config
        now = open_run_data(config, folder=context.loaded.folder, dataset=dataset).record()
        for split, recorded in manifests[fold].get("data", {}).items():
            if split in now and now[split]["fingerprint"] != recorded.get("fingerprint"):
                raise ResumeError(
                    f"the data has changed since {fold_folder(folder, fold)} was trained: its {split} rows are others "
                    "now; restore the data, or start again in another folder with --run"
                )


def fold_config(context: RunContext, fold: int) -> LoadedConfig:
    """Return the configuration that trains one fold only."""
    settings = context.config.model_dump(mode="json", exclude_unset=True)
    section = "data" if context.config.data.split is not None else "preprocessing"
    settings[section]["split"]["fold"] = fold
    loaded = load_config(settings)
    return replace(loaded, folder=context.loaded.folder, file=context.loaded.file, text=native_yaml(loaded.config))


def fold_context(context: RunContext, fold: int) -> RunContext:
    """Return a context that trains one fold only."""
    copy = RunContext(fold_config(context, fold), quiet=context.quiet)
    copy.distrusted, copy.allows_saved_code = context.distrusted, context.allows_saved_code
    return copy


def summary_of(results: Sequence[TrainResult], folder: Path) -> TrainResult:
    """Return the means of the metrics of all folds, with their intervals."""
    folds = [result.metrics for result in results]
    means: dict[str, Metrics] = {}
    intervals: dict[str, dict[str, tuple[float, float]]] = {}
    for split in dict.fromkeys(split for fold in folds for split in fold):
        found = dict.fromkeys(name for fold in folds for name in fold.get(split, {}))
        names = [name for name in found if all(name in fold.get(split, {}) for fold in folds)]
        if missing := [name for name in found if name not in names]:
            without = [
                str(number) for number, fold in enumerate(folds, 1) if not {*missing} <= fold.get(split, {}).keys()
            ]
            logger.warning("%s: no mean of %s; missing in fold %s", split, ", ".join(missing), ", ".join(without))
        values = {name: np.array([fold[split][name] for fold in folds], dtype=np.float64) for name in names}
        means[split] = {name: float(values_K.mean()) for name, values_K in values.items()}
        intervals[split] = {name: mean_interval(values_K) for name, values_K in values.items()}
    return TrainResult(
        run=folder,
        metrics=means,
        steps=sum(result.steps for result in results),
        batch_sizes=results[0].batch_sizes,
        folds=folds,
        intervals=intervals,
    )


def write_folds(result: TrainResult) -> None:
    """Write the means of a cross-validation next to the runs of its folds."""
    content: Mapping[str, Any] = {
        "metrics": result.metrics,
        "intervals": result.intervals,
        "folds": result.folds,
        "runs": [f"fold-{number}" for number in range(1, len(result.folds) + 1)],
    }
    with writing(result.run):
        write_atomically(result.run / FOLDS, strict_json(content, indent=2) + "\n")


def mean_interval(values_K: np.ndarray) -> tuple[float, float]:
    """Return the 95 % confidence interval of a mean by Student's t distribution.

    The values of folds are not independent, because their training rows overlap; the interval is therefore rather too
    narrow (Bengio and Grandvalet 2004). Without limits if a value is infinite.
    """
    mean, count = float(values_K.mean()), len(values_K)
    if not np.isfinite(values_K).all():
        return -math.inf, math.inf
    half = t_quantile((1 + CONFIDENCE) / 2, count - 1) * float(values_K.std(ddof=1)) / math.sqrt(count)
    return mean - half, mean + half


def t_quantile(share: float, freedom: int) -> float:
    """Return the quantile of Student's t distribution above 0, by bisection.

    Args:
        share: Share of the distribution below the quantile, above 0.5.
        freedom: Degrees of freedom, at least 1.
    """
    low, high = 0.0, 1e4
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        if t_share(middle, freedom) < share:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def t_share(value: float, freedom: int) -> float:
    """Return the share of Student's t distribution below a value (Abramowitz and Stegun 1964, 26.7.3 and 26.7.4)."""
    angle = math.atan2(value, math.sqrt(freedom))
    cosine = math.cos(angle)
    odd = freedom % 2
    term = cosine if odd else 1.0
    total = 0.0 if freedom == 1 else term
    for power in range(2 + odd, freedom, 2):
        term *= cosine**2 * (power - 1) / power
        total += term
    between = (2 / math.pi) * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total
    return (1 + between) / 2
