"""Rows with a paged KV cache in the worst case of a job, for `partita.lm.slots.worst` to measure."""

from collections.abc import Iterator
from contextlib import contextmanager

from partita.lm.base import GenerationOptions, SlotRequest
from partita.lm.batch_generation.worst_case import ENOUGH_SECONDS
from partita.lm.loaded_model import TextModel
from partita.lm.paged.attention import PagedAttention
from partita.lm.paged.prefill import PromptPart
from partita.lm.paged.slots import PagedSlots
from partita.lm.paged.step import padded_rows
from partita.lm.slots.worst import prefix_tokens, seeded_tokens
from partita_trainers.batch_size.clock import now


class WorstPagedRows:
    """Implements `partita.lm.slots.worst.TimedRows` by a paged KV cache."""

    def __init__(self, slots: PagedSlots, rows: int, *, new_tokens: int, shared: list[int]) -> None:
        """Prepare rows.

        Args:
            slots: The paged cache.
            rows: Number of rows.
            new_tokens: New tokens per row.
            shared: Prompt tokens that all rows share.
        """
        self.slots, self.rows, self.new_tokens, self.shared = slots, rows, new_tokens, shared
        self.ids = seeded_tokens(slots.lm, rows).tolist()

    def fill(self) -> None:
        """Write to every position of the cache: memory that was not written to is not taken."""
        if not self.slots.cache.layers:
            blocks = self.slots.blocks.pool.allocate(1)
            self.slots.forward([PromptPart(self.ids[:1], 0, blocks)])
            self.slots.blocks.release(blocks)
        for held in self.slots.cache.held:
            held.zero_()

    def requests(self, count: int, *, tokens: int) -> list[SlotRequest]:
        """Return requests with prompts of this length after the shared prefix."""
        ids = [[self.ids[(row + index) % self.rows] for index in range(tokens)] for row in range(count)]
        return [SlotRequest([*self.shared, *own], self.new_tokens, row) for row, own in enumerate(ids)]

    def read(self, tokens: int) -> float:
        """Prefill as many prompts of this length as fit in one pass; return the seconds for all rows."""
        slots = self.slots
        count = slots.prompts_per_pass(tokens, self.rows)
        started = now(slots.lm.device)
        slots.begin(self.requests(count, tokens=tokens))
        slots.collect(slots.late.read(leave=0))
        seconds = now(slots.lm.device) - started
        slots.end(slots.active)
        slots.take_answers()
        return seconds * self.rows / count

    def decode(self, steps: int, *, length: int) -> float:
        """Return the seconds of the fastest step, from `length` tokens per row on; the first is only a fallback."""
        slots, seconds = self.slots, list[float]()
        own = max(1, length - len(self.shared) - self.new_tokens + steps)
        slots.start_without_prefill(self.requests(self.rows, tokens=own))
        slots.state.positions.fill_(length - 1)
        count = padded_rows(self.rows, most=slots.num_slots)
        for _ in range(steps):
            started = now(slots.lm.device)
            slots.expect(list(slots.rows.items()), slots.runner(count))
            slots.late.read(leave=1)
            seconds.append(now(slots.lm.device) - started)
            if sum(seconds[1:]) >= ENOUGH_SECONDS and len(seconds) > 2:
                break
        return min(seconds[1:] or seconds)


@contextmanager
def worst_paged_rows(
    lm: TextModel,
    rows: int,
    *,
    options: GenerationOptions,
    attention: PagedAttention,
    tokens: int,
    new_tokens: int,
    shared: int,
    prefill_prefix: bool = True,
) -> Iterator[WorstPagedRows]:
    """Allocate a paged KV cache; see `partita.lm.slots.worst.OpenTimedRows` for the other arguments.

    The prefix is always prefilled: rows find its blocks in their tables.

    Args:
        lm: The model.
        rows: Number of active rows.
        options: Generation settings.
        attention: How the model attends to the cache; it is closed.
    """
    prefix = prefix_tokens(lm, shared)
    slots = PagedSlots(lm, options, slots=rows, tokens=tokens, prefix=prefix, seed=0, attention=attention)
    try:
        yield WorstPagedRows(slots, rows, new_tokens=new_tokens, shared=prefix)
    finally:
        slots.close()
