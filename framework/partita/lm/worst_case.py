"""Generation at its worst, for measuring: all prompts as long as the longest, every new token generated.

The memory of a batch peaks either while its prompts are read, or in the last decode steps, when the cache is longest.
Both are run as `generate` runs them, with the file's own options; the steps between are left out where the cache can
simply be made longer, and run where it cannot (state spaces, sliding windows, prompt learning).

Shapes: B rows, S tokens of a prompt, L places of the cache.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from partita.lm.base import SHORTEST_PREFIX, BatchWay, GenerationOptions, GenerationRequest, SlotRequest
from partita.lm.generation import generation_settings, may_run_past_context, prompt_inputs, score_processor
from partita.lm.sampler import Row, Sampler
from partita_trainers.batch_size.clock import now
from partita_trainers.batch_size.probe import Timing

if TYPE_CHECKING:
    from partita.lm.huggingface import HuggingFaceModel
    from partita.lm.slots import Slots

STEPS = 3
"""Decode steps at the end that are run, of which the first is not timed."""
TIMED_STEPS = 4
"""Decode steps of a speed measurement, of which the first is not timed ..."""
ENOUGH_SECONDS = 0.25
"""... fewer where two took so long."""
NO_TOKEN = -1
"""An end of answers that never comes."""
FULLER = 1.02
"""How many times more tokens a pass of shorter prompts reads for it to count."""


class ForwardClock:
    """A stopping criterion of transformers that stops nothing: it notes the time after every token."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.times = [now(device)]

    def __call__(self, input_ids: torch.Tensor, scores: Any = None) -> torch.Tensor:
        self.times.append(now(self.device))
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    @property
    def seconds(self) -> list[float]:
        """Of the prompts, then of each decode step."""
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]


def generate_worst_case(
    lm: "HuggingFaceModel",
    rows: int,
    *,
    prompt_tokens: int,
    new_tokens: int,
    options: GenerationOptions,
    shared_tokens: int = 0,
) -> Timing:
    """Read `rows` prompts of S tokens and decode at the full length of the cache; nothing is kept.

    With more than one row, one prompt is a token shorter where such rows can be answered together: rows of different
    lengths need a mask, which takes memory and time. All prompts begin with the same `shared_tokens`, which
    only slots make use of. Raises what the device raises.
    """
    if lm.why_no_slots(options, tokens=prompt_tokens + new_tokens) is None:
        shared = held_once(shared_tokens, length=prompt_tokens)
        return slots_worst_case(
            lm, rows, prompt_tokens=prompt_tokens, new_tokens=new_tokens, options=options, shared=shared
        )
    way = lm.batch_way(options, tokens=prompt_tokens + new_tokens)
    requests = worst_requests(lm, rows, prompt_tokens=prompt_tokens, new_tokens=new_tokens, way=way)
    inputs = prompt_inputs(lm, requests, beams=options.beams)
    short = can_skip(lm, options) and new_tokens > 2 * STEPS
    clock = ForwardClock(lm.device)
    cache = run(lm, inputs, options, new_tokens=1 if short else new_tokens, clock=clock)
    seconds = clock.seconds
    if not short:
        return Timing(prefill_seconds=seconds[0], decode_seconds=median(seconds[1:] or [0.0]))
    length = prompt_tokens + new_tokens - STEPS
    if not lengthen(cache, length - 1):
        del cache
        clock = ForwardClock(lm.device)
        run(lm, inputs, options, new_tokens=new_tokens, clock=clock)
        return Timing(prefill_seconds=clock.seconds[0], decode_seconds=median(clock.seconds[1:]))
    prefill = seconds[0]
    clock = ForwardClock(lm.device)
    run(lm, longer(inputs, length), options, new_tokens=STEPS, clock=clock, cache=cache)
    return Timing(prefill_seconds=prefill, decode_seconds=median(clock.seconds[1:]))


def time_decode_step(
    lm: "HuggingFaceModel", rows: int, *, length: int, options: GenerationOptions, shared_tokens: int = 0
) -> float:
    """Seconds of a decode step with `length` places in the cache, without reading prompts where that can be left out.

    All rows begin with the same `shared_tokens`, which only slots make use of. The shortest of some steps counts:
    what else runs on the machine only ever makes one longer.

    Raises what the device raises.
    """
    if lm.context_length is not None:
        # Learned positions end there: a step beyond is an error, on a GPU one that breaks the device.
        length = max(1, min(length, lm.context_length - TIMED_STEPS))
    if lm.why_no_slots(options, tokens=length + TIMED_STEPS) is None:
        with worst_slots(lm, rows, tokens=length + TIMED_STEPS, new_tokens=2 * TIMED_STEPS, options=options) as worst:
            worst.fill(held_once(shared_tokens, length=length))
            return worst.decode(TIMED_STEPS, length=length)
    way = lm.batch_way(options, tokens=length + TIMED_STEPS)
    start = worst_requests(lm, rows, prompt_tokens=2, new_tokens=TIMED_STEPS, way=way)
    inputs = prompt_inputs(lm, start, beams=options.beams)
    clock = ForwardClock(lm.device)
    if can_skip(lm, options):
        cache = run(lm, inputs, options, new_tokens=1, clock=clock)
        if lengthen(cache, max(3, length - 1)):
            clock = ForwardClock(lm.device)
            run(lm, longer(inputs, max(4, length)), options, new_tokens=TIMED_STEPS, clock=clock, cache=cache)
            return min(clock.seconds[1:])
        del cache
    requests = worst_requests(lm, rows, prompt_tokens=max(2, length), new_tokens=TIMED_STEPS, way=way)
    clock = ForwardClock(lm.device)
    run(lm, prompt_inputs(lm, requests, beams=options.beams), options, new_tokens=TIMED_STEPS, clock=clock)
    return min(clock.seconds[1:])


def held_once(shared_tokens: int, *, length: int) -> int:
    """Tokens that slots read and hold once, of those that prompts of this length begin with."""
    found = min(shared_tokens, length - 1)
    return found if found >= SHORTEST_PREFIX else 0


def slots_worst_case(
    lm: "HuggingFaceModel", rows: int, *, prompt_tokens: int, new_tokens: int, options: GenerationOptions, shared: int
) -> Timing:
    """The same in slots: with all of them full a group of prompts is read, and the last steps are made.

    Of prompts that begin alike the rest is read, and its seconds are told as if it were the whole.
    """
    tokens = prompt_tokens + new_tokens
    with worst_slots(lm, rows, tokens=tokens, new_tokens=new_tokens, options=options, shared=shared) as worst:
        worst.fill(shared)
        own = prompt_tokens - shared
        prefill = worst.read(own) * prompt_tokens / own
        steps = min(STEPS, new_tokens - 1)
        decode = worst.decode(steps, length=tokens - steps) if steps else 0.0
    return Timing(prefill_seconds=prefill, decode_seconds=decode)


class WorstSlots:
    """Slots that are used as a job uses them at its worst, without keeping anything."""

    def __init__(self, slots: "Slots", rows: int, *, new_tokens: int) -> None:
        self.slots, self.device = slots, slots.lm.device
        ordinary = torch.tensor(slots.lm.token_ids)
        self.ids_B = ordinary[torch.randint(len(ordinary), (rows,), generator=torch.Generator().manual_seed(rows))]
        requests = [SlotRequest([token], new_tokens, row) for row, token in enumerate(self.ids_B.tolist())]
        self.rows = [Row(request) for request in requests]
        for row in self.rows:
            slots.chooser.prepare(row)

    def read(self, tokens: int) -> float:
        """Read as many prompts of this length as are read in one pass; seconds that all would take."""
        slots, rows = self.slots, len(self.rows)
        count = slots.readable(tokens, rows)
        shorter = next((less for less in range(tokens - 1, 0, -1) if slots.readable(less, rows) > count), 0)
        more = slots.readable(shorter, rows) if shorter else 0
        if more * shorter > FULLER * count * tokens:
            # More prompts of up to this length would not have fitted the pass; shorter ones will.
            self.read_group(more, tokens=shorter)
        return self.read_group(count, tokens=tokens) * len(self.rows) / count

    def read_group(self, count: int, *, tokens: int) -> float:
        """Read so many prompts of this length in one pass, the last a token shorter; its seconds."""
        started = now(self.device)
        prompts = [self.ids_B[torch.arange(row, row + tokens) % len(self.ids_B)].tolist() for row in range(count)]
        if count > 1:
            prompts[-1] = prompts[-1][1:] or prompts[-1]
        logits = self.slots.forward(prompts, first=0, start=self.slots.prefix)
        self.slots.chooser.choose(logits, self.rows[:count], doubts=self.slots.wide)
        return now(self.device) - started

    def fill(self, shared: int) -> None:
        """Put something into every place that a slot has; so many tokens are the same in all of them."""
        place = self.slots.pool.place
        place.prefix = shared
        start = shared if place.prefix_in_first_slot else 0
        if not self.slots.pool.layers:
            self.slots.forward([[int(self.ids_B[0])]], first=0, start=0)
        for held in self.slots.pool.held:
            held[:1].zero_()
            held[1:, :, start:].zero_()

    def decode(self, steps: int, *, length: int) -> float:
        """Seconds of the shortest step with so many tokens in each slot; the first counts only where it is alone."""
        seconds = []
        ids_B1 = self.ids_B[:, None].to(self.device)
        for step in range(steps):
            started = now(self.device)
            logits = self.slots.extend(ids_B1, lengths=[length + step] * len(self.rows))
            tokens, _ = self.slots.chooser.choose(logits, self.rows, doubts=self.slots.wide)
            for row, token in zip(self.rows, tokens.tolist(), strict=True):
                row.new.append(max(0, token))
            seconds.append(now(self.device) - started)
            if sum(seconds[1:]) >= ENOUGH_SECONDS and len(seconds) > 2:
                break
        return min(seconds[1:] or seconds)


@contextmanager
def worst_slots(
    lm: "HuggingFaceModel",
    rows: int,
    *,
    tokens: int,
    new_tokens: int,
    options: GenerationOptions,
    shared: int = 0,
) -> Iterator[WorstSlots]:
    """Slots for so many rows, with `shared` tokens that all begin with read."""
    prefix = [lm.token_ids[place % len(lm.token_ids)] for place in range(shared)]
    slots = lm.generating_slots(options, slots=rows, tokens=tokens, prefix=prefix, seed=0)
    try:
        yield WorstSlots(slots, rows, new_tokens=new_tokens)
    finally:
        slots.close()


def worst_requests(
    lm: "HuggingFaceModel", rows: int, *, prompt_tokens: int, new_tokens: int, way: BatchWay
) -> list[GenerationRequest]:
    """Prompts of random tokens, all of the same length but the last, which is one shorter where `way` allows it."""
    ordinary = torch.tensor(lm.token_ids)
    chance = torch.Generator().manual_seed(rows)
    ids_BS = ordinary[torch.randint(len(ordinary), (rows, prompt_tokens), generator=chance)].tolist()
    if rows > 1 and prompt_tokens > 1 and way.rows == "padded":
        ids_BS[-1] = ids_BS[-1][1:]
    return [GenerationRequest(input_ids=ids, max_new_tokens=new_tokens) for ids in ids_BS]


def ordinary_tokens(lm: "HuggingFaceModel") -> Sequence[int]:
    """Token ids that mean text: within the embedding, and not special."""
    embedded = lm.base.get_input_embeddings().weight.shape[0]
    special = set(lm.tokenizer.all_special_ids)
    found = [token for token in range(min(len(lm.tokenizer), embedded)) if token not in special]
    return found or list(range(embedded))


def can_skip(lm: "HuggingFaceModel", options: GenerationOptions) -> bool:
    """Whether decode steps may be left out: not where virtual tokens or a second, unguided cache take part."""
    return not lm.virtual_tokens and options.arguments.get("guidance_scale") in (None, 1, 1.0)


@torch.no_grad()
def run(
    lm: "HuggingFaceModel",
    inputs: dict[str, Any],
    options: GenerationOptions,
    *,
    new_tokens: int,
    clock: ForwardClock,
    cache: Any = None,
) -> Any:
    """Generate exactly `new_tokens`, whatever the model would like; the cache comes back."""
    from transformers import EosTokenCriteria, StoppingCriteriaList

    ids_BS = inputs["input_ids"]
    requests = [GenerationRequest(ids, new_tokens) for ids in ids_BS.tolist()]
    chooser = Sampler(options, ends=(), seed=0, device=lm.device)
    processor = score_processor(options, requests, chooser=chooser, prompt_length=ids_BS.shape[1])
    settings = generation_settings(options, max_new_tokens=new_tokens, end_ids=(), tokenizer=lm.tokenizer)
    settings.return_dict_in_generate = True
    held = {"past_key_values": cache} if cache is not None else {}
    never = EosTokenCriteria(NO_TOKEN)  # takes the place of the library's own
    found = lm.base.generate(
        **inputs,
        **held,
        generation_config=settings,
        logits_processor=[processor],
        stopping_criteria=StoppingCriteriaList([never, clock]),
    )
    return found.past_key_values


def lengthen(cache: Any, length: int) -> bool:
    """Fill a cache with zeros up to L places a row, layer by layer; False where it is not a plain, growing one."""
    from transformers.cache_utils import DynamicCache, DynamicLayer

    if type(cache) is not DynamicCache or any(type(layer) is not DynamicLayer for layer in cache.layers):
        return False
    for layer in cache.layers:
        for name in ("keys", "values"):
            held = getattr(layer, name)
            full = held.new_zeros(*held.shape[:2], length, held.shape[3])
            full[:, :, : held.shape[2]] = held
            setattr(layer, name, full)
            del held
    return True


def longer(inputs: dict[str, Any], length: int) -> dict[str, Any]:
    """Inputs whose first `length - 1` places stand in the cache already."""
    ids_BS, mask_BS = inputs["input_ids"], inputs["attention_mask"]
    ids_BL = ids_BS.new_full((len(ids_BS), length), int(ids_BS[0, -1]))
    mask_BL = mask_BS.new_ones(len(mask_BS), length)
    mask_BL[:, : mask_BS.shape[1]] = mask_BS
    return {"input_ids": ids_BL, "attention_mask": mask_BL}


def reachable_tokens(lm: "HuggingFaceModel", *, prompt_tokens: int, new_tokens: int) -> int:
    """New tokens that a row beside the longest prompt can reach, where the model has an end."""
    room = lm.context_length
    if room is None or prompt_tokens + new_tokens <= room or may_run_past_context(lm.base):
        return new_tokens
    return max(1, room - prompt_tokens)
