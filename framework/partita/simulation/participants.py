"""Create the agents of a simulation from its configuration, with hashes of everything that affects their turns."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from partita.data.episode import AGENT
from partita.data.rows import digest
from partita.data.user_objects import source_digest
from partita.generation.oom_backoff import BatchBudget
from partita.lm.decoding.continuation import decode_continuation
from partita.pipeline.batch_sizes import BatchSizeTuner
from partita.pipeline.build import LocalPipeline
from partita.simulation.agents import Agent, GoldTurns, ScriptedLines, SingleTurnAgent
from partita.simulation.model_speaker import ModelSpec
from partita.simulation.registry import AGENTS, factory
from partita.simulation.rollout import Rollout
from partita.simulation.turn_answers import build_turn_answers
from partita.simulation.turns import TurnEncoder
from partita.simulation.worlds import AgentConversation, World
from partita_schema.errors import ConfigError, DataError, Problem
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
from partita_trainers.batch_size.probe import BatchSize

SpeakingAgent: TypeAlias = ModelAgentConfig | ScriptedAgentConfig | GoldAgentConfig
"""Agents that are models or programs; other agents speak as part of the world."""
DEFAULT_CONTEXT_TOKENS = 2048
"""Maximum number of tokens of a dialogue if neither the model nor the configuration has a limit."""


@dataclass(frozen=True)
class AgentModel:
    """A model that speaks for an agent."""

    pipeline: LocalPipeline
    tuner: BatchSizeTuner
    fingerprint: str
    """Hash of all weights."""

    @property
    def identity(self) -> str:
        """Hash of everything that affects its answers: the weights and the configuration."""
        config = self.pipeline.config
        sections = config.model_dump(mode="json", include={"prompt", "generation", "input_features", "output_features"})
        return digest(self.fingerprint, repr(sections), repr(config.data.dialogue.model_dump(mode="json")))


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
    (other,) = other_agents(section)
    return AgentConversation(
        other,
        max_turns=section.max_turns,
        done=world.done,
        agent_may_end=isinstance(world, SelfPlayWorldConfig),
        first=world.first,
        first_by_agent=isinstance(world, UserSimWorldConfig),
        instruction=section.agents.agent.prompt,
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


# Programs


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


# Models


class Participants:
    """The agents of a simulation: models, and factories of programs."""

    def __init__(
        self,
        section: Simulation,
        models: Mapping[str, AgentModel],
        programs: Mapping[str, Callable[[], Agent]],
        *,
        seed: int,
        rollout: type[Rollout] = Rollout,
    ) -> None:
        """Compute how many tokens each model has room for.

        Args:
            section: The simulation section.
            models: Models by agent.
            programs: Factories of programs by agent.
            seed: Seed for sampling, and of the contexts of programs.
            rollout: Class that runs the episodes.

        Raises:
            ConfigError: A model has no room for a prompt and an answer.
        """
        self.section, self.models, self.programs, self.seed = section, models, programs, seed
        self.rollout = rollout
        self.context_tokens = {
            agent: context_limit(model.pipeline, section, agent=agent) for agent, model in models.items()
        }

    def begin(
        self, world: World, sizes: Mapping[str, BatchSize], *, budget: BatchBudget, stopping: Callable[[], bool]
    ) -> Rollout:
        """Create a rollout.

        Args:
            world: Runs each episode.
            sizes: Batch sizes of all models by agent.
            budget: Batch budget of the main agent, which determines the number of concurrent episodes.
            stopping: Returns whether to stop.
        """
        agents: dict[str, ModelSpec | Callable[[], Agent]] = dict(self.programs)
        for agent in self.models:
            agents[agent] = self.model_spec(agent, budget if agent == AGENT else budget_of(sizes[agent], budget))
        limits = self.section.limits
        return self.rollout(
            world, agents, concurrency=budget.batch_size, seed=self.seed, limits=limits, stopping=stopping
        )

    def model_spec(self, agent: str, budget: BatchBudget) -> ModelSpec:
        """Return the model of an agent with its settings."""
        pipeline, context_tokens = self.models[agent].pipeline, self.context_tokens[agent]
        other = other_agents(self.section).get(agent)
        # The main agent's system prompt is None here: it is a message of the episode, written by the world.
        prompt = other.prompt if isinstance(other, ModelAgentConfig) else None
        max_new_tokens = answer_limit(pipeline)
        max_prompt_tokens = context_tokens - max_new_tokens
        return ModelSpec(
            pipeline.lm,
            turn_encoder(pipeline, self.section, agent=agent, prompt=prompt, max_prompt_tokens=max_prompt_tokens),
            options=pipeline.generation,
            budget=budget,
            context_tokens=context_tokens,
            max_new_tokens=max_new_tokens,
            seed=self.seed,
        )


def context_limit(pipeline: LocalPipeline, section: Simulation, *, agent: str) -> int:
    """Return the maximum number of tokens of a prompt and its answer together.

    Raises:
        ConfigError: The maximum answer leaves no token for a prompt.
    """
    row_tokenizer, new_tokens = pipeline.row_tokenizer, answer_limit(pipeline)
    read = pipeline.lm.context_length if pipeline.lm.answer_context is not None else None
    both = None if read is None else read + new_tokens
    limits = [tokens for tokens in (row_tokenizer.max_length, both, section.max_dialogue_tokens) if tokens is not None]
    limit = min(limits, default=DEFAULT_CONTEXT_TOKENS)
    if limit <= new_tokens:
        whose = "" if agent == AGENT else f" of agent {agent}"
        message = f"{limit} tokens leave no room for a prompt{whose} and an answer of {new_tokens}; "
        message += "write a smaller generation.max_new_tokens"
        raise ConfigError([Problem("simulation.max_dialogue_tokens", message)])
    return limit


def answer_limit(pipeline: LocalPipeline) -> int:
    """Return the maximum number of new tokens of an answer."""
    answers = pipeline.lm.answer_context
    limit = None if answers is None else answers.length
    return pipeline.max_new_tokens if limit is None else min(pipeline.max_new_tokens, limit)


def turn_encoder(
    pipeline: LocalPipeline, section: Simulation, *, agent: str, prompt: str | None, max_prompt_tokens: int
) -> TurnEncoder:
    """Create the prompt encoder of an agent.

    Args:
        pipeline: Pipeline of the agent's model.
        section: The simulation section.
        agent: Name of the agent.
        prompt: System prompt that only this agent sees.
        max_prompt_tokens: Maximum length of a prompt, if the configuration allows to drop turns.
    """
    feature = pipeline.config.dialogue_input
    assert feature is not None, "the schema asks for one"
    answers = build_turn_answers(pipeline.config, pipeline.decoder, reply=section.reply)
    drops = section.context.policy == "drop_oldest_turns"
    return TurnEncoder(
        pipeline.row_tokenizer,
        feature.name,
        partial(decode_continuation, pipeline.lm.tokenizer),
        agent=agent,
        prompt=prompt,
        max_prompt_tokens=max_prompt_tokens if drops else None,
        keep=section.context.keep,
        answers=answers,
        sequence=pipeline.sequence,
    )


def find_sizes(
    models: Mapping[str, AgentModel], section: Simulation, *, num_episodes: int, batch_size: int | None
) -> dict[str, BatchSize]:
    """Return the batch size of each model by agent.

    Args:
        models: Models by agent.
        section: The simulation section.
        num_episodes: Number of episodes.
        batch_size: Batch size that overrides the configuration.
    """
    sizes = {}
    for agent, model in models.items():
        prompt_tokens = context_limit(model.pipeline, section, agent=agent) - model.pipeline.max_new_tokens
        size = model.tuner.generation(np.full(num_episodes, prompt_tokens), batch_size=batch_size)
        # Each size is measured with the weights of all models in memory, but without the KV cache of the others. All
        # models answer at the same time, so each gets an equal share of what fits.
        if len(models) > 1 and size.max_fitting is not None:
            size = replace(size, rows=min(size.rows, max(1, size.max_fitting // len(models))))
        sizes[agent] = size
    return sizes


def budget_of(size: BatchSize, agent: BatchBudget) -> BatchBudget:
    """Return the batch budget of another agent's model, given that of the main agent.

    It has no `guard`, since the guard of the main agent is active during the whole rollout.
    """
    return BatchBudget(min(size.rows, agent.batch_size))
