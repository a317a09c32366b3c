"""Trainers, their registry, and checkpoints.

This package exports what users implement, trainers and objectives, and what these are given. `CustomTrainer` is the
section of the configuration that a trainer is created with.
"""

from typing import TYPE_CHECKING

from partita_schema.common.lazy import lazy_exports

if TYPE_CHECKING:
    from partita_schema.sections.trainer import CustomTrainer
    from partita_trainers.base import (
        Batch,
        Batches,
        Evaluate,
        GlobalBatch,
        LanguageModel,
        ProbeContext,
        Progress,
        Run,
        Trainer,
        TrainerContext,
        TrainResult,
    )
    from partita_trainers.batch_size.probe import Probe, Timing, Volume
    from partita_trainers.callbacks import Callback, Callbacks, TrainingState
    from partita_trainers.finetune import Finetune
    from partita_trainers.objective import (
        Objective,
        ObjectiveContext,
        ObjectiveRow,
        RowObjective,
        SharedObjective,
        WeightedMean,
    )
    from partita_trainers.process_group import ProcessGroup, SharedText
    from partita_trainers.training_probe import TrainingProbe
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "partita_schema.sections.trainer": ("CustomTrainer",),
            "partita_trainers.base": (
                *("Batch", "Batches", "Evaluate", "GlobalBatch", "LanguageModel", "ProbeContext", "Progress", "Run"),
                *("Trainer", "TrainerContext", "TrainResult"),
            ),
            "partita_trainers.batch_size.probe": ("Probe", "Timing", "Volume"),
            "partita_trainers.callbacks": ("Callback", "Callbacks", "TrainingState"),
            "partita_trainers.training_probe": ("TrainingProbe",),
            "partita_trainers.finetune": ("Finetune",),
            "partita_trainers.objective": (
                *("Objective", "ObjectiveContext", "ObjectiveRow", "RowObjective", "SharedObjective", "WeightedMean"),
            ),
            "partita_trainers.process_group": ("ProcessGroup", "SharedText"),
        },
    )

__all__ = [
    "Batch",
    "Batches",
    "Callback",
    "Callbacks",
    "CustomTrainer",
    "Evaluate",
    "Finetune",
    "GlobalBatch",
    "LanguageModel",
    "Objective",
    "ObjectiveContext",
    "ObjectiveRow",
    "Probe",
    "ProbeContext",
    "ProcessGroup",
    "Progress",
    "RowObjective",
    "Run",
    "SharedObjective",
    "SharedText",
    "Timing",
    "TrainResult",
    "Trainer",
    "TrainerContext",
    "TrainingProbe",
    "TrainingState",
    "Volume",
    "WeightedMean",
]
