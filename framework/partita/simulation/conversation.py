"""Two agents talk to each other: a user that is played, or a partner that may be the same model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from partita.data.episode import AGENT, Episode
from partita.simulation.worlds import Play, RequestTurn


@dataclass(frozen=True)
class Conversation:
    """The other agent and the agent speak in turn, until one says that all is done, or has no more to say."""

    other: str
    """Agent that the agent talks to."""
    max_turns: int
    done: str
    """The dialogue is done once words hold this."""
    agent_may_end: bool = False
    """Whether the agent's words may as well."""
    first: str | None = None
    """What is taken to have been said before, with {column} for values of the task."""
    first_by_agent: bool = False
    """Whether the agent is taken to have said it, and not the other."""
    instruction: str | None = None
    """What the agent is told by the system."""

    def run(self, episode: Episode) -> Play:
        """From the first word to the last."""
        if self.instruction is not None:
            told = {"role": "system", "content": filled(self.instruction, episode.task)}
            episode.observe([told], agent="system")
        if self.first is not None:
            self.begin(episode, filled(self.first, episode.task))
        if self.first is None or self.first_by_agent:
            yield from self.other_speaks(episode)
        while episode.status is None:
            yield RequestTurn()
            if self.agent_may_end and self.done in episode.replies[-1].text:
                episode.end("done")
            else:
                yield from self.other_speaks(episode)

    def begin(self, episode: Episode, text: str) -> None:
        """Note what is taken to have been said."""
        role, agent = ("assistant", AGENT) if self.first_by_agent else ("user", self.other)
        episode.observe([{"role": role, "content": text}], agent=agent)

    def other_speaks(self, episode: Episode) -> Play:
        """The other's turn, after which the dialogue may be over."""
        before = len(episode.messages)
        yield RequestTurn(self.other)
        if len(episode.messages) == before or self.done in episode.messages[-1]["content"]:
            episode.end("done")
        elif len(episode.replies) >= self.max_turns:
            episode.end("truncated", "turns")


def filled(template: str, task: Mapping[str, Any]) -> str:
    """A template with the values of a task."""
    return template.format_map(task)
