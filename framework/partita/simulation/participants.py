"""The agents of a simulation: their models, what these have room for, and the rollout with them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from partita.data.episode import AGENT
from partita.data.rows import digest
from partita.generation.oom_backoff import BatchBudget
from partita.lm.decoding.continuation import decode_continuation
from partita.pipeline.batch_sizes import BatchSizeTuner
from partita.pipeline.build import LocalPipeline
from partita.simulation.agent_sections import other_agents
from partita.simulation.agents import Agent
from partita.simulation.model_speaker import ModelSpec
from partita.simulation.rollout import Rollout
from partita.simulation.turn_answers import build_turn_answers
from partita.simulation.turns import TurnEncoder
from partita.simulation.worlds import World
from partita_schema.errors import ConfigError, Problem
from partita_schema.sections.agents import ModelAgentConfig
from partita_schema.sections.simulation import Simulation
from partita_trainers.batch_size.probe import BatchSize

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
