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
from partita.report.folds_page import FOLDS
from partita.runs.files import strict_json, writing
from partita_schema.common.files import write_atomically
from partita_schema.config import Config
from partita_schema.dump import native_yaml
from partita_schema.load import load_config
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
    folder = process_group.run_on_rank_zero(lambda: context.choose_run(run), "the folder of the runs").folder
    results: list[TrainResult] = []
    for fold in range(1, num_folds(context.config) + 1):
        place = folder / f"fold-{fold}"
        logger.info("fold %d of %d", fold, num_folds(context.config))
        results.append(open_backend(fold_context(context, fold)).train(dataset, place, callbacks=callbacks))
        report(place)
    result = summary_of(results, folder)
    process_group.run_on_rank_zero(lambda: write_folds(result), "the result of the folds")
    report(folder)
    return result


def num_folds(config: Config) -> int:
    """Return the number of folds."""
    split = config.split
    assert split.type == "kfold"
    return split.folds


def fold_context(context: RunContext, fold: int) -> RunContext:
    """Return a context whose configuration trains one fold only."""
    settings = context.config.model_dump(mode="json", exclude_unset=True)
    section = "data" if context.config.data.split is not None else "preprocessing"
    settings[section]["split"]["fold"] = fold
    loaded = load_config(settings)
    own = replace(loaded, folder=context.loaded.folder, file=context.loaded.file, text=native_yaml(loaded.config))
    copy = RunContext(own, quiet=context.quiet)
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
    narrow (Bengio and Grandvalet 2004).
    """
    mean, count = float(values_K.mean()), len(values_K)
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
