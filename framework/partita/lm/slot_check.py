"""Test of whether a model supports slots.

Most models of transformers accept a mask and positions per row, and a custom cache. None of them declares it, and one
that does not would only produce different output. So before the first generation, a few short rows are computed in
slots and alone, token by token and then all at once, and the logits are compared.
"""

import logging

import torch

from partita.lm.base import GenerationOptions
from partita.lm.batch_check import REFUSALS
from partita.lm.loaded_model import TextModel
from partita.lm.packing_check import rounding_limit
from partita.lm.slot_attention import attends
from partita.lm.slots import Slots, SlotWay
from partita.lm.transformers_internals import attention_of, is_stateful
from partita_schema.errors import OutOfMemory
from partita_trainers.batch_size.device_errors import is_out_of_memory

logger = logging.getLogger(__name__)

PREFIX = 3
LENGTHS = (9, 5, 7)
"""Tokens of the prompts, including the shared prefix."""
STEPS = 2
TOO_SMALL = (
    f"{len(LENGTHS)} rows of {max(LENGTHS) + STEPS} tokens do not fit in memory next to the model; free some, or write "
    "quantization: {bits: 4} or a smaller base_model"
)
WINDOWS = ("sliding_window", "attention_chunk_size", "window_size", "keep_window_size", "floor_scale")
"""Config keys with the number of tokens up to which a model needs no mask and no scale that depend on the longest row.
The last three are those of GPT-Neo, Doge and Llama 4."""


def why_unsupported(lm: TextModel, options: GenerationOptions, *, tokens: int) -> str | None:
    """Return a reason against slots that needs no test; None if there is none."""
    config = lm.base.config
    text = config.get_text_config()
    attention = attention_of(config)
    windows = [size for name in WINDOWS if isinstance(size := getattr(text, name, None), int) and size > 0]
    kinds = set(getattr(text, "layer_types", None) or ()) - {"full_attention", "sliding_attention", "chunked_attention"}
    scaling = str(getattr(text, "rope_parameters", None) or "")
    if not options.slots:
        return "generation.slots is false"
    if options.beams > 1 and not options.labels:
        return "beam search"
    if options.arguments.get("guidance_scale") not in (None, 1, 1.0) and not options.labels:
        return "guidance_scale"
    if lm.virtual_tokens:
        return f"the virtual tokens of {lm.adapter_method}"
    if config.is_encoder_decoder:
        return "an encoder next to the decoder"
    if kinds or is_stateful(lm.base):
        return f"layers other than attention ({', '.join(sorted(kinds)) or type(lm.base).__name__})"
    if attention not in ("sdpa", "eager"):
        return f"attention: {attention}"
    if "dynamic" in scaling or "longrope" in scaling:
        return "rotary positions that depend on the longest row"
    if windows and tokens > min(windows):
        return f"a sliding window of {min(windows):,} tokens, and rows of up to {tokens:,}"
    return None


def find_way(lm: TextModel) -> SlotWay:
    """Return how a model supports slots, or why it does not.

    Raises:
        OutOfMemory: Even the short rows do not fit, which says nothing about the model.
    """
    reason = None
    for way in ways(lm):
        try:
            error = largest_error(lm, way=way)
        except REFUSALS as refusal:
            if is_out_of_memory(refusal):
                raise OutOfMemory(TOO_SMALL) from refusal
            logger.debug("slots, %s: %s", way, refusal)
            reason = f"{type(lm.base).__name__} does not take a cache of slots"
            continue
        logger.debug("slots, %s: logits as alone, but for %.1e of their spread", way, error)
        if error <= rounding_limit(lm):
            return way
        reason = f"{type(lm.base).__name__} changes its logits by {error:.0%} in slots"
    return SlotWay(reason=reason)


def ways(lm: TextModel) -> list[SlotWay]:
    """Return the candidates, the best first."""
    lean = [True, False] if attends(lm.base) else [False]
    return [SlotWay(narrows, here) for narrows in (True, False) for here in lean]


@torch.no_grad()
def largest_error(lm: TextModel, *, way: SlotWay) -> float:
    """Return the root mean square difference between logits in slots and alone, over their spread, at worst."""
    chance = torch.Generator().manual_seed(0)
    ordinary = torch.tensor(lm.token_ids)
    rows = [ordinary[torch.randint(len(ordinary), (length + STEPS,), generator=chance)].tolist() for length in LENGTHS]
    prefix = rows[0][:PREFIX]
    rows = [[*prefix, *row[PREFIX:]] for row in rows]
    with lm.evaluating():
        alone = []
        for row in rows:
            ids = torch.tensor([row], device=lm.device)
            logits = lm.base(input_ids=ids, use_cache=False).logits[0, -STEPS - 1 :].double()
            alone.append(torch.cat([logits, logits[-1:]]))
        slots = Slots(
            lm,
            GenerationOptions({}),
            slots=len(rows) + 1,
            tokens=max(LENGTHS) + STEPS + 1,
            prefix=prefix,
            seed=0,
            way=way,
        )
        try:
            in_slots = read_in_slots(slots, rows)
        finally:
            slots.close()
    spread = torch.cat(alone)
    spread = (spread - spread.mean(dim=-1, keepdim=True)).std()
    errors = [
        (there[step] - here[step]).square().mean().sqrt() / spread
        for here, there in zip(alone, in_slots, strict=True)
        for step in range(len(here))
    ]
    worst = float(torch.stack(errors).max())
    return worst if worst == worst else float("inf")


def read_in_slots(slots: Slots, rows: list[list[int]]) -> list[list[torch.Tensor]]:
    """Return logits of every row after the prompt, after each further token, and after recomputing the last ones.

    The first prompt is prefilled alone, after the prefix.
    """
    logits_of_rows: list[list[torch.Tensor]] = [[] for _ in rows]
    prompts = [row[PREFIX:-STEPS] for row in rows]
    groups = ([0], list(range(1, len(rows))))
    for group in groups:
        logits = slots.forward([prompts[index] for index in group], first=group[0], start=PREFIX)
        for index, one in zip(group, logits.double(), strict=True):
            logits_of_rows[index].append(one)
    for step in range(STEPS):
        ids_N1 = torch.tensor([[row[len(row) - STEPS + step]] for row in rows], device=slots.lm.device)
        logits = slots.extend(ids_N1, lengths=[len(row) - STEPS + step + 1 for row in rows])
        for index, one in enumerate(logits.double()):
            logits_of_rows[index].append(one)
    for index, one in enumerate(slots.prefill_rest(rows, STEPS, first=0).double()):
        logits_of_rows[index].append(one)
    return logits_of_rows
