"""Continuous batching for dialogues, whose prompts grow from turn to turn.

A row of this scheduler is an active episode of a rollout, not a prompt: it is answered again for each turn. Two
things follow. Every slot has room for the longest dialogue, since the lengths of later turns are unknown. And the slot
of a finished turn keeps its KV cache, so that the next turn prefills only the tokens that are new; the rollout calls
`forget` when the episode ends.
"""

from collections.abc import Sequence
from dataclasses import replace

from partita.generation.scheduler import Scheduler
from partita.generation.waiting_rows import WaitingRows
from partita.generation.work_queue import RowQueue
from partita.lm.base import AnsweringSlots, SlotRequest

MAX_LENGTH_RATIO = 2
"""Maximum ratio of the tokens to prefill of the longest and the shortest prompt in one pass; limits padding."""


class WaitingEpisodes(WaitingRows):
    """Episodes that wait for their next turn, of which those with the most new tokens start first."""

    keeps = True
    """Whether the KV cache is kept between turns. Benchmarks set False to prefill each prompt completely."""

    def next_group(self, slots: AnsweringSlots, *, free: int, prefix: int) -> list[SlotRequest]:
        """Remove the rows whose prompts are prefilled next, together, and return their requests.

        The order of the rows is by whole prompts, which says little here: a long dialogue whose earlier turns are
        cached has few new tokens.
        """
        waiting = [replace(request, keep=self.keeps) for request in self.requests(self.rows)]
        uncached = {request.row: slots.uncached_tokens(request) for request in waiting}
        waiting.sort(key=lambda request: (-uncached[request.row], request.row))
        longest = uncached[waiting[0].row]
        similar = sum(MAX_LENGTH_RATIO * uncached[request.row] >= longest for request in waiting)
        group = waiting[: slots.prompts_per_pass(longest, min(free, similar))]
        self.remove({request.row for request in group})
        return group


class DialogueScheduler(Scheduler):
    """Scheduler whose rows are active episodes, by their index in the rollout."""

    context_tokens = 0
    """Maximum number of tokens of a prompt and its answer together."""

    def waiting_rows(self, source: RowQueue) -> WaitingEpisodes:
        """Return the waiting episodes."""
        return WaitingEpisodes(self.work, source, plans_passes=False)

    def longest(self, rows: Sequence[int]) -> int:
        """Return `context_tokens`: the slots must fit all later turns too."""
        return self.context_tokens

    def forget(self, row: int) -> None:
        """Release the KV cache of an episode, so that the next one in the same row does not reuse it."""
        if self.slots is not None:
            self.slots.forget(row)
