"""Generation at its worst, for measuring: all prompts as long as the longest, every new token generated.

The memory of a batch peaks either while its prompts are read, or in the last decode steps, when the cache is longest.
Both are run as `generate` runs them, with the file's own options; the steps between are left out where the cache can
simply be made longer, and run where it cannot (state spaces, sliding windows, prompt learning).

Shapes: B rows, S tokens of a prompt, L places of the cache.
"""

from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from partita.lm.base import GenerationOptions, GenerationRequest
from partita.lm.generation import generation_settings, may_run_past_context
from partita_trainers.batch_size.clock import now
from partita_trainers.batch_size.trial import Timing

if TYPE_CHECKING:
    from partita.lm.huggingface import HuggingFaceModel

STEPS = 3
"""Decode steps at the end that are run, of which the first is not timed."""
TIMED_STEPS = 4
"""Decode steps of a speed measurement, of which the first is not timed."""


class Clock:
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
    lm: "HuggingFaceModel", rows: int, *, prompt_tokens: int, new_tokens: int, options: GenerationOptions
) -> Timing:
    """Read `rows` prompts of S tokens and decode at the full length of the cache; nothing is kept.

    With more than one row, one prompt is a token shorter: rows of different lengths need a mask, which takes memory
    and time of its own. Raises what the device raises.
    """
    requests = worst_requests(lm, rows, prompt_tokens=prompt_tokens, new_tokens=new_tokens)
    beams = int(options.arguments.get("num_beams", 1))
    inputs = lm.prompt_inputs(requests, beams=beams)
    short = can_skip(lm, options) and new_tokens > 2 * STEPS
    clock = Clock(lm.device)
    cache = run(lm, inputs, options, new_tokens=1 if short else new_tokens, clock=clock)
    seconds = clock.seconds
    if not short:
        return Timing(prefill_seconds=seconds[0], decode_seconds=median(seconds[1:] or [0.0]))
    length = prompt_tokens + new_tokens - STEPS
    if not lengthen(cache, length - 1):
        del cache
        clock = Clock(lm.device)
        run(lm, inputs, options, new_tokens=new_tokens, clock=clock)
        return Timing(prefill_seconds=clock.seconds[0], decode_seconds=median(clock.seconds[1:]))
    prefill = seconds[0]
    clock = Clock(lm.device)
    run(lm, longer(inputs, length), options, new_tokens=STEPS, clock=clock, cache=cache)
    return Timing(prefill_seconds=prefill, decode_seconds=median(clock.seconds[1:]))


def time_decode_step(lm: "HuggingFaceModel", rows: int, *, length: int, options: GenerationOptions) -> float:
    """Seconds of a decode step with `length` places in the cache, without reading prompts where that can be left out.

    Raises what the device raises.
    """
    beams = int(options.arguments.get("num_beams", 1))
    if lm.context_length is not None:
        # Learned positions end there: a step beyond is an error, on a GPU one that breaks the device.
        length = min(length, lm.context_length - TIMED_STEPS)
    start = worst_requests(lm, rows, prompt_tokens=2, new_tokens=TIMED_STEPS)
    inputs = lm.prompt_inputs(start, beams=beams)
    clock = Clock(lm.device)
    if can_skip(lm, options):
        cache = run(lm, inputs, options, new_tokens=1, clock=clock)
        if lengthen(cache, max(3, length - 1)):
            clock = Clock(lm.device)
            run(lm, longer(inputs, max(4, length)), options, new_tokens=TIMED_STEPS, clock=clock, cache=cache)
            return median(clock.seconds[1:])
        del cache
    requests = worst_requests(lm, rows, prompt_tokens=max(2, length), new_tokens=TIMED_STEPS)
    clock = Clock(lm.device)
    run(lm, lm.prompt_inputs(requests, beams=beams), options, new_tokens=TIMED_STEPS, clock=clock)
    return median(clock.seconds[1:])


def worst_requests(
    lm: "HuggingFaceModel", rows: int, *, prompt_tokens: int, new_tokens: int
) -> list[GenerationRequest]:
    """Prompts of random tokens, all of the same length but the last, which is one shorter."""
    ordinary = torch.tensor(lm.token_ids)
    chance = torch.Generator().manual_seed(rows)
    ids_BS = ordinary[torch.randint(len(ordinary), (rows, prompt_tokens), generator=chance)].tolist()
    if rows > 1 and prompt_tokens > 1:
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
    clock: Clock,
    cache: Any = None,
) -> Any:
    """Generate exactly `new_tokens`, whatever the model would like; the cache comes back."""
    from transformers import StoppingCriteriaList

    settings = generation_settings(options, max_new_tokens=new_tokens, end_ids=(), tokenizer=lm.tokenizer)
    settings.return_dict_in_generate = True
    held = {"past_key_values": cache} if cache is not None else {}
    found = lm.base.generate(
        **inputs, **held, generation_config=settings, stopping_criteria=StoppingCriteriaList([clock])
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
