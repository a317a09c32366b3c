"""The models of other agents of a simulation: of a run, of another file, or another base model with this file."""

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
"""Sections that hold for another base model as well."""


def agent_models(runtime: ModelRuntime) -> dict[str, AgentModel]:
    """Other models that speak in a simulation, by agent."""
    return {name: agent_model(other) for name, other in other_models(runtime).items() if other is not runtime}


def agent_model(runtime: ModelRuntime) -> AgentModel:
    """A model for an agent of a simulation."""
    pipeline = runtime.ready()
    fingerprint = model_fingerprint(pipeline, config=runtime.config, result=runtime.result)
    return AgentModel(pipeline, runtime.sizing, fingerprint)


def other_models(model: ModelRuntime) -> dict[str, ModelRuntime]:
    """Models in other agents than the agent's, by agent; the file's own is `model` itself. Raises ConfigError."""
    found: dict[str, ModelRuntime] = {}
    named: dict[tuple[str | None, ...], ModelRuntime] = {}
    for name, agent in other_agents(section_of(model.config)).items():
        if not isinstance(agent, ModelAgentConfig):
            continue
        place = (agent.run, agent.file, agent.base_model)
        if place not in named:  # one in several agents is in memory once
            named[place] = model if agent.is_own else other_model(model, agent, name=name)
        found[name] = named[place]
    return found


def other_model(model: ModelRuntime, agent: ModelAgentConfig, *, name: str) -> ModelRuntime:
    """The model of the agent `name` of the file of `model`. Raises ConfigError where it cannot speak there."""
    key = "run" if agent.run is not None else "file" if agent.file is not None else "base_model"
    where = f"{place_of(section_of(model.config), name)}.{key}"
    folder = model.loaded.folder
    try:
        if agent.run is not None:
            found = ModelRuntime.load(folder / agent.run, quiet=model.quiet, trust_remote_code=model.allows_saved_code)
        elif agent.file is not None:
            found = ModelRuntime(load_config(folder / agent.file), quiet=model.quiet)
        else:
            loaded = load_config(with_base_model(model, agent))
            found = ModelRuntime(replace(loaded, folder=folder), quiet=model.quiet)
    except (PartitaError, OSError) as error:
        raise ConfigError([Problem(where, str(error))]) from error
    if found.config.dialogue_input is None:
        raise ConfigError([Problem(where, "its file has no input of type dialogue; name a model of dialogues")])
    if is_served(found.config):
        raise ConfigError([Problem(where, SIMULATE)])
    # It belongs to the same processes.
    config = found.config.model_copy(update={"backend": model.config.backend})
    found.loaded = replace(found.loaded, config=config)
    return found


def with_base_model(model: ModelRuntime, agent: ModelAgentConfig) -> Mapping[str, Any]:
    """The file with the base model of an agent, which is only asked."""
    settings = model.config.model_dump(mode="json")
    features = ("input_features", "output_features", "defaults")
    kept = {section: settings[section] for section in (*ASKED_AS_HERE, *features)}
    dialogue = settings["data"]["dialogue"]
    asking = ("batch_size", "eval_batch_size", "max_batch_size", "memory_budget")
    trainer = {key: settings["trainer"][key] for key in asking if key in settings["trainer"]}
    return kept | {
        "base_model": agent.base_model,
        "quantization": settings["quantization"],
        "data": {"dialogue": dialogue},
        "trainer": {"type": "none", **trainer},
    }
