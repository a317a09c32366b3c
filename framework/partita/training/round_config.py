"""The configuration with which a round of self-training trains: that of the run, with other rows and steps."""

from collections.abc import Callable
from itertools import count
from typing import Any

from pydantic import ValidationError

from partita_schema.config import Config
from partita_schema.errors import ConfigError, Problem
from partita_schema.sections.self_training import SelfTrainingConfig
from partita_schema.sections.sources import SimulationSource, default_name, numbered_name

SourceOf = Callable[[int], SimulationSource]
"""Returns the source that reads the dialogues of a round."""


def transcripts_source(plan: SelfTrainingConfig, path: str) -> SimulationSource:
    """Return the source that reads training rows from a transcript file."""
    return SimulationSource(type="simulation", path=path, select=plan.select, target=plan.target)


def check_round_configs(config: Config, plan: SelfTrainingConfig) -> None:
    """Raise ConfigError if a round has no valid configuration."""
    # Rounds differ in their number of sources: the first round has the fewest, and this one the most.
    most = min(plan.rounds, plan.keep_rounds)
    for number in sorted({1, most}):
        try:
            round_config(config, plan, number, source_of=lambda round_: transcripts_source(plan, f"round-{round_}"))
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(str(part) for part in (*first["loc"], first.get("ctx", {}).get("at")) if part)
            message = f"round {number} cannot be trained, because of its {key}: {first['msg']}"
            raise ConfigError([Problem("simulation.self_training", message)]) from None


def round_config(config: Config, plan: SelfTrainingConfig, number: int, *, source_of: SourceOf) -> Config:
    """Return the configuration of a round's training, without the `simulation` section.

    Args:
        config: The configuration of the run.
        plan: Its section `simulation.self_training`.
        number: Number of the round, from 1.
        source_of: Returns the source of a round's dialogues.
    """
    settings = config.model_dump(mode="json")
    settings["simulation"] = None
    settings["data"] |= round_data(config, plan, number, source_of=source_of)
    if settings["data"]["mix"] is None:
        del settings["data"]["stop"]
    trainer = settings["trainer"]
    trainer["evaluate_base"] = False  # it is the result of the round before
    if plan.epochs is not None or plan.max_steps is not None:
        trainer |= {"epochs": plan.epochs, "max_steps": plan.max_steps}
    else:
        trainer |= {"epochs": 1.0, "max_steps": None}
    if plan.learning_rate is not None:
        trainer["learning_rate"] = plan.learning_rate
    return Config.model_validate(settings)


def round_data(config: Config, plan: SelfTrainingConfig, number: int, *, source_of: SourceOf) -> dict[str, Any]:
    """Return the data sources of a round with their weights.

    Args:
        config: The configuration of the run.
        plan: Its section `simulation.self_training`.
        number: Number of the round, from 1.
        source_of: Returns the source of a round's dialogues.
    """
    data = config.data
    parts: list[dict[str, Any]] = []
    if data.mix is not None and plan.mix < 1:
        weights = data.mix_weights
        for name, part, written in zip(data.mix_names, data.mix, weights, strict=True):
            weight = (1 - plan.mix) * written / sum(weights)
            parts.append(part.model_dump(mode="json") | {"name": name, "weight": weight})
    elif data.source is not None and plan.mix < 1:
        source = data.source if isinstance(data.source, str) else data.source.model_dump(mode="json")
        parts.append({"source": source, "name": default_name(data.source), "weight": 1 - plan.mix})
    taken = {part["name"] for part in parts}
    first = max(1, number - plan.keep_rounds + 1)
    weight = (plan.mix if parts else 1.0) / (number - first + 1)
    for earlier in range(first, number + 1):
        names = (numbered_name(f"round-{earlier}", same) for same in count(1))
        name = next(name for name in names if name not in taken)
        parts.append({"source": source_of(earlier).model_dump(mode="json"), "name": name, "weight": weight})
    if len(parts) == 1:
        return {"source": parts[0]["source"], "mix": None}
    return {"source": None, "mix": parts}
