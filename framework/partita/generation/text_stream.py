"""The text of an answer in pieces, as its tokens arrive.

A piece ends neither within a character nor within what may become a stop string. Only the last tokens are decoded for a
piece, so the time does not grow with the length of the answer.
"""

from collections.abc import Sequence
from typing import Any

from partita.lm.continuation import decode_continuation

INCOMPLETE = "\ufffd"
"""What a tokenizer decodes incomplete characters to."""


class TextStream:
    """Returns the text of an answer piece by piece."""

    def __init__(self, tokenizer: Any, *, stop: Sequence[str] = ()) -> None:
        """Start with an empty answer; `stop` are its stop strings."""
        self.tokenizer, self.stop = tokenizer, stop
        self.text = ""
        """Complete characters so far."""
        self.sent = 0
        """Number of characters that were returned."""
        self.context = self.decoded = 0
        """Tokens before these are not decoded any more; and those after `context` are, as the context of later ones."""

    def add(self, ids: Sequence[int]) -> str:
        """Return the next piece, given all tokens so far; empty if no character is complete.

        Fewer tokens than before, of an answer that was started again, change nothing.
        """
        if len(ids) <= self.decoded:
            return ""
        before = decode_continuation(self.tokenizer, ids[self.context : self.decoded])
        now = decode_continuation(self.tokenizer, ids[self.context :])
        if not now.endswith(INCOMPLETE):
            self.text += now[len(before) :]
            self.context, self.decoded = self.decoded, len(ids)
        held = max((overlap(self.text, end) for end in self.stop), default=0)
        return self._until(len(self.text) - held)

    def finish(self, text: str) -> str:
        """Return the last piece, given the text of the whole answer."""
        if text.startswith(self.text[: self.sent]):
            self.text = text
        return self._until(len(self.text))

    def _until(self, end: int) -> str:
        """Return the characters before `end` that were not returned yet."""
        piece = self.text[self.sent : end]
        self.sent = max(self.sent, end)
        return piece


def overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of `text` are a prefix of `stop`."""
    return next((size for size in range(min(len(text), len(stop)), 0, -1) if text.endswith(stop[:size])), 0)
