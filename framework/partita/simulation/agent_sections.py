"""What the simulation section says about agents: which ones speak, and which columns their prompts name."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from partita.simulation.worlds import AgentConversation
from partita_schema.errors import DataError
from partita_schema.sections.agents import (
    CustomWorldConfig,
    GoldAgentConfig,
    ModelAgentConfig,
    ScriptedAgentConfig,
    SelfPlayWorldConfig,
    UserSimWorldConfig,
)
from partita_schema.sections.prompt import template_fields
from partita_schema.sections.simulation import Simulation, other_agent_sections

SpeakingAgent: TypeAlias = ModelAgentConfig | ScriptedAgentConfig | GoldAgentConfig
"""Agents that are models or programs; other agents speak as part of the world."""


def other_agents(section: Simulation) -> dict[str, SpeakingAgent]:
    """Return the agents other than the main agent by name; none for environments and replay."""
    agents, world = section.agents, section.world
    others: dict[str, Any] = {}
    if isinstance(world, UserSimWorldConfig):
        others = {"user": agents.user}
    elif isinstance(world, SelfPlayWorldConfig):
        others = {"partner": agents.partner or ModelAgentConfig(type="model")}
    elif isinstance(world, CustomWorldConfig):
        others = {key.removeprefix("others."): agent for key, agent in other_agent_sections(agents).items()}
    assert all(
        isinstance(agent, ModelAgentConfig | ScriptedAgentConfig | GoldAgentConfig) for agent in others.values()
    ), "as the schema asks"
    return others


def agent_key(section: Simulation, name: str) -> str:
    """Return the configuration key of an agent."""
    return f"simulation.agents.{'others.' if name in section.agents.others else ''}{name}"


def build_conversation(section: Simulation) -> AgentConversation:
    """Build the world of a user simulation or of self-play."""
    world = section.world
    assert isinstance(world, UserSimWorldConfig | SelfPlayWorldConfig)
    [(other, speaks)] = other_agents(section).items()
    return AgentConversation(
        other,
        max_turns=section.max_turns,
        done=world.done,
        agent_may_end=isinstance(world, SelfPlayWorldConfig),
        first=world.first,
        first_by_agent=isinstance(world, UserSimWorldConfig),
        instruction=section.agents.agent.prompt,
        shows_system=isinstance(speaks, GoldAgentConfig),
    )


def check_columns(section: Simulation, tasks: Sequence[tuple[str, Mapping[str, object]]]) -> None:
    """Check that every task has the columns that the templates of the configuration name.

    Args:
        section: The simulation section.
        tasks: Key and columns of each task.

    Raises:
        DataError: A task lacks a column.
    """
    for where, template in templates(section):
        for key, values in tasks:
            missing = [name for name in template_fields(template) if name not in values]
            if missing:
                raise DataError(
                    f"tasks: {key}: {where} names {{{missing[0]}}}; the task has {', '.join(map(str, values))}"
                )
            empty = [name for name in template_fields(template) if values[name] is None]
            if empty:
                raise DataError(f"tasks: {key}: {where} names {{{empty[0]}}}, which is empty in this task")


def templates(section: Simulation) -> Iterator[tuple[str, str]]:
    """Yield the configuration key and the text of each template."""
    texts: dict[str, str | None] = {}
    if isinstance(section.world, UserSimWorldConfig | SelfPlayWorldConfig):
        texts["simulation.world.first"] = section.world.first
        texts["simulation.agents.agent.prompt"] = section.agents.agent.prompt
    for name, agent in other_agents(section).items():
        key = agent_key(section, name)
        if isinstance(agent, ModelAgentConfig):
            texts[f"{key}.prompt"] = agent.prompt
        elif isinstance(agent, ScriptedAgentConfig):
            texts |= {f"{key}.lines[{number}]": line for number, line in enumerate(agent.lines)}
    yield from ((where, text) for where, text in texts.items() if text is not None)
