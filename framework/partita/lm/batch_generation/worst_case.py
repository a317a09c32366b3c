"""Worst case of generation in batches, for measuring: the longest prompts, and every new token is generated.

The memory of a batch peaks either in prefill, or in the last decode steps, when the KV cache is longest. Both run as in
`generate`, with the configured options. The steps between are skipped if the cache can simply be extended, and run
otherwise (state space models, sliding windows, prompt learning).

Shapes: B rows, S tokens of a prompt, L positions of the KV cache.
"""

from dataclasses import replace
from statistics import median
from typing import Any

import torch

from partita.lm.base import BatchSupport, GenerationOptions, GenerationRequest
from partita.lm.batch_generation.batch_decoding import BatchDecoder, StopStrings
from partita.lm.batch_generation.generation import beam_search, generation_config_of, may_run_past_context
from partita.lm.checks.logit_check import random_rows
from partita.lm.decoding.batch_prompts import BatchPrompts
from partita.lm.decoding.sampler import Sampler
from partita.lm.loaded_model import TextModel
from partita_trainers.batch_size.clock import now
from partita_trainers.batch_size.probe import Timing

STEPS = 3
"""Number of final decode steps to run; the first is not timed."""
TIMED_STEPS = 4
"""Number of decode steps in a speed measurement; the first is not timed ..."""
ENOUGH_SECONDS = 0.25
"""... in slots fewer if two took this long."""
NO_TOKEN = -1
"""An end token that never occurs."""


class ForwardClock:
    """Records the time after every token; in beam search, as a stopping criterion of transformers that never stops."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.times = [now(device)]

    def tick(self) -> None:
        """Record the time."""
        self.times.append(now(self.device))

    def __call__(self, input_ids: torch.Tensor, scores: Any = None) -> torch.Tensor:
        self.tick()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    @property
    def seconds(self) -> list[float]:
        """Seconds of prefill, then of each decode step."""
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]


def batch_worst_case(
    lm: TextModel, rows: int, *, prompt_tokens: int, new_tokens: int, options: GenerationOptions, support: BatchSupport
) -> Timing:
    """Prefill `rows` prompts of S tokens and decode at the full length of the KV cache.

    With more than one row, one prompt is a token shorter if the model can batch such rows: rows of different lengths
    need a mask, which takes memory and time. Exceptions of the device are passed on.

    Args:
        lm: The model.
        rows: Batch size.
        prompt_tokens: S, the length of each prompt in tokens.
        new_tokens: New tokens per row.
        options: Generation settings.
        support: Which rows can share a batch.
    """
    requests = worst_requests(lm, rows, prompt_tokens=prompt_tokens, new_tokens=new_tokens, support=support)
    prompts = lm.batch_prompts(requests, beams=options.beams)
    short = can_skip(lm, options) and new_tokens > 2 * STEPS
    clock = ForwardClock(lm.device)
    cache = run(lm, prompts, options, new_tokens=1 if short else new_tokens, clock=clock)
    seconds = clock.seconds
    if not short:
        return Timing(prefill_seconds=seconds[0], decode_seconds=median(seconds[1:] or [0.0]))
    length = prompt_tokens + new_tokens - STEPS
    if not lengthen(cache, length - 1):
        del cache
        clock = ForwardClock(lm.device)
        run(lm, prompts, options, new_tokens=new_tokens, clock=clock)
        return Timing(prefill_seconds=clock.seconds[0], decode_seconds=median(clock.seconds[1:]))
    prefill = seconds[0]
    clock = ForwardClock(lm.device)
    run(lm, longer(prompts, length), options, new_tokens=STEPS, clock=clock, cache=cache)
    return Timing(prefill_seconds=prefill, decode_seconds=median(clock.seconds[1:]))


def timed_length(lm: TextModel, length: int) -> int:
    """Return at how many cached tokens decode steps can be timed: `length`, or what the context leaves room for."""
    if lm.context_length is None:
        return length
    # Learned positions end there: a step beyond fails, on a GPU in a way that breaks the device context.
    return max(1, min(length, lm.context_length - TIMED_STEPS))


def batch_decode_step(
    lm: TextModel, rows: int, *, length: int, options: GenerationOptions, support: BatchSupport
) -> float:
    """Return the seconds of a decode step with `length` cached tokens, without prefill where possible.

    The fastest of several steps counts: other load on the machine only makes steps slower. Exceptions of the device are
    passed on.

    Args:
        lm: The model.
        rows: Batch size.
        length: Tokens in the KV cache of each row.
        options: Generation settings.
        support: Which rows can share a batch.
    """
    start = worst_requests(lm, rows, prompt_tokens=2, new_tokens=TIMED_STEPS, support=support)
    prompts = lm.batch_prompts(start, beams=options.beams)
    clock = ForwardClock(lm.device)
    if can_skip(lm, options):
        cache = run(lm, prompts, options, new_tokens=1, clock=clock)
        if lengthen(cache, max(3, length - 1)):
            clock = ForwardClock(lm.device)
            run(lm, longer(prompts, max(4, length)), options, new_tokens=TIMED_STEPS, clock=clock, cache=cache)
            return min(clock.seconds[1:])
        del cache
    requests = worst_requests(lm, rows, prompt_tokens=max(2, length), new_tokens=TIMED_STEPS, support=support)
    clock = ForwardClock(lm.device)
    run(lm, lm.batch_prompts(requests, beams=options.beams), options, new_tokens=TIMED_STEPS, clock=clock)
    return min(clock.seconds[1:])


def worst_requests(
    lm: TextModel, rows: int, *, prompt_tokens: int, new_tokens: int, support: BatchSupport
) -> list[GenerationRequest]:
    """Return prompts of random tokens and equal length, except the last one.

    Args:
        lm: The model.
        rows: Number of prompts.
        prompt_tokens: Length of each prompt in tokens.
        new_tokens: New tokens per row.
        support: Whether rows of different lengths can share a batch: then the last prompt is a token shorter.
    """
    ids_BS = [row.tolist() for row in random_rows(lm.token_ids, [prompt_tokens] * rows, seed=rows)]
    if rows > 1 and prompt_tokens > 1 and support.rows == "padded":
        ids_BS[-1] = ids_BS[-1][1:]
    return [GenerationRequest(input_ids=ids, max_new_tokens=new_tokens) for ids in ids_BS]


def can_skip(lm: TextModel, options: GenerationOptions) -> bool:
    """Return whether decode steps can be skipped: not with virtual tokens or a second cache for guidance."""
    return not lm.virtual_tokens and options.arguments.get("guidance_scale") in (None, 1, 1.0)


@torch.no_grad()
def run(
    lm: TextModel,
    prompts: BatchPrompts,
    options: GenerationOptions,
    *,
    new_tokens: int,
    clock: ForwardClock,
    cache: Any = None,
) -> Any:
    """Generate exactly `new_tokens` tokens; return the KV cache.

    Args:
        lm: The model.
        prompts: The padded prompts.
        options: Generation settings.
        new_tokens: New tokens per row.
        clock: Records the time of each token.
        cache: KV cache to continue from.
    """
    from transformers import EosTokenCriteria

    requests = [replace(request, max_new_tokens=new_tokens) for request in prompts.requests]
    sampler = Sampler(options, ends=(), seed=0, device=lm.device)
    settings = generation_config_of(options, max_new_tokens=new_tokens, end_ids=(), tokenizer=lm.tokenizer)
    held = {"past_key_values": cache} if cache is not None else {}
    prompts = replace(prompts, inputs={**prompts.inputs, **held}, requests=requests)
    if options.beams > 1:
        settings.return_dict_in_generate = True
        never = EosTokenCriteria(NO_TOKEN)  # replaces the library's own criterion
        output = beam_search(lm.base, prompts, options, settings=settings, ends=sampler.ends, criteria=[never, clock])
        return output.past_key_values
    decoder = BatchDecoder(sampler, requests, stop=StopStrings((), decode=prompts.decode), after_token=clock.tick)
    lm.base.generate(**prompts.inputs, generation_config=settings, custom_generate=decoder)
    return decoder.cache


def lengthen(cache: Any, length: int) -> bool:
    """Extend a KV cache with zeros to L positions, layer by layer; return False if it is not a plain growing cache."""
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


def longer(prompts: BatchPrompts, length: int) -> BatchPrompts:
    """Return prompts whose first `length - 1` positions are in the KV cache."""
    ids_BS, mask_BS = prompts.inputs["input_ids"], prompts.inputs["attention_mask"]
    ids_BL = ids_BS.new_full((len(ids_BS), length), int(ids_BS[0, -1]))
    mask_BL = mask_BS.new_ones(len(mask_BS), length)
    mask_BL[:, : mask_BS.shape[1]] = mask_BS
    requests = [GenerationRequest(ids, 1) for ids in ids_BL.tolist()]
    return BatchPrompts({"input_ids": ids_BL, "attention_mask": mask_BL}, requests, length, prompts.decode)


def reachable_tokens(lm: TextModel, *, prompt_tokens: int, new_tokens: int) -> int:
    """Return the new tokens that any row can reach after the longest prompt, within the context length."""
    room = lm.context_length
    if room is None or prompt_tokens + new_tokens <= room or may_run_past_context(lm.base):
        return new_tokens
    return max(1, room - prompt_tokens)
