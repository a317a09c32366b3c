"""partita: train, run and evaluate language models from one YAML file.

from partita import Model

model = Model("run.yaml")
model.train()
model.predict("rows.jsonl").to_pandas()

All expected errors are subclasses of PartitaError and are exported here.
"""

from typing import TYPE_CHECKING, Any

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
    from partita.model import Model

__all__ = [
    "ConfigError",
    "DataError",
    "DivergenceError",
    "JobError",
    "LostRankError",
    "Model",
    "ModelError",
    "NothingToLearnError",
    "OtherRankError",
    "OutOfMemory",
    "OutOfStepError",
    "PartitaError",
    "Problem",
    "ResumeError",
    "RewrittenError",
    "RowError",
    "ServerError",
    "SimulationError",
    "TrainingError",
    "WriteError",
]


def __getattr__(name: str) -> Any:
    """Import `Model` on first access: torch takes seconds to import, and `partita validate` does not need it."""
    if name == "Model":
        from partita.model import Model

        return Model
    raise AttributeError(f"module 'partita' has no attribute {name!r}")
