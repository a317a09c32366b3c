"""Models of other agents in a simulation: from a run, from another file, or another base model with this file."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from partita.backends.context import ModelRuntime
from partita.backends.endpoint.verbs import SIMULATE, is_served
from partita.pipeline.fingerprint import model_fingerprint
from partita.simulation.opening import section_of
from partita.simulation.participants import AgentModel, other_agents, place_of
from partita_schema.agents import ModelAgentConfig
from partita_schema.errors import ConfigError, PartitaError, Problem
from partita_schema.load import load_config

ASKED_AS_HERE = ("version", "model_parameters", "trust_remote_code", "seed", "prompt", "generation", "preprocessing")
"""Sections that also apply to another base model."""


def agent_models(runtime: ModelRuntime) -> dict[str, AgentModel]:
    """Load the models of other agents, by agent. Agents that use the file's own model are left out."""
    return {name: agent_model(other) for name, other in other_models(runtime).items() if other is not runtime}


def agent_model(runtime: ModelRuntime) -> AgentModel:
    """Return the model of an agent, loaded."""
    pipeline = runtime.ready()
    fingerprint = model_fingerprint(pipeline, config=runtime.config, result=runtime.result)
    return AgentModel(pipeline, runtime.sizing, fingerprint)


def other_models(model: ModelRuntime) -> dict[str, ModelRuntime]:
    """Return the models of other agents by agent, where the file's own model is `model`. Raises ConfigError."""
    models: dict[str, ModelRuntime] = {}
    named: dict[tuple[str | None, ...], ModelRuntime] = {}
    for name, agent in other_agents(section_of(model.config)).items():
        if not isinstance(agent, ModelAgentConfig):
            continue
        place = (agent.run, agent.file, agent.base_model)
        if place not in named:  # a model of several agents is loaded once
            named[place] = model if agent.is_own else other_model(model, agent, name=name)
        models[name] = named[place]
    return models


def other_model(model: ModelRuntime, agent: ModelAgentConfig, *, name: str) -> ModelRuntime:
    """Return the model of another agent.

    Args:
        model: The model of the file.
        agent: Section of the agent.
        name: Name of the agent, for errors.

    Raises:
        ConfigError: The model cannot be loaded, has no input of type dialogue, or is served by an endpoint.
    """
    key = "run" if agent.run is not None else "file" if agent.file is not None else "base_model"
    where = f"{place_of(section_of(model.config), name)}.{key}"
    folder = model.loaded.folder
    try:
        if agent.run is not None:
            other = ModelRuntime.load(folder / agent.run, quiet=model.quiet, trust_remote_code=model.allows_saved_code)
        elif agent.file is not None:
            other = ModelRuntime(load_config(folder / agent.file), quiet=model.quiet)
        else:
            loaded = load_config(with_base_model(model, agent))
            other = ModelRuntime(replace(loaded, folder=folder), quiet=model.quiet)
    except (PartitaError, OSError) as error:
        raise ConfigError([Problem(where, str(error))]) from error
    if other.config.dialogue_input is None:
        raise ConfigError([Problem(where, "its file has no input of type dialogue; name a model of dialogues")])
    if is_served(other.config):
        raise ConfigError([Problem(where, SIMULATE)])
    # Both models run on the same processes.
    config = other.config.model_copy(update={"backend": model.config.backend})
    other.loaded = replace(other.loaded, config=config)
    return other


def with_base_model(model: ModelRuntime, agent: ModelAgentConfig) -> Mapping[str, Any]:
    """Return the settings of the file with the base model of an agent, for inference only."""
    settings = model.config.model_dump(mode="json")
    features = ("input_features", "output_features", "defaults")
    sections = {section: settings[section] for section in (*ASKED_AS_HERE, *features)}
    dialogue = settings["data"]["dialogue"]
    asking = ("batch_size", "eval_batch_size", "max_batch_size", "memory_budget")
    trainer = {key: settings["trainer"][key] for key in asking if key in settings["trainer"]}
    return sections | {
        "base_model": agent.base_model,
        "quantization": settings["quantization"],
        "data": {"dialogue": dialogue},
        "trainer": {"type": "none", **trainer},
    }
