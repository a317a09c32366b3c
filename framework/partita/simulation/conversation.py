"""Two seats talk to each other: a user that is played, or a partner that may be the same model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from partita.simulation.dialogue import AGENT, Dialogue
from partita.simulation.worlds import Ask, Play


@dataclass(frozen=True)
class Conversation:
    """The other seat and the agent speak in turn, until one says that all is done, or has no more to say."""

    other: str
    """Seat that the agent talks to."""
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

    def play(self, dialogue: Dialogue) -> Play:
        """From the first word to the last."""
        if self.instruction is not None:
            told = {"role": "system", "content": filled(self.instruction, dialogue.task)}
            dialogue.hear([told], seat="system")
        if self.first is not None:
            self.begin(dialogue, filled(self.first, dialogue.task))
        if self.first is None or self.first_by_agent:
            yield from self.other_speaks(dialogue)
        while dialogue.status is None:
            yield Ask()
            if self.agent_may_end and self.done in dialogue.replies[-1].text:
                dialogue.end("done")
            else:
                yield from self.other_speaks(dialogue)

    def begin(self, dialogue: Dialogue, text: str) -> None:
        """Note what is taken to have been said."""
        role, seat = ("assistant", AGENT) if self.first_by_agent else ("user", self.other)
        dialogue.hear([{"role": role, "content": text}], seat=seat)

    def other_speaks(self, dialogue: Dialogue) -> Play:
        """The other's turn, after which the dialogue may be over."""
        before = len(dialogue.messages)
        yield Ask(self.other)
        if len(dialogue.messages) == before or self.done in dialogue.messages[-1]["content"]:
            dialogue.end("done")
        elif len(dialogue.replies) >= self.max_turns:
            dialogue.end("truncated", "turns")


def filled(template: str, task: Mapping[str, Any]) -> str:
    """A template with the values of a task."""
    return template.format_map(task)
