"""Worst case of continuous batching, for measuring: all slots are full, and every new token is generated.

See `partita.lm.worst_case` for generation in batches.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from partita.lm.base import SHORTEST_PREFIX, GenerationOptions, SlotRequest
from partita.lm.loaded_model import TextModel
from partita.lm.row import Row
from partita.lm.slots import Slots, SlotWay
from partita.lm.worst_case import ENOUGH_SECONDS, STEPS, TIMED_STEPS
from partita_trainers.batch_size.clock import now
from partita_trainers.batch_size.probe import Timing

FULLER = 1.02
"""Minimum ratio of tokens by which a pass of shorter prompts must exceed one of the longest to be run as well."""


def slots_worst_case(
    lm: TextModel,
    rows: int,
    *,
    prompt_tokens: int,
    new_tokens: int,
    options: GenerationOptions,
    shared_tokens: int,
    way: SlotWay,
) -> Timing:
    """Measure the worst case in slots: prefill a group of prompts with all slots full, then the last steps.

    Only the rest after a shared prefix is prefilled; its seconds are scaled to the whole prompt.

    Args:
        lm: The model.
        rows: Number of slots.
        prompt_tokens: Length of each prompt in tokens.
        new_tokens: New tokens per row.
        options: Generation settings.
        shared_tokens: Number of prompt tokens shared by all rows.
        way: How the model supports slots.
    """
    tokens = prompt_tokens + new_tokens
    shared = held_once(shared_tokens, length=prompt_tokens)
    with worst_slots(lm, rows, tokens=tokens, new_tokens=new_tokens, options=options, shared=shared, way=way) as worst:
        worst.fill(shared)
        own = prompt_tokens - shared
        prefill = worst.read(own) * prompt_tokens / own
        steps = min(STEPS, new_tokens - 1)
        decode = worst.decode(steps, length=tokens - steps) if steps else 0.0
    return Timing(prefill_seconds=prefill, decode_seconds=decode)


def slots_decode_step(
    lm: TextModel, rows: int, *, length: int, options: GenerationOptions, shared_tokens: int, way: SlotWay
) -> float:
    """Return the seconds of the fastest of several decode steps with `length` cached tokens, without prefill.

    Args:
        lm: The model.
        rows: Number of slots.
        length: Tokens in the KV cache of each row.
        options: Generation settings.
        shared_tokens: Number of cached tokens shared by all rows.
        way: How the model supports slots.
    """
    tokens = length + TIMED_STEPS
    with worst_slots(lm, rows, tokens=tokens, new_tokens=2 * TIMED_STEPS, options=options, shared=0, way=way) as worst:
        worst.fill(held_once(shared_tokens, length=length))
        return worst.decode(TIMED_STEPS, length=length)


def held_once(shared_tokens: int, *, length: int) -> int:
    """Return the number of shared tokens that slots compute and store once, for prompts of this length."""
    shared = min(shared_tokens, length - 1)
    return shared if shared >= SHORTEST_PREFIX else 0


class WorstSlots:
    """Slots in the worst case of a job; no state is kept."""

    def __init__(self, slots: Slots, rows: int, *, new_tokens: int) -> None:
        self.slots, self.device = slots, slots.lm.device
        ordinary = torch.tensor(slots.lm.token_ids)
        self.ids_B = ordinary[torch.randint(len(ordinary), (rows,), generator=torch.Generator().manual_seed(rows))]
        requests = [SlotRequest([token], new_tokens, row) for row, token in enumerate(self.ids_B.tolist())]
        self.rows = [Row(request) for request in requests]
        self.sampler = slots.settings.default.sampler
        for row in self.rows:
            self.sampler.prepare(row)

    def read(self, tokens: int) -> float:
        """Prefill as many prompts of this length as fit in one pass; return the seconds for all rows."""
        slots, rows = self.slots, len(self.rows)
        count = slots.readable(tokens, rows)
        shorter = next((less for less in range(tokens - 1, 0, -1) if slots.readable(less, rows) > count), 0)
        more = slots.readable(shorter, rows) if shorter else 0
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
        self.sampler.choose(logits, self.rows[:count], doubts=self.slots.wide)
        return now(self.device) - started

    def fill(self, shared: int) -> None:
        """Fill every position of every slot; the first `shared` tokens are the prefix."""
        layout = self.slots.pool.layout
        layout.prefix = shared
        start = shared if layout.prefix_in_first_slot else 0
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
            tokens, _ = self.sampler.choose(logits, self.rows, doubts=self.slots.wide)
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
    tokens: int,
    new_tokens: int,
    options: GenerationOptions,
    shared: int,
    way: SlotWay,
) -> Iterator[WorstSlots]:
    """Create slots for `rows` rows, with a prefix of `shared` tokens.

    Args:
        lm: The model.
        rows: Number of slots.
        tokens: Maximum length of a row, prompt and new tokens.
        new_tokens: New tokens per row.
        options: Generation settings.
        shared: Length of the prefix in tokens.
        way: How the model supports slots.
    """
    prefix = [lm.token_ids[index % len(lm.token_ids)] for index in range(shared)]
    slots = Slots(lm, options, slots=rows, tokens=tokens, prefix=prefix, seed=0, way=way)
    try:
        with lm.without_gradients():
            yield WorstSlots(slots, rows, new_tokens=new_tokens)
    finally:
        slots.close()
