"""Models of other agents in a simulation: from a run, from another file, or another base model with this file."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from partita.backends.context import RunContext
from partita.backends.refusals import ENDPOINT
from partita.simulation.agent_sections import agent_key, other_agents
from partita.simulation.build import section_of
from partita_schema.errors import ConfigError, PartitaError, Problem
from partita_schema.load import load_config
from partita_schema.sections.agents import ModelAgentConfig
from partita_schema.sections.backend import EndpointBackendConfig

SHARED_SECTIONS = ("version", "model_parameters", "trust_remote_code", "seed", "prompt", "generation", "preprocessing")
"""Sections that also apply to another base model."""


def agent_contexts(context: RunContext) -> dict[str, RunContext]:
    """Return the contexts of other agents' models, by agent; of the file's own model it is `context` itself.

    Raises:
        ConfigError: A model cannot be loaded, has no input of type dialogue, or is served by an endpoint.
    """
    contexts: dict[str, RunContext] = {}
    named: dict[tuple[str | None, ...], RunContext] = {}
    for name, agent in other_agents(section_of(context.config)).items():
        if not isinstance(agent, ModelAgentConfig):
            continue
        model = (agent.run, agent.file, agent.base_model)
        if model not in named:  # a model of several agents is loaded once
            named[model] = context if agent.is_own else agent_context(context, agent, name=name)
        contexts[name] = named[model]
    return contexts


def agent_context(context: RunContext, agent: ModelAgentConfig, *, name: str) -> RunContext:
    """Return the context of another agent's model.

    Args:
        context: The context of the file.
        agent: Section of the agent.
        name: Name of the agent, for errors.

    Raises:
        ConfigError: The model cannot be loaded, has no input of type dialogue, or is served by an endpoint.
    """
    key = "run" if agent.run is not None else "file" if agent.file is not None else "base_model"
    where = f"{agent_key(section_of(context.config), name)}.{key}"
    folder = context.loaded.folder
    try:
        if agent.run is not None:
            other = RunContext.load(
                folder / agent.run, quiet=context.quiet, trust_remote_code=context.allows_saved_code
            )
        elif agent.file is not None:
            other = RunContext(load_config(folder / agent.file), quiet=context.quiet)
        else:
            loaded = load_config(with_base_model(context, agent))
            other = RunContext(replace(loaded, folder=folder), quiet=context.quiet)
    except (PartitaError, OSError) as error:
        raise ConfigError([Problem(where, str(error))]) from error
    if other.config.dialogue_input is None:
        raise ConfigError([Problem(where, "its file has no input of type dialogue; name a model of dialogues")])
    if other.config.head_output is not None:
        raise ConfigError([Problem(where, "its model has a head and writes no text; name a model that answers")])
    if isinstance(other.config.backend, EndpointBackendConfig):
        raise ConfigError([Problem(where, f"simulate: {ENDPOINT.reasons['simulate']}")])
    # Both models run on the same processes.
    config = other.config.model_copy(update={"backend": context.config.backend})
    other.loaded = replace(other.loaded, config=config)
    return other


def with_base_model(context: RunContext, agent: ModelAgentConfig) -> Mapping[str, Any]:
    """Return the settings of the file with the base model of an agent, for inference only."""
    settings = context.config.model_dump(mode="json")
    features = ("input_features", "output_features", "defaults")
    sections = {section: settings[section] for section in (*SHARED_SECTIONS, *features)}
    dialogue = settings["data"]["dialogue"]
    size_keys = ("batch_size", "eval_batch_size", "max_batch_size", "memory_budget")
    trainer = {key: settings["trainer"][key] for key in size_keys if key in settings["trainer"]}
    return sections | {
        "base_model": agent.base_model,
        "quantization": settings["quantization"],
        "data": {"dialogue": dialogue},
        "trainer": {"type": "none", **trainer},
    }
