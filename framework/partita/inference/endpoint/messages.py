"""Prompts of a chat as the messages themselves, for a server that renders them."""

from collections.abc import Mapping, Sequence

from partita.data.shaping.chat import ChatTemplate, Rendered
from partita.data.shaping.formatter import Segment
from partita.inference.endpoint.protocol import written_messages


class Messages(ChatTemplate):
    """In place of a chat template: what `written_messages` makes of a dialogue."""

    def __init__(self, *, system: str | None) -> None:
        self.system = system
        self.needs_end = False

    def apply(self, messages: Sequence[Mapping[str, str]], *, prompt: bool) -> str:
        """The messages, one a line."""
        return written_messages(messages)

    def answer_segments(self, prompt: str, whole: Rendered, answer: str) -> tuple[Segment, ...]:
        """The message of the answer."""
        return (Segment(whole.text[len(prompt) :], True),)
