"""The text of an answer in pieces, as its tokens arrive.

A piece ends neither within a character nor within what may become a stop string. Only the last tokens are decoded for a
piece, so the time does not grow with the length of the answer.
"""

from collections.abc import Sequence
from typing import Any

from partita.lm.decoding.continuation import INCOMPLETE, decode_continuation
from partita_schema.errors import JobError

CHANGED = "memory ran out, and the answer that was started again differs from what was sent; ask again"
"""The error of an answer whose pieces would not add up to it."""


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
        self._ids: Sequence[int] = ()
        self._num_seen = 0
        """How many of `_ids` were there at the last call: the generator appends to the same list."""

    def add(self, ids: Sequence[int]) -> str:
        """Return the next piece, given all tokens so far; empty if no character is complete.

        An answer that was started again, in another list, has no new text until it is longer than before.

        Raises:
            JobError: The answer was started again, and begins with other tokens.
        """
        self._check_begins_alike(ids)
        if len(ids) <= self._num_seen:
            return ""
        self._ids, self._num_seen = ids, len(ids)
        before = decode_continuation(self.tokenizer, ids[self.context : self.decoded])
        now = decode_continuation(self.tokenizer, ids[self.context :])
        new = now[len(before) :]
        complete = self.text + new.rstrip(INCOMPLETE)
        if not now.endswith(INCOMPLETE):
            self.text += new
            self.context, self.decoded = self.decoded, len(ids)
        held = max((overlap(complete, end) for end in self.stop), default=0)
        return self._piece(complete[: len(complete) - held])

    def finish(self, ids: Sequence[int], text: str) -> str:
        """Return the last piece, given the tokens and the text of the whole answer. Raises what `add` raises."""
        self._check_begins_alike(ids)
        if len(ids) < self._num_seen:
            raise JobError(CHANGED)
        return self._piece(text) if text.startswith(self.shown) else ""

    def _check_begins_alike(self, ids: Sequence[int]) -> None:
        """Raise JobError if tokens of another list differ from those before."""
        common = min(len(ids), self._num_seen)
        if ids is not self._ids and tuple(ids[:common]) != tuple(self._ids[:common]):
            raise JobError(CHANGED)

    def _piece(self, text: str) -> str:
        """Return what a longer beginning of the answer adds to what was returned."""
        piece = text[len(self.shown) :]
        self.shown += piece
        return piece


def overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of `text` are a prefix of `stop`."""
    return next((size for size in range(min(len(text), len(stop)), 0, -1) if text.endswith(stop[:size])), 0)
