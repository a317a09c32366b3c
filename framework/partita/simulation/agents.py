"""Agents that are neither models nor environments: programs, scripted lines and turns of a dataset.

An agent receives a batch of contexts and returns a reply to each. A reply must depend on its context alone; an episode
is then the same in any batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from partita.data.episode import Episode, derived_seed
from partita.simulation.contract import ContractError, Message, format_value


@dataclass(frozen=True)
class TurnContext:
    """The state of an episode as seen by the agent whose turn it is."""

    dialogue: str
    """Identifier of the episode."""
    task: Mapping[str, Any]
    """The task of the episode."""
    messages: Sequence[Message]
    """Messages so far: the agent's own have the role assistant, all others the role user."""
    turn: int
    """Number of turns that the agent has had before."""
    seed: int
    """Seed for random numbers, different for each episode and turn."""


class Agent(Protocol):
    """Interface of agents, which speak in episodes."""

    def act(self, contexts: Sequence[TurnContext]) -> Sequence[str | None]:
        """Return a reply to each context; None to say nothing more in that episode."""


class SingleTurnAgent:
    """Adapter for programs with `reply(context)`, which handle one episode at a time."""

    def __init__(self, agent: Any) -> None:
        self.agent = agent

    def act(self, contexts: Sequence[TurnContext]) -> list[str | None]:
        """Call `reply` for each context."""
        return [self.agent.reply(context) for context in contexts]


class ScriptedLines:
    """Agent that says the given lines, with `{column}` replaced by values of the task."""

    def __init__(self, lines: Sequence[str]) -> None:
        self.lines = lines

    def act(self, contexts: Sequence[TurnContext]) -> list[str | None]:
        """Return the next line of each episode, None after the last one."""
        return [
            self.lines[context.turn].format_map(context.task) if context.turn < len(self.lines) else None
            for context in contexts
        ]


class GoldTurns:
    """Agent that repeats the user turns of the task's dialogue."""

    def act(self, contexts: Sequence[TurnContext]) -> list[str | None]:
        """Return the next user turn of each task, None after the last one."""
        return [self.turn(context) for context in contexts]

    def turn(self, context: TurnContext) -> str | None:
        """Return the next user turn of one task, None after the last one."""
        turns = [message["content"] for message in context.task["messages"] if message["role"] == "user"]
        return turns[context.turn] if context.turn < len(turns) else None


def context_of(episode: Episode, agent: str, *, seed: int) -> TurnContext:
    """Build the context of an agent's next turn in an episode."""
    turn = episode.turns_of(agent)
    return TurnContext(
        episode.key,
        episode.task,
        tuple(episode.seen_by(agent)),
        turn,
        derived_seed(seed, episode.key, str(turn), agent),
    )


def replies_of(replies: Any, *, count: int) -> Sequence[str | None]:
    """Validate the result of `act`. Raises ContractError."""
    if not isinstance(replies, Sequence) or isinstance(replies, str) or len(replies) != count:
        raise ContractError(f"act gave {format_value(replies)} for {count} contexts; give a list with a reply to each")
    for reply in replies:
        if not isinstance(reply, str | None):
            raise ContractError(f"act gave the reply {format_value(reply)}; give a text, or None to say no more")
    return replies
