"""Test of which rows a model can generate for in one batch.

`generate` gets prompts of different lengths with left padding and an attention mask. Most architectures then produce
the same output as for each row alone, but not all: some ignore the mask, count positions from the padding, or mix the
states of rows, without saying so. So before the first generation, a few short rows are computed alone, padded, and at
equal lengths, and the logits are compared.

The loss needs less: padding is on the right, which has no effect under causal attention. A few transformers classes for
causal language models are not causal, and would learn to read their own labels.

Some models differ only in rows beyond a certain length. Testing such rows would take too long on a large model;
`padding_limit` returns that length.
"""

import logging
from collections.abc import Iterator
from typing import Any

import torch

from partita.lm.base import PADDED, BatchSupport, GenerationRequest
from partita.lm.batch_generation.generation import end_token_ids
from partita.lm.checks.logit_check import (
    REFUSALS,
    largest_or_infinity,
    random_rows,
    rounding_limit,
    spread_of,
    too_small,
)
from partita.lm.loaded_model import TextModel
from partita_schema.errors import ModelError, OutOfMemory
from partita_trainers.batch_size.device_errors import is_out_of_memory

logger = logging.getLogger(__name__)

LENGTHS = (9, 1, 5, 9)
"""Tokens of the prompts; the first and the last have equal length."""
STEPS = 2
"""Number of tokens after each prompt."""


class ForcedLogits:
    """A logits processor of transformers that forces the tokens of each row."""

    def __init__(self, rows: list[list[int]]) -> None:
        self.rows = rows
        self.step = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        wanted_B1 = torch.tensor([[row[self.step]] for row in self.rows], device=scores.device)
        self.step += 1
        return torch.full_like(scores, -torch.inf).scatter_(1, wanted_B1, 0.0)


def find_batch_support(lm: TextModel) -> BatchSupport:
    """Return which rows can share a batch, tested on short rows.

    Raises:
        OutOfMemory: Even the short rows do not fit, which says nothing about the model.
    """
    name = type(lm.base).__name__
    rows = prompts_with_answers(lm)
    alone = [logits_of(lm, [row]) for row in rows]
    if any(logits is None for logits in alone):
        return BatchSupport("one row", f"{name} cannot be checked: it does not continue rows of random tokens")
    padded = largest_error(lm, rows, alone)
    if padded <= rounding_limit(lm):
        return PADDED
    same = [index for index, length in enumerate(LENGTHS) if length == LENGTHS[0]]
    equal = largest_error(lm, [rows[index] for index in same], [alone[index] for index in same])
    if equal <= rounding_limit(lm):
        return BatchSupport("equal lengths", f"{name} {changes(padded)} beside padding")
    return BatchSupport("one row", f"{name} {changes(equal)} beside another row")


def check_causal(lm: TextModel) -> None:
    """Raise ModelError if logits depend on later tokens of the row or on padding."""
    row = prompts_with_answers(lm)[0]
    short, pad = row[: len(row) // 2], lm.tokenizer.pad_token_id

    def logits() -> Iterator[torch.Tensor]:
        yield forward(lm, short, length=len(short))
        yield forward(lm, row, length=len(row))
        yield forward(lm, [*short, *[pad] * len(short)], length=len(short))

    check_context(lm, logits(), where="other tokens", instead="choose a model that sees only the tokens before")


@torch.no_grad()
def check_context(lm: TextModel, logits: Iterator[torch.Tensor], *, where: str, instead: str) -> None:
    """Raise ModelError if the logits of a row change with what follows it. A model that raises is not checked.

    Args:
        lm: The model.
        logits: Computes the logits [T, V] of a row alone, then of longer ones that start with it: with other tokens
            after it, and with padding.
        where: What follows, besides padding, for the message.
        instead: What to do, for the message.
    """
    try:
        with lm.evaluating():
            alone, *longer = logits
    except REFUSALS as refusal:
        if is_out_of_memory(refusal):
            raise OutOfMemory(too_small(len(LENGTHS), max(LENGTHS) + STEPS)) from refusal
        logger.debug("the loss was not checked: %s", refusal)
        return
    error = max(worst_error(alone, other[: len(alone)]) for other in longer)
    logger.debug("%s and padding that follow change logits by %.1e of their spread", where, error)
    if error > rounding_limit(lm):
        raise ModelError(
            f"base_model: {type(lm.base).__name__} {changes(error)} where {where} or padding follow: it would "
            f"learn its answers by reading them; {instead}"
        )


def forward(lm: TextModel, ids: list[int], *, length: int) -> torch.Tensor:
    """Return logits [T, V] of a row, whose first `length` tokens are not padding, as for the loss."""
    ids_1T = torch.tensor([ids], device=lm.device)
    mask_1T = (torch.arange(len(ids), device=lm.device) < length).long()[None]
    more = {"attention_mask": mask_1T} if lm.config.trust_remote_code else {}
    logits: torch.Tensor = lm.base(input_ids=ids_1T, use_cache=False, **more).logits[0].double()
    return logits


def padding_limit(lm: TextModel) -> tuple[int, str] | None:
    """Return the row length in tokens beyond which padding changes a row, and why; None if there is none."""
    config = lm.base.config.get_text_config()
    rotary = getattr(config, "rope_parameters", None) or {}
    if any(kind in str(rotary) for kind in ("dynamic", "longrope")):
        trained = rotary.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", None
        )
        return int(trained or config.max_position_embeddings), "rotary positions depend on the longest row"
    chosen = getattr(config, "index_topk", None)
    if isinstance(chosen, int) and chosen > 0:
        return chosen, f"attention chooses {chosen:,} tokens, padding among them"
    return None


def changes(error: float) -> str:
    """Describe by how much logits differ from those of a row alone."""
    if error == float("inf"):
        return "gives NaN"
    return f"changes its logits by {error:.0%}" if error >= 0.01 else f"changes its logits by {error:.2%}"


def prompts_with_answers(lm: TextModel) -> list[list[int]]:
    """Return prompts with their next tokens, without end tokens, at which `generate` would stop."""
    ends = end_token_ids(lm.base, tokenizer=lm.tokenizer)
    token_ids = [token for token in lm.token_ids if token not in ends] or lm.token_ids
    return [row.tolist() for row in random_rows(token_ids, [length + STEPS for length in LENGTHS])]


def largest_error(lm: TextModel, rows: list[list[int]], alone: list[Any]) -> float:
    """Return the error of batched logits against those of single rows; infinity if the model raises."""
    together = logits_of(lm, rows)
    worst = worst_error(torch.cat(alone), together) if together is not None else float("inf")
    logger.debug("%s rows in a batch: logits as alone, but for %.1e of their spread", len(rows), worst)
    return worst


def worst_error(wanted: torch.Tensor, found: torch.Tensor) -> float:
    """Return the root mean square difference of logits [..., V] over their spread, at worst; infinity for NaN."""
    return largest_or_infinity((found - wanted).square().mean(dim=-1).sqrt() / spread_of(wanted))


@torch.no_grad()
def logits_of(lm: TextModel, rows: list[list[int]]) -> torch.Tensor | None:
    """Return the logits [B, STEPS + 1, V] that `generate` computes after each prompt and each further token.

    Returns None if the model raises.
    """
    from transformers import GenerationConfig, LogitsProcessorList

    requests = [GenerationRequest(row[:-STEPS], STEPS + 1) for row in rows]
    settings = GenerationConfig(
        max_new_tokens=STEPS + 1,
        do_sample=False,
        pad_token_id=lm.tokenizer.pad_token_id,
        use_cache=True,
        output_logits=True,
        return_dict_in_generate=True,
    )
    forced = LogitsProcessorList([ForcedLogits([[*row[-STEPS:], row[-1]] for row in rows])])
    try:
        with lm.evaluating():
            lm.forget_rows()
            prompts = lm.batch_prompts(requests, beams=1)
            output = lm.base.generate(**prompts.inputs, generation_config=settings, logits_processor=forced)
    except REFUSALS as refusal:
        if is_out_of_memory(refusal):
            raise OutOfMemory(too_small(len(LENGTHS), max(LENGTHS) + STEPS)) from refusal
        logger.debug("%s rows in a batch: %s", len(rows), refusal)
        return None
    return torch.stack([step.double() for step in output.logits], dim=1)
