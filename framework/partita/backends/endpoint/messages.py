"""Chat prompts as lists of messages, for a server that renders them."""

from collections.abc import Mapping, Sequence

from partita.backends.endpoint.protocol import written_messages
from partita.data.formatting.chat import ChatTemplate, Rendered
from partita.data.formatting.formatter import Segment


class Messages(ChatTemplate):
    """A substitute for a chat template that writes a dialogue as `written_messages` does."""

    def __init__(self, *, system: str | None) -> None:
        self.system = system
        self.needs_end = False

    def apply(self, messages: Sequence[Mapping[str, str]], *, prompt: bool) -> str:
        """Return the messages, one per line."""
        return written_messages(messages)

    def answer_segments(self, prompt: str, whole: Rendered, answer: str) -> tuple[Segment, ...]:
        """Return the message of the answer."""
        return (Segment(whole.text[len(prompt) :], True),)
