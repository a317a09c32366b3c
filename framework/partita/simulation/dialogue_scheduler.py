"""Continuous batching for dialogues, whose prompts grow from turn to turn.

A row of this scheduler is an active episode of a rollout, not a prompt: it is answered again for each turn. Two
things follow. Every slot has room for the longest dialogue, since the lengths of later turns are unknown. And the slot
of a finished turn keeps its KV cache, so that the next turn prefills only the tokens that are new; the rollout calls
`forget` when the episode ends.
"""

from collections.abc import Sequence
from dataclasses import replace

from partita.generation.scheduler import Scheduler
from partita.lm.base import AnsweringSlots, SlotRequest

MAX_LENGTH_RATIO = 2
"""Maximum ratio of the tokens to prefill of the longest and the shortest prompt in one pass; limits padding."""


class DialogueScheduler(Scheduler):
    """Scheduler whose rows are active episodes, by their index in the rollout."""

    context_tokens = 0
    """Maximum number of tokens of a prompt and its answer together."""
    keeps = True
    """Whether the KV cache is kept between turns. Benchmarks set False to prefill each prompt completely."""

    def longest(self, rows: Sequence[int]) -> int:
        """Return `context_tokens`: the slots must fit all later turns too."""
        return self.context_tokens

    def next_group(self, slots: AnsweringSlots) -> list[SlotRequest]:
        """Remove the next prompts to prefill together from the queue: those with the most new tokens of all.

        The order of the queue is by whole prompts, which says little here: a long dialogue whose earlier turns are
        cached has few new tokens.
        """
        free = min(self.num_slots - len(slots.live), len(self.queue))
        waiting = [replace(request, keep=self.keeps) for request in self.slot_requests(self.queue)]
        unread = {request.row: slots.unread(request) for request in waiting}
        waiting.sort(key=lambda request: (-unread[request.row], request.row))
        longest = unread[waiting[0].row]
        similar = sum(MAX_LENGTH_RATIO * unread[request.row] >= longest for request in waiting)
        group = waiting[: slots.readable(longest, min(free, similar))]
        for request in group:
            self.queue.remove(request.row)
        return group

    def forget(self, row: int) -> None:
        """Release the KV cache of an episode, so that the next one in the same row does not reuse it."""
        if self.slots is not None:
            self.slots.forget(row)
