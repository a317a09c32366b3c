"""partita: from one YAML file to a trained and predicting language model.

from partita import Model

model = Model("run.yaml")
model.train()
model.predict("rows.jsonl").to_pandas()
"""

from typing import TYPE_CHECKING, Any

from partita_schema.errors import ConfigError, DataError, ModelError, PartitaError, Problem, ResumeError, TrainingError

if TYPE_CHECKING:
    from partita.model import Model

__all__ = [
    "ConfigError",
    "DataError",
    "Model",
    "ModelError",
    "PartitaError",
    "Problem",
    "ResumeError",
    "TrainingError",
]


def __getattr__(name: str) -> Any:
    """`Model` on first use: torch takes seconds to import, and `partita validate` never needs it."""
    if name == "Model":
        from partita.model import Model

        return Model
    raise AttributeError(f"module 'partita' has no attribute {name!r}")
