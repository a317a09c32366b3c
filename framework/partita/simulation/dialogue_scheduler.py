"""Slots for dialogues, which grow: each has room for the longest, and keeps what was read until its dialogue ends."""

from collections.abc import Sequence

from partita.generation.scheduler import Scheduler
from partita.lm.base import AnsweringSlots, SlotRequest

ALIKE = 2
"""How many times the tokens of the shortest prompt the longest may have where both are read in one pass."""


class DialogueScheduler(Scheduler):
    """Answers dialogues; its rows are lanes, each of one dialogue at a time."""

    room = 0
    """Tokens of a prompt and its answer."""
    keeps = True
    """Whether keys and values are kept between turns. Without, all is read anew each time, as benchmarks do."""

    def longest(self, rows: Sequence[int]) -> int:
        """The room."""
        return self.room

    def next_group(self, slots: AnsweringSlots) -> list[SlotRequest]:
        """The next prompts that are read in one pass: those with most to read, and others with about as much."""
        most = min(self.count - len(slots.live), len(self.queue))
        waiting = [
            SlotRequest(ids, int(self.work.new_tokens[row]), row, key=self.work.key(row), keep=self.keeps)
            for row, ids in zip(self.queue, self.work.fetch(self.queue), strict=True)
        ]
        unread = {request.row: slots.unread(request) for request in waiting}
        waiting.sort(key=lambda request: (-unread[request.row], request.row))
        longest = unread[waiting[0].row]
        alike = sum(ALIKE * unread[request.row] >= longest for request in waiting)
        group = waiting[: slots.readable(longest, min(most, alike))]
        for request in group:
            self.queue.remove(request.row)
        return group

    def forget(self, lane: int) -> None:
        """A lane's dialogue has ended, and the next one must find nothing of it."""
        if self.slots is not None:
            self.slots.forget(lane)
