"""Which rows a model can answer together in one batch of the library, found out on the model itself.

`generate` reads prompts of different lengths with padding on the left and a mask. Most architectures then answer each
row as they would alone, but not all: some ignore the mask, count positions from the padding, or mix the states of rows.
None of them says so. So a few short rows are read and continued alone, padded, and at equal lengths, before the first
answer, and the logits are compared.

The loss needs less: rows are padded on the right, which changes nothing where a token sees only what stands before it.
A few transformers classes for causal language models do not keep to that, and would learn to read their own answers.

Some models differ only in rows beyond a certain length. Such rows are not tried, they would take too long on a large
model: `padding_limit` knows where they begin.
"""

import logging
from typing import TYPE_CHECKING, Any

import torch

from partita.lm.base import PADDED, BatchWay, GenerationRequest
from partita.lm.generation import end_token_ids, prompt_inputs
from partita.lm.packing_check import rounding_limit
from partita_schema.errors import ModelError, OutOfMemory
from partita_trainers.batch_size.memory import is_out_of_memory

if TYPE_CHECKING:
    from partita.lm.huggingface import HuggingFaceModel

logger = logging.getLogger(__name__)

LENGTHS = (9, 1, 5, 9)
"""Tokens of the prompts; the first and the last are equally long."""
STEPS = 2
"""Tokens that each prompt is continued by."""
REFUSALS = (TypeError, ValueError, RuntimeError, IndexError, AttributeError, KeyError, AssertionError)
"""What models raise on inputs that they are not made for."""
TOO_SMALL = (
    f"{len(LENGTHS)} rows of {max(LENGTHS) + STEPS} tokens do not fit in memory beside the model; free some, or write "
    "quantization: {bits: 4} or a smaller base_model"
)


class ForcedLogits:
    """A logits processor of transformers that chooses the tokens of given rows, whatever the model would choose."""

    def __init__(self, rows: list[list[int]]) -> None:
        self.rows = rows
        self.step = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        wanted_B1 = torch.tensor([[row[self.step]] for row in self.rows], device=scores.device)
        self.step += 1
        return torch.full_like(scores, -torch.inf).scatter_(1, wanted_B1, 0.0)


def find_batch_way(lm: "HuggingFaceModel") -> BatchWay:
    """Which rows can be answered together, as far as rows of any length show it.

    Raises OutOfMemory, which says nothing about the model.
    """
    name = type(lm.base).__name__
    rows = random_rows(lm)
    alone = [logits_of(lm, [row]) for row in rows]
    if any(found is None for found in alone):
        return BatchWay("one row", f"{name} cannot be checked: it does not continue rows of random tokens")
    padded = largest_error(lm, rows, alone)
    if padded <= rounding_limit(lm):
        return PADDED
    same = [place for place, length in enumerate(LENGTHS) if length == LENGTHS[0]]
    equal = largest_error(lm, [rows[place] for place in same], [alone[place] for place in same])
    if equal <= rounding_limit(lm):
        return BatchWay("equal lengths", f"{name} {changes(padded)} beside padding")
    return BatchWay("one row", f"{name} {changes(equal)} beside another row")


@torch.no_grad()
def check_causal(lm: "HuggingFaceModel") -> None:
    """Raises ModelError where logits depend on what follows a token: later tokens of its row, or padding."""
    row = random_rows(lm)[0]
    short, pad = row[: len(row) // 2], lm.tokenizer.pad_token_id
    try:
        with lm.evaluating():
            alone, followed, padded = (
                forward(lm, ids, length=length)[: len(short)]
                for ids, length in (
                    (short, len(short)),
                    (row, len(row)),
                    ([*short, *[pad] * len(short)], len(short)),
                )
            )
    except REFUSALS as refusal:
        if is_out_of_memory(refusal):
            raise OutOfMemory(TOO_SMALL) from refusal
        logger.debug("the loss was not checked: %s", refusal)
        return
    error = max(relative_error(alone, followed), relative_error(alone, padded))
    logger.debug("tokens that follow change logits by %.1e of their spread", error)
    if error > rounding_limit(lm):
        raise ModelError(
            f"base_model: {type(lm.base).__name__} {changes(error)} where other tokens or padding follow: it would "
            "learn its answers by reading them; choose a model that sees only the tokens before"
        )


def forward(lm: "HuggingFaceModel", ids: list[int], *, length: int) -> torch.Tensor:
    """Logits [T, V] of a row whose first `length` tokens are no padding, as the loss computes them."""
    ids_1T = torch.tensor([ids], device=lm.device)
    mask_1T = (torch.arange(len(ids), device=lm.device) < length).long()[None]
    more = {"attention_mask": mask_1T} if lm.config.trust_remote_code else {}
    logits: torch.Tensor = lm.base(input_ids=ids_1T, use_cache=False, **more).logits[0].double()
    return logits


def padding_limit(lm: "HuggingFaceModel") -> tuple[int, str] | None:
    """Tokens of a row beyond which padding changes it though it does not change shorter ones, and why."""
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
    """Say how far logits are from those alone."""
    if error == float("inf"):
        return "gives no numbers"
    return f"changes its logits by {error:.0%}" if error >= 0.01 else f"changes its logits by {error:.2%}"


def random_rows(lm: "HuggingFaceModel") -> list[list[int]]:
    """Prompts with the tokens that continue them, none of which ends a text: `generate` would stop there."""
    chance = torch.Generator().manual_seed(0)
    ends = end_token_ids(lm.base, tokenizer=lm.tokenizer)
    ordinary = torch.tensor([token for token in lm.token_ids if token not in ends] or lm.token_ids)
    lengths = [length + STEPS for length in LENGTHS]
    return [ordinary[torch.randint(len(ordinary), (length,), generator=chance)].tolist() for length in lengths]


def largest_error(lm: "HuggingFaceModel", rows: list[list[int]], alone: list[Any]) -> float:
    """Error of the logits of rows in one batch against those alone; infinite where the model refuses the batch."""
    together = logits_of(lm, rows)
    worst = relative_error(torch.cat(alone), together) if together is not None else float("inf")
    logger.debug("%s rows in a batch: logits as alone, but for %.1e of their spread", len(rows), worst)
    return worst


def relative_error(wanted: torch.Tensor, found: torch.Tensor) -> float:
    """Root mean square difference of logits [..., V] over their spread, the worst place; infinite for NaN."""
    spread = (wanted - wanted.mean(dim=-1, keepdim=True)).std()
    worst = float(((found - wanted).square().mean(dim=-1).sqrt() / spread).max())
    return worst if worst == worst else float("inf")


@torch.no_grad()
def logits_of(lm: "HuggingFaceModel", rows: list[list[int]]) -> torch.Tensor | None:
    """Return the logits [B, STEPS + 1, V] that `generate` computes after each prompt and each of its further tokens.

    None where the model refuses the rows.
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
            inputs = prompt_inputs(lm, requests, beams=1)
            found = lm.base.generate(**inputs, generation_config=settings, logits_processor=forced)
    except REFUSALS as refusal:
        if is_out_of_memory(refusal):
            raise OutOfMemory(TOO_SMALL) from refusal
        logger.debug("%s rows in a batch: %s", len(rows), refusal)
        return None
    return torch.stack([step.double() for step in found.logits], dim=1)
