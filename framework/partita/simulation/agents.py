"""Who speaks in a dialogue, where it is neither the model nor an environment: programs, written lines, data sets.

An agent is asked for many dialogues at once and gives a reply to each. What it says must follow from the context alone:
then a dialogue is the same whatever stands beside it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from partita.data.episode import Episode, derived_seed
from partita.simulation.contract import ContractError, Message, shown


@dataclass(frozen=True)
class TurnContext:
    """A dialogue as an agent sees it whose turn it is."""

    dialogue: str
    """Names the dialogue."""
    task: Mapping[str, Any]
    messages: Sequence[Message]
    """What was said: its own words are those of the assistant, the other's those of the user."""
    turn: int
    """How often it has spoken before."""
    seed: int
    """What anything random is to follow from; another one for each dialogue and turn."""


class Agent(Protocol):
    """Somebody who speaks."""

    def act(self, contexts: Sequence[TurnContext]) -> Sequence[str | None]:
        """What it says in each of these dialogues; None where it has no more to say."""


class SingleTurnAgent:
    """An agent made of an agent that knows one dialogue at a time, with `reply(context)`."""

    def __init__(self, agent: Any) -> None:
        self.agent = agent

    def act(self, contexts: Sequence[TurnContext]) -> list[str | None]:
        """A reply after the other."""
        return [self.agent.reply(context) for context in contexts]


class ScriptedLines:
    """Says written lines, with values of the task in their braces."""

    def __init__(self, lines: Sequence[str]) -> None:
        self.lines = lines

    def act(self, contexts: Sequence[TurnContext]) -> list[str | None]:
        """The next line."""
        return [
            self.lines[context.turn].format_map(context.task) if context.turn < len(self.lines) else None
            for context in contexts
        ]


class GoldTurns:
    """Says again what was said to the assistant in the task's own dialogue."""

    def act(self, contexts: Sequence[TurnContext]) -> list[str | None]:
        """The next turn of the user."""
        return [self.turn(context) for context in contexts]

    def turn(self, context: TurnContext) -> str | None:
        said = [message["content"] for message in context.task["messages"] if message["role"] == "user"]
        return said[context.turn] if context.turn < len(said) else None


def context_of(episode: Episode, agent: str, *, seed: int) -> TurnContext:
    """A dialogue as an agent sees it."""
    turn = episode.turns_of(agent)
    return TurnContext(
        episode.key,
        episode.task,
        tuple(episode.seen_by(agent)),
        turn,
        derived_seed(seed, episode.key, str(turn), agent),
    )


def replies_of(found: Any, *, count: int) -> Sequence[str | None]:
    """What `act` gave. Raises ContractError."""
    if not isinstance(found, Sequence) or isinstance(found, str) or len(found) != count:
        raise ContractError(f"act gave {shown(found)} for {count} contexts; give a list with a reply to each")
    for reply in found:
        if not isinstance(reply, str | None):
            raise ContractError(f"act gave the reply {shown(reply)}; give a text, or None to say no more")
    return found
