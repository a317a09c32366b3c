"""Worst case of continuous batching, for measuring: all rows are active, and every new token is generated.

See `partita.lm.batch_generation.worst_case` for generation in batches.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch

from partita.lm.base import SHORTEST_PREFIX, GenerationOptions, SlotRequest
from partita.lm.batch_generation.worst_case import ENOUGH_SECONDS, STEPS, TIMED_STEPS
from partita.lm.checks.logit_check import random_rows
from partita.lm.decoding.row import Row
from partita.lm.loaded_model import TextModel
from partita.lm.slots.slots import Slots, SlotSupport
from partita_trainers.batch_size.clock import now
from partita_trainers.batch_size.probe import Timing

FULLER = 1.02
"""Minimum ratio of tokens by which a pass of shorter prompts must exceed one of the longest to be run as well."""


class TimedRows(Protocol):
    """The rows of a job in the worst case, whose passes are timed; no state is kept."""

    def fill(self) -> None:
        """Write to all memory of the cache."""

    def read(self, tokens: int) -> float:
        """Prefill as many prompts of this length as fit in one pass; return the seconds for all rows."""

    def decode(self, steps: int, *, length: int) -> float:
        """Return the seconds of the fastest step, from `length` tokens per row on."""


class OpenTimedRows(Protocol):
    """Allocates the cache of a job in the worst case, with all rows active."""

    def __call__(
        self, *, tokens: int, new_tokens: int, shared: int, prefill_prefix: bool = True
    ) -> AbstractContextManager[TimedRows]:
        """Return a context with the rows.

        Args:
            tokens: Maximum length of a row, prompt and new tokens.
            new_tokens: New tokens per row.
            shared: Number of prompt tokens that all rows share.
            prefill_prefix: Whether the shared tokens have to be prefilled.
        """


def slots_worst_case(open_rows: OpenTimedRows, *, prompt_tokens: int, new_tokens: int, shared_tokens: int) -> Timing:
    """Measure the worst case: prefill a group of prompts with a full cache, then the last steps of all rows.

    Only the rest after a shared prefix is prefilled; its seconds are scaled to the whole prompt.

    Args:
        open_rows: Allocates the cache.
        prompt_tokens: Length of each prompt in tokens.
        new_tokens: New tokens per row.
        shared_tokens: Number of prompt tokens that all rows share.
    """
    tokens, shared = prompt_tokens + new_tokens, held_once(shared_tokens, length=prompt_tokens)
    with open_rows(tokens=tokens, new_tokens=new_tokens, shared=shared) as worst:
        worst.fill()
        own = prompt_tokens - shared
        prefill = worst.read(own) * prompt_tokens / own
        steps = min(STEPS, new_tokens - 1)
        decode = worst.decode(steps, length=tokens - steps) if steps else 0.0
    return Timing(prefill_seconds=prefill, decode_seconds=decode)


def slots_decode_step(open_rows: OpenTimedRows, *, length: int, shared_tokens: int) -> float:
    """Return the seconds of the fastest of several decode steps with `length` cached tokens, without prefill.

    Args:
        open_rows: Allocates the cache.
        length: Tokens in the KV cache of each row.
        shared_tokens: Number of cached tokens that all rows share.
    """
    tokens, shared = length + TIMED_STEPS, held_once(shared_tokens, length=length)
    with open_rows(tokens=tokens, new_tokens=TIMED_STEPS, shared=shared, prefill_prefix=False) as worst:
        worst.fill()
        return worst.decode(TIMED_STEPS, length=length)


def held_once(shared_tokens: int, *, length: int) -> int:
    """Return the number of shared tokens that slots compute and store once, for prompts of this length."""
    shared = min(shared_tokens, length - 1)
    return shared if shared >= SHORTEST_PREFIX else 0


class WorstSlots:
    """Implements `TimedRows` by slots."""

    def __init__(self, slots: Slots, rows: int, *, new_tokens: int, shared: int) -> None:
        """Prepare rows for all slots.

        Args:
            slots: The slots.
            rows: Number of rows.
            new_tokens: New tokens per row.
            shared: Number of prompt tokens that all rows share.
        """
        self.slots, self.shared, self.device = slots, shared, slots.lm.device
        self.ids_B = seeded_tokens(slots.lm, rows)
        requests = [SlotRequest([token], new_tokens, row) for row, token in enumerate(self.ids_B.tolist())]
        self.rows = [Row(request) for request in requests]
        self.sampler = slots.settings.default.sampler
        for row in self.rows:
            self.sampler.prepare(row)

    def read(self, tokens: int) -> float:
        """Prefill as many prompts of this length as fit in one pass; return the seconds for all rows."""
        slots, rows = self.slots, len(self.rows)
        count = slots.prompts_per_pass(tokens, rows)
        shorter = next((less for less in range(tokens - 1, 0, -1) if slots.prompts_per_pass(less, rows) > count), 0)
        more = slots.prompts_per_pass(shorter, rows) if shorter else 0
        if more * shorter > FULLER * count * tokens:
            # A pass that holds only `count` prompts of this length may hold more tokens of shorter ones.
            self.read_group(more, tokens=shorter)
        return self.read_group(count, tokens=tokens) * len(self.rows) / count

    def read_group(self, count: int, *, tokens: int) -> float:
        """Prefill `count` prompts of this length in one pass, the last one a token shorter; return its seconds."""
        started = now(self.device)
        prompts = [self.ids_B[torch.arange(row, row + tokens) % len(self.ids_B)].tolist() for row in range(count)]
        if count > 1:
            prompts[-1] = prompts[-1][1:] or prompts[-1]
        logits = self.slots.forward(prompts, first=0, start=self.slots.prefix)
        self.sampler.choose(logits, self.rows[:count], find_near_ties=self.slots.pass_uses_fast_products)
        return now(self.device) - started

    def fill(self) -> None:
        """Fill every position of every slot; the first `shared` tokens are the prefix."""
        layout = self.slots.pool.layout
        layout.prefix = self.shared
        start = self.shared if layout.prefix_in_first_slot else 0
        if not self.slots.pool.layers:
            self.slots.forward([[int(self.ids_B[0])]], first=0, start=0)
        for held in self.slots.pool.held:
            held[:1].zero_()
            held[1:, :, start:].zero_()

    def decode(self, steps: int, *, length: int) -> float:
        """Return the seconds of the fastest step, from `length` tokens per slot on; the first is only a fallback."""
        seconds = []
        ids_B1 = self.ids_B[:, None].to(self.device)
        for step in range(steps):
            started = now(self.device)
            logits = self.slots.extend(ids_B1, lengths=[length + step] * len(self.rows))
            tokens, _ = self.sampler.choose(logits, self.rows, find_near_ties=self.slots.pass_uses_fast_products)
            for row, token in zip(self.rows, tokens.tolist(), strict=True):
                row.new.append(max(0, token))
            seconds.append(now(self.device) - started)
            if sum(seconds[1:]) >= ENOUGH_SECONDS and len(seconds) > 2:
                break
        return min(seconds[1:] or seconds)


@contextmanager
def worst_slots(
    lm: TextModel,
    rows: int,
    *,
    options: GenerationOptions,
    support: SlotSupport,
    tokens: int,
    new_tokens: int,
    shared: int,
    prefill_prefix: bool = True,
) -> Iterator[WorstSlots]:
    """Allocate slots; see `OpenTimedRows` for the other arguments.

    Args:
        lm: The model.
        rows: Number of slots.
        options: Generation settings.
        support: How the model supports slots.
    """
    prefix = prefix_tokens(lm, shared) if prefill_prefix else []
    slots = Slots(lm, options, slots=rows, tokens=tokens, prefix=prefix, seed=0, support=support)
    try:
        with lm.without_gradients():
            yield WorstSlots(slots, rows, new_tokens=new_tokens, shared=shared)
    finally:
        slots.close()


def prefix_tokens(lm: TextModel, count: int) -> list[int]:
    """Return the tokens of a shared prefix of this length."""
    return [lm.token_ids[index % len(lm.token_ids)] for index in range(count)]


def seeded_tokens(lm: TextModel, count: int) -> torch.Tensor:
    """Return random tokens [count], the same for the same count."""
    return random_rows(lm.token_ids, [count], seed=count)[0]
