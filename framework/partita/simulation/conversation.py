"""World in which the main agent talks with another agent: a simulated user, or a partner in self-play."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from partita.data.episode import AGENT, Episode
from partita.simulation.worlds import Play, RequestTurn


@dataclass(frozen=True)
class Conversation:
    """World in which two agents alternate until one ends the dialogue or has nothing more to say."""

    other: str
    """Name of the other agent."""
    max_turns: int
    """Turns of the main agent after which an episode is truncated."""
    done: str
    """Text that ends the dialogue when a turn of the other agent contains it."""
    agent_may_end: bool = False
    """Whether `done` in a turn of the main agent ends the dialogue as well."""
    first: str | None = None
    """Fixed first message, with `{column}` for values of the task."""
    first_by_agent: bool = False
    """Whether the first message is the main agent's instead of the other agent's."""
    instruction: str | None = None
    """System prompt of the main agent, with `{column}` for values of the task."""

    def run(self, episode: Episode) -> Play:
        """Run an episode: system prompt, first message, then alternating turns."""
        if self.instruction is not None:
            message = {"role": "system", "content": filled(self.instruction, episode.task)}
            episode.observe([message], agent="system")
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
        """Append the fixed first message."""
        role, agent = ("assistant", AGENT) if self.first_by_agent else ("user", self.other)
        episode.observe([{"role": role, "content": text}], agent=agent)

    def other_speaks(self, episode: Episode) -> Play:
        """Request a turn of the other agent; end the episode if it says `done` or nothing, or at the turn limit."""
        before = len(episode.messages)
        yield RequestTurn(self.other)
        if len(episode.messages) == before or self.done in episode.messages[-1]["content"]:
            episode.end("done")
        elif len(episode.replies) >= self.max_turns:
            # Checked after the other agent's turn: it may still end the dialogue after the last answer.
            episode.end("truncated", "turns")


def filled(template: str, task: Mapping[str, Any]) -> str:
    """Fill a template with the values of a task."""
    return template.format_map(task)
