"""From `simulation.agents` to those who speak, and what of them decides the dialogues."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from partita.data.episode import AGENT
from partita.data.parts import source_digest
from partita.data.rows import digest
from partita.generation.oom_backoff import BatchLimit, Capacity
from partita.lm.continuation import decode_continuation
from partita.pipeline.batch_sizes import BatchSizeTuner
from partita.pipeline.build import Pipeline
from partita.simulation.agents import Agent, GoldTurns, ScriptedLines, SingleTurnAgent
from partita.simulation.conversation import Conversation
from partita.simulation.outside import made
from partita.simulation.registry import AGENTS
from partita.simulation.rollout import Rollout
from partita.simulation.speakers import ModelSpec
from partita.simulation.turns import TurnEncoder
from partita.simulation.worlds import World
from partita_schema.agents import (
    CustomWorldConfig,
    GoldAgentConfig,
    ModelAgentConfig,
    ScriptedAgentConfig,
    SelfPlayWorldConfig,
    UserSimWorldConfig,
    agents_beside_main,
)
from partita_schema.errors import ConfigError, DataError, Problem
from partita_schema.prompt import template_fields
from partita_schema.simulation import Simulation
from partita_trainers.batch_size.probe import BatchSize

SpeakingAgent: TypeAlias = ModelAgentConfig | ScriptedAgentConfig | GoldAgentConfig
"""An agent whose words come from elsewhere than the world."""
ROOM = 2048
"""Tokens of a dialogue where neither the model nor the file has a limit."""


@dataclass(frozen=True)
class AgentModel:
    """A model that speaks for an agent."""

    pipeline: Pipeline
    sizing: BatchSizeTuner
    fingerprint: str
    """A hash of all its weights."""

    @property
    def identity(self) -> str:
        """A hash of all that decides its answers."""
        config = self.pipeline.config
        sections = config.model_dump(mode="json", include={"prompt", "generation", "input_features", "output_features"})
        return digest(self.fingerprint, repr(sections), repr(config.data.dialogue.model_dump(mode="json")))


def other_agents(section: Simulation) -> dict[str, SpeakingAgent]:
    """Who speaks beside the agent, by name; in worlds of an environment and of a data set nobody."""
    agents, world = section.agents, section.world
    found: dict[str, Any] = {}
    if isinstance(world, UserSimWorldConfig):
        found = {"user": agents.user}
    elif isinstance(world, SelfPlayWorldConfig):
        found = {"partner": agents.partner or ModelAgentConfig(type="model")}
    elif isinstance(world, CustomWorldConfig):
        found = {place.removeprefix("others."): agent for place, agent in agents_beside_main(agents).items()}
    assert all(
        isinstance(agent, ModelAgentConfig | ScriptedAgentConfig | GoldAgentConfig) for agent in found.values()
    ), "as the schema asks"
    return found


def place_of(section: Simulation, name: str) -> str:
    """Where an agent stands in the file."""
    return f"simulation.agents.{'others.' if name in section.agents.others else ''}{name}"


def build_conversation(section: Simulation) -> Conversation:
    """The world in which two agents talk."""
    world = section.world
    assert isinstance(world, UserSimWorldConfig | SelfPlayWorldConfig)
    (other,) = other_agents(section)
    return Conversation(
        other,
        max_turns=section.max_turns,
        done=world.done,
        agent_may_end=isinstance(world, SelfPlayWorldConfig),
        first=world.first,
        first_by_agent=isinstance(world, UserSimWorldConfig),
        instruction=section.agents.agent.prompt,
    )


def check_columns(section: Simulation, tasks: Sequence[tuple[str, Mapping[str, object]]]) -> None:
    """Raises DataError where a text of the file names a column that a task, by its key, does not have."""
    for where, template in templates(section):
        for key, values in tasks:
            missing = [name for name in template_fields(template) if name not in values]
            if missing:
                raise DataError(
                    f"tasks: {key}: {where} names {{{missing[0]}}}; the task has {', '.join(map(str, values))}"
                )


def templates(section: Simulation) -> Iterator[tuple[str, str]]:
    """Texts with columns in them, and where they stand."""
    texts: dict[str, str | None] = {}
    if isinstance(section.world, UserSimWorldConfig | SelfPlayWorldConfig):
        texts["simulation.world.first"] = section.world.first
        texts["simulation.agents.agent.prompt"] = section.agents.agent.prompt
    for name, agent in other_agents(section).items():
        place = place_of(section, name)
        if isinstance(agent, ModelAgentConfig):
            texts[f"{place}.prompt"] = agent.prompt
        elif isinstance(agent, ScriptedAgentConfig):
            texts |= {f"{place}.lines[{number}]": line for number, line in enumerate(agent.lines)}
    yield from ((where, text) for where, text in texts.items() if text is not None)


# Programs


def build_programs(section: Simulation, *, folder: Path) -> tuple[dict[str, Callable[[], Agent]], dict[str, str]]:
    """What makes the programs that speak, by agent, and hashes of them. Raises ConfigError where one is not there."""
    programs: dict[str, Callable[[], Agent]] = {}
    about: dict[str, str] = {}
    for name, agent in other_agents(section).items():
        if not isinstance(agent, ModelAgentConfig):
            programs[name], about[f"agent {name}"] = build_program(agent, key=place_of(section, name), folder=folder)
    return programs, about


def build_program(
    agent: ScriptedAgentConfig | GoldAgentConfig, *, key: str, folder: Path
) -> tuple[Callable[[], Agent], str]:
    """What makes the program of an agent that stands at `key`, and a hash. Raises ConfigError where it is not there."""
    if isinstance(agent, GoldAgentConfig):
        return GoldTurns, "gold"
    if agent.program is None:
        lines = agent.lines
        return lambda: ScriptedLines(lines), digest(*lines)
    kind = AGENTS.load(agent.program, key=f"{key}.program", folder=folder)
    make = made(kind, agent.options, key=f"{key}.options")
    if callable(getattr(kind, "act", None)):
        return make, source_digest(kind)
    if not callable(getattr(kind, "reply", None)):
        message = f"{kind.__name__} has neither act(contexts) nor reply(context); write one of them"
        raise ConfigError([Problem(f"{key}.program", message)])
    return lambda: SingleTurnAgent(make()), source_digest(kind)


# Models


class Participants:
    """Those who speak in the dialogues of a simulation."""

    def __init__(
        self,
        section: Simulation,
        models: Mapping[str, AgentModel],
        programs: Mapping[str, Callable[[], Agent]],
        *,
        seed: int,
        rollout: type[Rollout] = Rollout,
    ) -> None:
        """Models and what makes programs, by agent; `rollout` has the dialogues.

        Raises ConfigError where a model has no room for an answer.
        """
        self.section, self.models, self.programs, self.seed = section, models, programs, seed
        self.rollout = rollout
        self.rooms = {agent: room_of(model.pipeline, section, agent=agent) for agent, model in models.items()}

    def begin(
        self, world: World, sizes: Mapping[str, BatchSize], *, capacity: Capacity, stopping: Callable[[], bool]
    ) -> Rollout:
        """What has dialogues, as many at a time as the agent has `capacity` for; other models answer up to `sizes`."""
        agents: dict[str, ModelSpec | Callable[[], Agent]] = dict(self.programs)
        for agent in self.models:
            agents[agent] = self.voice(agent, capacity if agent == AGENT else capacity_of(sizes[agent], capacity))
        limits = self.section.limits
        return self.rollout(world, agents, lanes=capacity.rows, seed=self.seed, limits=limits, stopping=stopping)

    def voice(self, agent: str, capacity: Capacity) -> ModelSpec:
        """The model that speaks for an agent."""
        pipeline, room = self.models[agent].pipeline, self.rooms[agent]
        other = other_agents(self.section).get(agent)
        told = (
            other.prompt if isinstance(other, ModelAgentConfig) else None
        )  # what the agent is told stands in the dialogue
        most_tokens = room - pipeline.max_new_tokens
        return ModelSpec(
            pipeline.lm,
            turn_encoder(pipeline, self.section, agent=agent, prompt=told, most_tokens=most_tokens),
            options=pipeline.generation,
            capacity=capacity,
            room=room,
            max_new_tokens=pipeline.max_new_tokens,
            seed=self.seed,
        )


def room_of(pipeline: Pipeline, section: Simulation, *, agent: str) -> int:
    """Tokens of a prompt and its answer. Raises ConfigError where an answer alone has more."""
    limits = [limit for limit in (pipeline.encoder.max_length, section.max_dialogue_tokens) if limit is not None]
    room = min(limits, default=ROOM)
    if room <= pipeline.max_new_tokens:
        whose = "" if agent == AGENT else f" of agent {agent}"
        message = f"{room} tokens leave no room for a prompt{whose} beside an answer of {pipeline.max_new_tokens}; "
        message += "write a smaller generation.max_new_tokens"
        raise ConfigError([Problem("simulation.max_dialogue_tokens", message)])
    return room


def turn_encoder(
    pipeline: Pipeline, section: Simulation, *, agent: str, prompt: str | None, most_tokens: int
) -> TurnEncoder:
    """What makes an agent's prompts."""
    feature = pipeline.config.dialogue_input
    assert feature is not None, "the schema asks for one"
    drops = section.context.policy == "drop_oldest_turns"
    return TurnEncoder(
        pipeline.encoder,
        feature.name,
        partial(decode_continuation, pipeline.lm.tokenizer),
        agent=agent,
        prompt=prompt,
        most_tokens=most_tokens if drops else None,
        keep=section.context.keep,
    )


def find_sizes(
    models: Mapping[str, AgentModel], section: Simulation, *, dialogues: int, rows: int | None
) -> dict[str, BatchSize]:
    """Rows that each model answers at a time.

    Sizes are looked for with all models in memory, but each without the answers of the others: of what fits, each
    takes its share.
    """
    found = {}
    for agent, model in models.items():
        room = room_of(model.pipeline, section, agent=agent)
        size = model.sizing.generation(np.full(dialogues, room - model.pipeline.max_new_tokens), rows=rows)
        if len(models) > 1 and size.max_fitting is not None:
            size = replace(size, rows=min(size.rows, max(1, size.max_fitting // len(models))))
        found[agent] = size
    return found


def capacity_of(size: BatchSize, agent: Capacity) -> Capacity:
    """What a model of another agent may put on the device at once; the agent's guard holds for all."""
    rows = min(size.rows, agent.rows)
    return Capacity(rows, BatchLimit(rows))
