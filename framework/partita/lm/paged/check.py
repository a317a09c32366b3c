"""Test of whether a model supports the paged KV cache.

With the paged cache, a model gets the keys of all rows from its cache, and no attention mask. A model that changes keys
or masks before its attention would give wrong answers without an error. So before the first generation, the logits of a
few short rows are compared with those of each row alone, with a sliding window shorter than the rows if the model has
one.
"""

import logging
from contextlib import nullcontext

import torch

from partita.lm.base import GenerationOptions, SlotRequest
from partita.lm.checks.logit_check import REFUSALS, rounding_limit
from partita.lm.loaded_model import TextModel
from partita.lm.model_config.attention_windows import smallest_span, window_set_to
from partita.lm.paged.attention import PagedAttention, ReferenceAttention
from partita.lm.paged.next_token import why_not_on_device
from partita.lm.paged.slots import PagedSlots
from partita.lm.paged.varlen import VarlenAttention, why_no_varlen
from partita.lm.precision import reads_inputs_on_host
from partita.lm.slots.check import STEPS, TESTED_WINDOW, TOO_SMALL, largest_difference, sizes_for
from partita_schema.errors import ModelError, OutOfMemory
from partita_trainers.batch_size.device_errors import is_out_of_memory

logger = logging.getLogger(__name__)


def open_attention(lm: TextModel) -> PagedAttention:
    """Return the attention for the model's device and dtype: torch's varlen kernel, or the reference."""
    if why_no_varlen(lm.device, lm.base.dtype) is None:
        return VarlenAttention(lm.device)
    return ReferenceAttention()


def wants_pages(lm: TextModel, options: GenerationOptions) -> bool:
    """Return whether the options ask for a paged KV cache, or leave the choice and the device has a kernel for it."""
    if options.kv_cache == "auto":
        return why_no_varlen(lm.device, lm.base.dtype) is None
    return options.kv_cache == "paged"


def check_paged(reason: str | None) -> None:
    """Raise ModelError if there is a reason against a paged KV cache that the options ask for."""
    if reason is not None:
        raise ModelError(f"generation.kv_cache: paged is not available here: {reason}; write kv_cache: auto")


def why_unsupported_options(lm: TextModel, options: GenerationOptions) -> str | None:
    """Return a reason against the paged cache that needs no test, once slots are supported; None if there is none."""
    if getattr(lm.base.config.get_text_config(), "attention_chunk_size", None):
        return "layers that attend to chunks"
    if lm.device.type == "cuda" and reads_inputs_on_host(lm.module):
        return "8-bit layers look for outliers on the host in each pass; llm_int8_threshold: 0 turns that off"
    return why_not_on_device(options)


def why_not_paged(lm: TextModel) -> str | None:
    """Return why the model does not support the paged cache; None if its logits are those of rows alone.

    Raises:
        OutOfMemory: Even the short rows do not fit, which says nothing about the model.
    """
    text = lm.base.config.get_text_config()
    windowed = window_set_to(text, TESTED_WINDOW) if smallest_span(text) is not None else nullcontext()
    try:
        with windowed:
            error = largest_difference(lm, lambda rows: paged_logits(lm, rows))
    except REFUSALS as refusal:
        if is_out_of_memory(refusal):
            raise OutOfMemory(TOO_SMALL) from refusal
        logger.debug("paged cache: %s", refusal)
        return f"{type(lm.base).__name__} does not take a paged cache"
    logger.debug("paged cache: logits as alone, but for %.1e of their spread", error)
    if error <= rounding_limit(lm):
        return None
    return f"{type(lm.base).__name__} changes its logits by {error:.0%} with a paged cache"


def paged_logits(lm: TextModel, rows: list[list[int]]) -> list[list[torch.Tensor]]:
    """Return logits of every row after the prompt, and after each further token."""
    slots = PagedSlots(lm, GenerationOptions({}), **sizes_for(rows), attention=open_attention(lm))
    try:
        requests = [SlotRequest(row[:-STEPS], STEPS + 1, index) for index, row in enumerate(rows)]
        new: list[torch.Tensor] = []
        for group in ([0], [1, 2]):
            begun = slots.begin([requests[index] for index in group])
            new += begun.unbind()
        found = [[logits_V] for logits_V in new]
        state = slots.state.first(len(rows))
        for step in range(STEPS):
            state.ids.copy_(torch.tensor([row[len(row) - STEPS + step] for row in rows]))
            logits_NV = slots.runner.step.logits(state)
            state.advance(state.ids)
            for logits_of_row, logits_V in zip(found, logits_NV, strict=True):
                logits_of_row.append(logits_V)
        # Some models copy constants to the device in each pass, which a graph cannot capture.
        slots.runner(len(rows))
        return found
    finally:
        slots.close()
