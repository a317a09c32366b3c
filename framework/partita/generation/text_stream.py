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
        """Text of the tokens before `decoded`."""
        self.shown = ""
        """Text that was returned."""
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
        new = now[len(before) :]
        complete = self.text + new.rstrip(INCOMPLETE)
        if not now.endswith(INCOMPLETE):
            self.text += new
            self.context, self.decoded = self.decoded, len(ids)
        held = max((overlap(complete, end) for end in self.stop), default=0)
        return self._piece(complete[: len(complete) - held])

    def finish(self, text: str) -> str:
        """Return the last piece, given the text of the whole answer."""
        return self._piece(text) if text.startswith(self.shown) else ""

    def _piece(self, text: str) -> str:
        """Return what a longer beginning of the answer adds to what was returned."""
        piece = text[len(self.shown) :]
        self.shown += piece
        return piece


def overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of `text` are a prefix of `stop`."""
    return next((size for size in range(min(len(text), len(stop)), 0, -1) if text.endswith(stop[:size])), 0)
