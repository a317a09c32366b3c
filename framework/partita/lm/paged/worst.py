"""Worst case of decoding with a paged KV cache, for measuring: all rows are active, and every new token is generated.

See `partita.lm.worst_slots` for slots.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from partita.lm.base import GenerationOptions, SlotRequest
from partita.lm.loaded_model import TextModel
from partita.lm.paged.attention import PagedAttention
from partita.lm.paged.prefill import PromptPart
from partita.lm.paged.slots import PagedSlots
from partita.lm.paged.step import padded_rows
from partita.lm.worst_case import ENOUGH_SECONDS, STEPS, TIMED_STEPS
from partita.lm.worst_slots import held_once
from partita_trainers.batch_size.clock import now
from partita_trainers.batch_size.probe import Timing


def paged_worst_case(
    lm: TextModel,
    rows: int,
    *,
    prompt_tokens: int,
    new_tokens: int,
    options: GenerationOptions,
    shared_tokens: int,
    attention: PagedAttention,
) -> Timing:
    """Measure the worst case: prefill a group of prompts next to a full cache, then the last steps of all rows.

    Only the rest after a shared prefix is prefilled; its seconds are scaled to the whole prompt.

    Args:
        lm: The model.
        rows: Number of active rows.
        prompt_tokens: Length of each prompt in tokens.
        new_tokens: New tokens per row.
        options: Generation settings.
        shared_tokens: Number of prompt tokens shared by all rows.
        attention: How the model attends to the cache; it is closed.
    """
    tokens, shared = prompt_tokens + new_tokens, held_once(shared_tokens, length=prompt_tokens)
    with worst_rows(lm, rows, tokens=tokens, options=options, shared=shared, attention=attention) as worst:
        worst.fill()
        own = prompt_tokens - shared
        prefill = worst.read(own, new_tokens=new_tokens) * prompt_tokens / own
        steps = min(STEPS, new_tokens - 1)
        decode = worst.decode(steps, length=tokens - steps, new_tokens=new_tokens) if steps else 0.0
    return Timing(prefill_seconds=prefill, decode_seconds=decode)


def paged_decode_step(
    lm: TextModel,
    rows: int,
    *,
    length: int,
    options: GenerationOptions,
    shared_tokens: int,
    attention: PagedAttention,
) -> float:
    """Return the seconds of the fastest of several decode steps with `length` cached tokens, without prefill.

    Args:
        lm: The model.
        rows: Number of active rows.
        length: Tokens in the KV cache of each row.
        options: Generation settings.
        shared_tokens: Number of cached tokens shared by all rows.
        attention: How the model attends to the cache; it is closed.
    """
    tokens, shared = length + TIMED_STEPS, held_once(shared_tokens, length=length)
    with worst_rows(lm, rows, tokens=tokens, options=options, shared=shared, attention=attention) as worst:
        worst.fill()
        return worst.decode(TIMED_STEPS, length=length, new_tokens=TIMED_STEPS)


class WorstRows:
    """The rows of a job in the worst case; no state is kept."""

    def __init__(self, slots: PagedSlots, rows: int, *, shared: list[int]) -> None:
        self.slots, self.rows, self.shared = slots, rows, shared
        ordinary = torch.tensor(slots.lm.token_ids)
        chance = torch.Generator().manual_seed(rows)
        self.ids = ordinary[torch.randint(len(ordinary), (rows,), generator=chance)].tolist()

    def fill(self) -> None:
        """Write to every position of the cache: memory that was not written to is not taken."""
        if not self.slots.cache.layers:
            blocks = self.slots.blocks.pool.allocate(1)
            self.slots.forward([PromptPart(self.ids[:1], 0, blocks)])
            self.slots.blocks.release(blocks)
        for held in self.slots.cache.held:
            held.zero_()

    def requests(self, count: int, *, tokens: int, new_tokens: int) -> list[SlotRequest]:
        """Return requests with prompts of this length after the shared prefix."""
        ids = [[self.ids[(row + index) % self.rows] for index in range(tokens)] for row in range(count)]
        return [SlotRequest([*self.shared, *own], new_tokens, row) for row, own in enumerate(ids)]

    def read(self, tokens: int, *, new_tokens: int) -> float:
        """Prefill as many prompts of this length as fit in one pass; return the seconds for all rows."""
        slots = self.slots
        count = slots.readable(tokens, self.rows)
        started = now(slots.lm.device)
        slots.begin(self.requests(count, tokens=tokens, new_tokens=new_tokens))
        slots.collect(slots.late.read(leave=0))
        seconds = now(slots.lm.device) - started
        slots.end(slots.active)
        slots.take_answers()
        return seconds * self.rows / count

    def decode(self, steps: int, *, length: int, new_tokens: int) -> float:
        """Return the seconds of the fastest step, from `length` tokens per row on; the first is only a fallback."""
        slots, seconds = self.slots, list[float]()
        own = max(1, length - len(self.shared) - new_tokens + steps)
        slots.place(self.requests(self.rows, tokens=own, new_tokens=new_tokens))
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
def worst_rows(
    lm: TextModel,
    rows: int,
    *,
    tokens: int,
    options: GenerationOptions,
    shared: int,
    attention: PagedAttention,
) -> Iterator[WorstRows]:
    """Create a paged cache.

    Args:
        lm: The model.
        rows: Number of active rows.
        tokens: Maximum length of a row, prompt and new tokens.
        options: Generation settings.
        shared: Length of the common prefix in tokens.
        attention: How the model attends to the cache; it is closed.
    """
    prefix = [lm.token_ids[index % len(lm.token_ids)] for index in range(shared)]
    slots = PagedSlots(lm, options, slots=rows, tokens=tokens, prefix=prefix, seed=0, attention=attention)
    try:
        yield WorstRows(slots, rows, shared=prefix)
    finally:
        slots.close()
