"""Agents that are programs: factories, and hashes of their sources."""

from collections.abc import Callable, Sequence
from pathlib import Path

from partita.data.rows import digest
from partita.data.user_objects import source_digest
from partita.simulation.agent_sections import agent_key, other_agents
from partita.simulation.agents import Agent, GoldTurns, ScriptedLines, SingleTurnAgent
from partita.simulation.registry import AGENTS, factory
from partita_schema.errors import ConfigError, Problem
from partita_schema.sections.agents import GoldAgentConfig, ModelAgentConfig, ScriptedAgentConfig, SelfPlayWorldConfig
from partita_schema.sections.simulation import Simulation


def build_programs(section: Simulation, *, folder: Path) -> tuple[dict[str, Callable[[], Agent]], dict[str, str]]:
    """Return factories of the agents that are programs, by agent, and hashes of their sources.

    Raises:
        ConfigError: A program was not found, or cannot be created with its options.
    """
    programs: dict[str, Callable[[], Agent]] = {}
    hashes: dict[str, str] = {}
    for name, agent in other_agents(section).items():
        if not isinstance(agent, ModelAgentConfig):
            key, said = agent_key(section, name), first_line(section)
            programs[name], hashes[f"agent {name}"] = build_program(agent, key=key, folder=folder, said=said)
    return programs, hashes


def first_line(section: Simulation) -> Sequence[str]:
    """Return what the other agent of a conversation has said before its first turn, as a list of at most one line."""
    world = section.world
    return [world.first] if isinstance(world, SelfPlayWorldConfig) and world.first is not None else []


def build_program(
    agent: ScriptedAgentConfig | GoldAgentConfig, *, key: str, folder: Path, said: Sequence[str]
) -> tuple[Callable[[], Agent], str]:
    """Return a factory of an agent's program and a hash of its source.

    Args:
        agent: Configuration of the agent.
        key: Configuration key of the agent, for errors.
        folder: Folder to import the program from.
        said: Lines that count as said by the agent, before those of a script.

    Raises:
        ConfigError: The program was not found, or cannot be created with its options.
    """
    if isinstance(agent, GoldAgentConfig):
        return GoldTurns, "gold"
    if agent.program is None:
        lines = (*said, *agent.lines)
        return lambda: ScriptedLines(lines), digest(*lines)
    kind = AGENTS.load(agent.program, key=f"{key}.program", folder=folder)
    make = factory(kind, agent.options, key=f"{key}.options")
    if callable(getattr(kind, "act", None)):
        return make, source_digest(kind)
    if not callable(getattr(kind, "reply", None)):
        message = f"{kind.__name__} has neither act(contexts) nor reply(context); write one of them"
        raise ConfigError([Problem(f"{key}.program", message)])
    return lambda: SingleTurnAgent(make()), source_digest(kind)
