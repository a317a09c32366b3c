"""Rules for a sweep and the run that it varies."""

from collections.abc import Iterator
from typing import Literal

from partita_schema.base import Refusal, is_set
from partita_schema.metrics import full_name, metric_problem
from partita_schema.rules.comparable_trials import sweep_metric
from partita_schema.sections.backend import RayBackendConfig
from partita_schema.sections.config_sections import ConfigSections
from partita_schema.sections.objectives import DOCUMENT_METRICS
from partita_schema.sections.outputs import direction_of
from partita_schema.sections.sweep import combinations
from partita_schema.sections.trainer import FinetuneTrainer, NoTrainer


def sweep_direction(config: ConfigSections) -> Literal["minimize", "maximize"]:
    """Return whether low or high values of the metric of a sweep are better."""
    if config.sweep is not None and config.sweep.mode is not None:
        return config.sweep.mode
    return "minimize" if direction_of(sweep_metric(config)) == "lower" else "maximize"


def unmeasured_sweep(config: ConfigSections) -> Iterator[Refusal]:
    """Yield a metric that cannot compare trials."""
    sweep = config.sweep
    if sweep is None:
        return
    problem = metric_problem(sweep.metric, config) if sweep.metric is not None else None
    if problem is not None:
        yield "sweep.metric", problem
    elif sweep.mode is None and direction_of(sweep_metric(config)) is None:
        yield "sweep.metric", f"{sweep.metric} does not say which of two trials is better; write mode: maximize"
    trainer = config.trainer
    if isinstance(trainer, FinetuneTrainer) and trainer.skip_all_evaluation:
        yield "trainer.skip_all_evaluation", "a sweep compares validation metrics; remove it"
    if isinstance(trainer, NoTrainer) and "validation" not in trainer.evaluate:
        yield "trainer.evaluate", "a sweep compares trials on the validation rows; add validation"


def impossible_sweep(config: ConfigSections) -> Iterator[Refusal]:
    """Yield what has no finite grid, nothing to stop early, or several processes for each trial."""
    sweep = config.sweep
    if sweep is None:
        return
    if sweep.sampler == "grid" and combinations(sweep) is None:
        yield "sweep.sampler", "a grid needs lists of values, and a parameter is a range; write random or tpe, or lists"
    if sweep.sampler == "grid" and sweep.seed is not None:
        yield "sweep.seed", "a grid has nothing random; remove seed"
    if config.backend.type == "torchrun":
        yield "backend", "a trial runs in one process; write backend: {type: local}"
    if isinstance(config.backend, RayBackendConfig):
        if config.backend.sharding == "full":
            yield "backend.sharding", "a trial runs in one process, which holds the whole model; remove sharding"
        if is_set(sweep, "workers"):
            yield "sweep.workers", "with backend: {type: ray}, write the number of workers as backend.workers"
    if sweep.pruner is None:
        return
    metric = sweep_metric(config)
    if config.cross_validates:
        yield "sweep.pruner", "a trial is the mean of its folds, which is known at its end; remove pruner"
    elif config.simulation is not None and config.simulation.self_training is not None:
        yield "sweep.pruner", "a trial with self-training is known at the end of its last round; remove pruner"
    elif not isinstance(config.trainer, FinetuneTrainer):
        yield (
            "sweep.pruner",
            f"trainer: {{type: {config.trainer.type}}} does not evaluate while it trains; remove pruner",
        )
    elif metric not in ("loss", *DOCUMENT_METRICS, full_name(config.trainer.validation_metric, config.output_features)):
        yield (
            "sweep.pruner",
            f"{metric} is not computed while a trial trains; write trainer: {{validation_metric: {metric}}}",
        )
