"""What a custom trainer leaves behind: the result that it returns, and the model that it saves."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from numbers import Integral, Real
from pathlib import Path

from partita.pipeline.build import LocalPipeline
from partita.runs.directory import RunDirectory
from partita_schema.common.scalars import scalar
from partita_schema.errors import ConfigError, Problem, shortened
from partita_trainers.base import Metrics, Trainer, TrainResult

logger = logging.getLogger(__name__)

EXAMPLE = 'TrainResult(run=context.run.folder, metrics={"validation": {"loss": 0.5}}, steps=100)'


def check_result(result: object, trainer: Trainer) -> None:
    """Raise ConfigError if a trainer has returned something other than a `TrainResult` with fitting values."""
    found = mistake_of(result)
    if found is not None:
        message = f"{type(trainer).__name__}.train returned {found}; return a TrainResult, such as {EXAMPLE}"
        raise ConfigError([Problem("trainer.target", message)])


def mistake_of(result: object) -> str | None:
    """Return what is wrong with the result of a trainer; None if nothing is."""
    if not isinstance(result, TrainResult):
        return shortened(repr(result))
    if not isinstance(result.steps, Integral) or result.steps < 0:
        return f"{shortened(repr(result.steps))} as steps"
    if not isinstance(result.metrics, Mapping):
        return f"{shortened(repr(result.metrics))} as metrics"
    for split, metrics in result.metrics.items():
        if not isinstance(metrics, Mapping):
            return f"{shortened(repr(metrics))} as the metrics of {split}"
        for name, value in metrics.items():
            if not isinstance(scalar(value), Real):
                return f"{shortened(repr(value))} as the metric {name} of {split}"
    return None


def plain_result(result: TrainResult) -> TrainResult:
    """Return a result with Python's own numbers, which can be written as JSON; those of numpy and torch cannot."""
    metrics = {
        split: {name: float(value) for name, value in values.items()} for split, values in result.metrics.items()
    }
    return replace(result, metrics=metrics, steps=int(result.steps))


def report_unless_reported(result: TrainResult, run: RunDirectory) -> None:
    """Report the metrics that a custom trainer returned, for each split whose last reported metrics differ from them.

    The finished run then has the same result when it is read again.
    """
    for split, metrics in result.metrics.items():
        if metrics and last_reported(run, split) != metrics:
            run.report(metrics, step=result.steps, split=split)


def last_reported(run: RunDirectory, split: str) -> Metrics:
    """Return the metrics that this training reported last for a split; {} if there are none.

    Those of a training before, of a run that was finished and is trained further, do not count.
    """
    evaluations = run.manifest.get("evaluations", [])[run.manifest.get("earlier_evaluations", 0) :]
    record: Metrics = next((one for one in reversed(evaluations) if one["split"] == split), {})
    return {name: value for name, value in record.items() if name not in ("step", "split")}


def save_unless_saved(pipeline: LocalPipeline, folder: Path, *, trainer: Trainer, steps: int) -> None:
    """Save the model if a custom trainer has not saved it, and say which weights it has.

    Args:
        pipeline: The model, tokenizer and decoder of the run, with the model as the trainer left it.
        folder: The folder of the saved model.
        trainer: The trainer.
        steps: The number of steps that it reports.
    """
    if folder.is_dir():
        return
    pipeline.lm.save(folder)
    name = type(trainer).__name__
    if steps:
        logger.info("%s has saved no model: context.lm is saved in %s, with the weights it has now", name, folder)
    else:
        logger.warning(
            "%s has saved no model and took no steps: context.lm is saved in %s, with weights that no step has trained",
            name,
            folder,
        )
