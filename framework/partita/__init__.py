"""partita: train, run and evaluate language models from one YAML file.

from partita import Model

model = Model("run.yaml")
model.train()
model.predict("rows.jsonl").to_pandas()

This package exports what programs use: `Model`, the configuration, results and errors. What users implement is exported
by `partita.data` (sources, formatters), `partita.simulation` (environments, agents, checkers) and `partita_trainers`
(trainers, objectives).
"""

from typing import TYPE_CHECKING

from partita_schema.common.lazy import lazy_exports
from partita_schema.errors import (
    ConfigError,
    DataError,
    DivergenceError,
    JobError,
    LostRankError,
    ModelError,
    NothingToLearnError,
    OtherRankError,
    OutOfMemory,
    OutOfStepError,
    PartitaError,
    Problem,
    ResumeError,
    RewrittenError,
    RowError,
    ServerError,
    SimulationError,
    TrainingError,
    WriteError,
)

if TYPE_CHECKING:
    from partita.generation.predictions import Answer, Predictions, PredictionStats
    from partita.generation.record import PredictionRecord
    from partita.model import Model
    from partita.outputs.decode import Decoded
    from partita.pipeline.batch_sizes import BatchSizes
    from partita.simulation.report import MeanOfTasks, RolloutOutcomes, SimulationReport
    from partita_schema.config import Config
    from partita_schema.load import LoadedConfig, load_config
    from partita_trainers.base import TrainResult
    from partita_trainers.batch_size.probe import BatchSize, ProbeResult
else:  # on first access: torch takes seconds to import, and `partita validate` does not need it
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "partita.generation.predictions": ("Answer", "PredictionStats", "Predictions"),
            "partita.generation.record": ("PredictionRecord",),
            "partita.model": ("Model",),
            "partita.outputs.decode": ("Decoded",),
            "partita.pipeline.batch_sizes": ("BatchSizes",),
            "partita.simulation.report": ("MeanOfTasks", "RolloutOutcomes", "SimulationReport"),
            "partita_schema.config": ("Config",),
            "partita_schema.load": ("LoadedConfig", "load_config"),
            "partita_trainers.base": ("TrainResult",),
            "partita_trainers.batch_size.probe": ("BatchSize", "ProbeResult"),
        },
    )

__all__ = [
    "Answer",
    "BatchSize",
    "BatchSizes",
    "Config",
    "ConfigError",
    "DataError",
    "Decoded",
    "DivergenceError",
    "JobError",
    "LoadedConfig",
    "LostRankError",
    "MeanOfTasks",
    "Model",
    "ModelError",
    "NothingToLearnError",
    "OtherRankError",
    "OutOfMemory",
    "OutOfStepError",
    "PartitaError",
    "PredictionRecord",
    "PredictionStats",
    "Predictions",
    "ProbeResult",
    "Problem",
    "ResumeError",
    "RewrittenError",
    "RolloutOutcomes",
    "RowError",
    "ServerError",
    "SimulationError",
    "SimulationReport",
    "TrainResult",
    "TrainingError",
    "WriteError",
    "load_config",
]
