"""partita: train, run and evaluate language models from one YAML file.

from partita import Model

model = Model("run.yaml")
model.train()
model.predict("rows.jsonl").to_pandas()

This package exports what programs use: `Model`, the configuration, results and errors. What users implement is exported
by `partita.data` (sources, formatters), `partita.simulation` (environments, agents, checkers) and `partita_trainers`
(trainers, objectives).
"""

import sys
import warnings
from typing import TYPE_CHECKING

from partita_schema.common.lazy import lazy_exports
from partita_schema.errors import (
    ConfigError,
    DataError,
    DataWorkerError,
    DivergenceError,
    ExportError,
    JobError,
    LostRankError,
    ModelError,
    NothingToLearnError,
    NoUsableRowsError,
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

if "ipykernel" in sys.modules:  # of tqdm, which libraries import; nothing here needs ipywidgets
    warnings.filterwarnings("ignore", message="IProgress not found")

if TYPE_CHECKING:
    from partita.export.report import ExportReport
    from partita.generation.predictions import Answer, Predictions, PredictionStats
    from partita.generation.record import PredictionRecord
    from partita.model import Model
    from partita.outputs.decode import Decoded
    from partita.pipeline.batch_sizes import BatchSizes
    from partita.report.agreement import Agreement
    from partita.report.comparison import Comparison, PairComparison
    from partita.report.disagreements import Disagreement
    from partita.report.measures import MetricEstimate
    from partita.report.runs import Runs
    from partita.report.statistics import Difference, Interval
    from partita.runs.listing import MetricValue, RunSummary
    from partita.runs.sweep_record import Trial, TrialEvaluation, TrialResult
    from partita.runs.sweep_result import SweepResult
    from partita.simulation.report import MeanOfTasks, RolloutOutcomes, SimulationReport
    from partita.sweeps.sweep import Sweep
    from partita_schema.config import Config
    from partita_schema.load import LoadedConfig, load_config
    from partita_trainers.base import TrainResult
    from partita_trainers.batch_size.probe import BatchSize, ProbeResult
else:  # on first access: torch takes seconds to import, and `partita validate` does not need it
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "partita.export.report": ("ExportReport",),
            "partita.generation.predictions": ("Answer", "PredictionStats", "Predictions"),
            "partita.generation.record": ("PredictionRecord",),
            "partita.model": ("Model",),
            "partita.outputs.decode": ("Decoded",),
            "partita.pipeline.batch_sizes": ("BatchSizes",),
            "partita.report.comparison": ("Comparison", "PairComparison"),
            "partita.report.disagreements": ("Disagreement",),
            "partita.report.agreement": ("Agreement",),
            "partita.report.measures": ("MetricEstimate",),
            "partita.report.statistics": ("Difference", "Interval"),
            "partita.report.runs": ("Runs",),
            "partita.runs.listing": ("MetricValue", "RunSummary"),
            "partita.simulation.report": ("MeanOfTasks", "RolloutOutcomes", "SimulationReport"),
            "partita.runs.sweep_record": ("TrialEvaluation", "Trial", "TrialResult"),
            "partita.runs.sweep_result": ("SweepResult",),
            "partita.sweeps.sweep": ("Sweep",),
            "partita_schema.config": ("Config",),
            "partita_schema.load": ("LoadedConfig", "load_config"),
            "partita_trainers.base": ("TrainResult",),
            "partita_trainers.batch_size.probe": ("BatchSize", "ProbeResult"),
        },
    )

__all__ = [
    "Agreement",
    "Answer",
    "BatchSize",
    "BatchSizes",
    "Comparison",
    "Config",
    "ConfigError",
    "DataError",
    "DataWorkerError",
    "Decoded",
    "Difference",
    "Disagreement",
    "DivergenceError",
    "ExportError",
    "ExportReport",
    "Interval",
    "JobError",
    "LoadedConfig",
    "LostRankError",
    "MeanOfTasks",
    "MetricEstimate",
    "MetricValue",
    "Model",
    "ModelError",
    "NoUsableRowsError",
    "NothingToLearnError",
    "OtherRankError",
    "OutOfMemory",
    "OutOfStepError",
    "PairComparison",
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
    "RunSummary",
    "Runs",
    "ServerError",
    "SimulationError",
    "SimulationReport",
    "Sweep",
    "SweepResult",
    "TrainResult",
    "TrainingError",
    "Trial",
    "TrialEvaluation",
    "TrialResult",
    "WriteError",
    "load_config",
]
