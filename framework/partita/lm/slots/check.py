"""Test of whether a model supports slots.

Most models of transformers accept a mask and positions per row, and a custom cache. None of them declares it, and one
that does not would only produce different output. So before the first generation, a few short rows are computed in
slots and alone, token by token and then all at once, and the logits are compared.
"""

import logging
from collections.abc import Callable, Sequence
from typing import TypedDict

import torch

from partita.lm.base import GenerationOptions
from partita.lm.checks.logit_check import (
    REFUSALS,
    largest_or_infinity,
    random_rows,
    rounding_limit,
    spread_of,
    too_small,
)
from partita.lm.loaded_model import TextModel
from partita.lm.model_config.attention_windows import window_set_to
from partita.lm.slots.attention import attends
from partita.lm.slots.slots import Slots, SlotSupport
from partita.lm.transformers_internals import attention_of, is_stateful
from partita_schema.errors import OutOfMemory
from partita_trainers.batch_size.device_errors import is_out_of_memory

logger = logging.getLogger(__name__)

PREFIX = 3
LENGTHS = (9, 5, 7)
"""Tokens of the prompts, including the shared prefix."""
STEPS = 2
TOO_SMALL = too_small(len(LENGTHS), max(LENGTHS) + STEPS)
OTHER_WINDOWS = ("window_size", "keep_window_size", "floor_scale")
"""Config keys of GPT-Neo, Doge and Llama 4: lengths beyond which the mask or the scale of a token changes in a way that
slots do not implement."""
TESTED_WINDOW = 4
"""Tokens of a sliding window in the test: fewer than those of a row, and more than those of the prefix."""


def why_unsupported(lm: TextModel, options: GenerationOptions, *, tokens: int) -> str | None:
    """Return a reason against slots that needs no test; None if there is none."""
    config = lm.base.config
    text = config.get_text_config()
    attention = attention_of(config)
    windows = [size for name in OTHER_WINDOWS if isinstance(size := getattr(text, name, None), int) and size > 0]
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
        return window_reason(min(windows), tokens)
    return None


def window_reason(window: int, tokens: int) -> str:
    """Return the reason against slots with rows that are longer than a window."""
    return f"a sliding window of {window:,} tokens, and rows of up to {tokens:,}"


def why_not_beyond_window(lm: TextModel, support: SlotSupport) -> str | None:
    """Return why rows longer than a sliding window are not supported; None if the logits equal those of rows alone.

    Raises:
        OutOfMemory: Even the short rows do not fit.
    """
    with window_set_to(lm.base.config.get_text_config(), TESTED_WINDOW):
        return find_slot_support(lm, candidates=[support]).reason


def find_slot_support(lm: TextModel, *, candidates: Sequence[SlotSupport] = ()) -> SlotSupport:
    """Return how a model supports slots, or why it does not.

    Args:
        lm: The model.
        candidates: The candidates; by default all.

    Raises:
        OutOfMemory: Even the short rows do not fit, which says nothing about the model.
    """
    reason = None
    for support in candidates or slot_candidates(lm):
        try:
            error = largest_error(lm, support=support)
        except REFUSALS as refusal:
            if is_out_of_memory(refusal):
                raise OutOfMemory(TOO_SMALL) from refusal
            logger.debug("slots, %s: %s", support, refusal)
            reason = f"{type(lm.base).__name__} does not take a cache of slots"
            continue
        logger.debug("slots, %s: logits as alone, but for %.1e of their spread", support, error)
        if error <= rounding_limit(lm):
            return support
        reason = f"{type(lm.base).__name__} changes its logits by {error:.0%} in slots"
    return SlotSupport(reason=reason)


def slot_candidates(lm: TextModel) -> list[SlotSupport]:
    """Return the candidates, the best first."""
    lean = [True, False] if attends(lm.base) else [False]
    return [SlotSupport(narrows, here) for narrows in (True, False) for here in lean]


def largest_error(lm: TextModel, *, support: SlotSupport) -> float:
    """Return the root mean square difference between logits in slots and alone, over their spread, at worst."""

    def compute(rows: list[list[int]]) -> list[list[torch.Tensor]]:
        # Exact, so that the rounding of oneDNN is not part of the difference, and no weights are packed for the check.
        slots = Slots(lm, GenerationOptions({}), **sizes_for(rows), support=support, exact=True)
        try:
            return read_in_slots(slots, rows)
        finally:
            slots.close()

    return largest_difference(lm, compute)


class Sizes(TypedDict):
    """Arguments of slots, and of a paged cache."""

    slots: int
    tokens: int
    prefix: list[int]
    seed: int


def sizes_for(rows: list[list[int]]) -> Sizes:
    """Return the arguments of slots in which the rows of a test fit, with a slot more."""
    return {"slots": len(rows) + 1, "tokens": max(LENGTHS) + STEPS + 1, "prefix": rows[0][:PREFIX], "seed": 0}


@torch.no_grad()
def largest_difference(lm: TextModel, compute: Callable[[list[list[int]]], Sequence[Sequence[torch.Tensor]]]) -> float:
    """Return the root mean square difference between logits computed alone and otherwise, over their spread, at worst.

    Args:
        lm: The model.
        compute: Returns the logits of a few rows with a common prefix: of each row after the prompt, after each further
            token, and possibly after the last one once more.
    """
    rows = [row.tolist() for row in random_rows(lm.token_ids, [length + STEPS for length in LENGTHS])]
    rows = [[*rows[0][:PREFIX], *row[PREFIX:]] for row in rows]
    with lm.evaluating():
        alone = []
        for row in rows:
            ids = torch.tensor([row], device=lm.device)
            logits = lm.base(input_ids=ids, use_cache=False).logits[0, -STEPS - 1 :].double()
            alone.append(torch.cat([logits, logits[-1:]]))
        otherwise = compute(rows)
    spread = spread_of(torch.cat(alone))
    errors = [
        (there[step].double() - here[step]).square().mean().sqrt() / spread
        for here, there in zip(alone, otherwise, strict=True)
        for step in range(len(there))
    ]
    return largest_or_infinity(torch.stack(errors))


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
